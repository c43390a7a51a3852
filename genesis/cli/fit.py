"""`genesis fit` and `genesis validate`: LightningCLI over our module and data, with our callbacks as top-level keys.

model        GenesisModule        data        CorpusDataModule        trainer     Lightning's Trainer
checkpoint   AsyncProcessCheckpoint   counters    TokenCounters       schedule    SkipAwareLR
verification CheckpointVerification     telemetry   TelemetryOptions
run_dir      where checkpoints, metrics and configs of the run lie
fork         of `fit`: a name; the run continues from --ckpt_path in a directory of that name beside run_dir
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from genesis.base.errors import QuietExit, UserError, check_is_named, naming
from genesis.base.run_directory import RunDirectory
from genesis.cli.adapter import (
    check_has_adapters,
    find_base,
    find_continued,
    find_format,
    note_frozen_head,
    start_adapter,
)
from genesis.cli.attention import build_policy, build_proofs, resolve_attention
from genesis.cli.chat_template import RecordChatTemplate, find_chat_template
from genesis.cli.class_change import guard_class_changes
from genesis.cli.continued import choose_sizes, keep_choices, note_dropout, read_continued
from genesis.cli.fit_checks import (
    SECTIONS,
    check_same_model,
    explain_devices,
    is_reward_code_allowed,
    list_loggers,
    place_run,
    report_export,
    report_other_choices,
)
from genesis.cli.help import PlainParser
from genesis.cli.lost_rank import LostRankError, is_lost_connection
from genesis.cli.options import explain_empty_path
from genesis.cli.quiet import quiet_lightning
from genesis.cli.tokenizer_identity import keep_tokenizer_hash
from genesis.cli.trainer import GenesisTrainer, complete_trainer, read_recipe
from genesis.cli.type_errors import explain_error, explain_types, known_keys
from genesis.cli.used_directory import check_continues, check_fork
from genesis.data.paths import SOURCE_LISTS, TOKENIZER_PATHS, find_path, find_source_path, record_paths
from genesis.generate.checkpoint_reference import LATEST, find_recorded, read_reference
from genesis.generate.teacher import find_teacher, load_teacher
from genesis.model.attend.table import AUTO
from genesis.model.device_proofs import LOSS_PROOF, list_mixer_proofs
from genesis.model.float8 import check_float8, list_float8_proofs
from genesis.model.recipe import check_mixers, dump_decoder_config
from genesis.objectives.find import find_objective
from genesis.objectives.objective import FitContext, Prepared, RecipeContext
from genesis.optim.recipe import DEFAULT
from genesis.recipe.deprecated import describe_deprecated, rename_in_arguments, rename_in_yaml
from genesis.recipe.resolved import ResolvedRecipe, complete_arguments, replace_in_recipes
from genesis.recipe.yaml import check_is_yaml, dump_yaml
from genesis.strategies import Replicated, Sharded
from genesis.train.csv_log import CSVLog
from genesis.train.data_module import CorpusDataModule
from genesis.train.data_telemetry import DataTelemetry
from genesis.train.module import GenesisModule, find_place
from genesis.train.progress import GenesisProgressBar
from genesis.train.start_report import StartReport
from genesis.train.telemetry import TelemetryOptions, build_telemetry, outlast_hang_watch
from genesis_callbacks import AsyncProcessCheckpoint, CheckpointVerification, Heartbeat, SkipAwareLR, TokenCounters
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.run_directory import MANIFEST_NAME, read_run_dir
from genesis_callbacks.checkpoint import list_committed
from genesis_callbacks.checkpoint.lineage import check_not_in_use
from genesis_callbacks.phases import note_progress

_MAX_SEED = 2**32 - 1  # numpy's
_TELEMETRY_LEFT = (
    r"Be aware that when using `ckpt_path`, callbacks .*: "
    r"\[('genesis_callbacks\.(Throughput|StepTimer|LossWatch|GradientHealth|MemoryWatch)'(, )?)+\]\."
)
"""Lightning's warning of state that no callback takes, if it is about telemetry alone."""

set_parsing_settings(config_read_mode_fsspec_enabled=False)  # Lightning's import lets every value be an address
guard_class_changes()


class GenesisParser(PlainParser, LightningArgumentParser):
    """Reports a mistake in one line, with the nearest key, and accepts deprecated names of options.

    An option of the command line for the length of a run, or for its rate, replaces other forms of the same in recipes
    (`genesis.recipe.run_length`).
    """

    recipes: ClassVar[tuple[Path, ...]] = ()
    """The files that were read."""

    def parse_args(self, args: Sequence[str] | None = None, *a: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Returns the options of a command line, with deprecated names and other forms of them replaced."""
        renamed, found = rename_in_arguments(sys.argv[1:] if args is None else args)
        _warn_of_deprecated(found)
        in_files, lines = replace_in_recipes(renamed)
        for line in lines:
            rank_zero_info(line)
        return super().parse_args(complete_arguments(renamed, in_files), *a, **kwargs)

    def parse_string(self, cfg_str: str, *args: Any, **kwargs: Any) -> Namespace:
        """Returns the options in a YAML text, whose deprecated names it replaces."""
        renamed, found = rename_in_yaml(cfg_str)
        _warn_of_deprecated(found)
        return super().parse_string(renamed, *args, **kwargs)

    def parse_path(self, cfg_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """Returns the recipe in the file `cfg_path`."""
        check_is_yaml(cfg_path, SECTIONS)
        GenesisParser.recipes += (Path(cfg_path),)
        return super().parse_path(cfg_path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints one line and exits with status 2."""
        for path in self.recipes:
            check_mixers(path)  # jsonargparse names neither the list nor the entry
        line = explain_error(explain_empty_path(" ".join(message.split())), known_keys(self))
        print(f"genesis: error: {line}", file=sys.stderr)
        sys.exit(2)


def _warn_of_deprecated(names: Sequence[str]) -> None:
    for name in names:
        rank_zero_warn(describe_deprecated(name), category=FutureWarning)


class SaveRecipe(Callback):
    """Writes the resolved recipe into the run's directory: config.yaml, or config.resume-1.yaml when the run resumes.

    The callback also records the paths of the run's data relative to the run's directory, so that commands find the
    data from other working directories, and passes the recipe to the run's loggers as hyperparameters.
    """

    def __init__(self, run_dir: Path, recipe: dict[str, Any]) -> None:
        self._run_dir, self._recipe = run_dir, recipe

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Passes the recipe to the loggers, before Lightning stops accepting hyperparameters."""
        if stage == "fit":
            for logger in trainer.loggers:
                logger.log_hyperparams(self._recipe)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the recipe on rank 0, and cuts the log. At this point no check can refuse the run any more."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, CSVLog):
                logger.continue_after(trainer.global_step)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = RunDirectory(self._run_dir).next_recipe()
        with naming(path):
            path.write_text(dump_yaml(self._recipe), encoding="utf-8")
        record_paths(self._run_dir, self._recipe)


class GenesisCLI(LightningCLI):
    """LightningCLI with fixed model and data classes and our callbacks."""

    def __init__(self, subcommand: str, arguments: list[str]) -> None:
        self._command = subcommand
        self._allows_reward_code = is_reward_code_allowed(arguments)
        GenesisParser.recipes = ()
        super().__init__(
            GenesisModule,
            CorpusDataModule,
            trainer_class=GenesisTrainer,
            save_config_callback=None,
            parser_class=GenesisParser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            seed_everything_default=0,
            trainer_defaults={
                # Validation under inference mode leaves tensors that training can't use (sharded parameters).
                "inference_mode": False,
                "num_sanity_val_steps": 0,
                "use_distributed_sampler": False,
                "gradient_clip_val": 1.0,
                "strategy": "replicated",
                "max_epochs": -1,
                # Validation intervals count steps across the ends of epochs.
                "check_val_every_n_epoch": None,
                # `genesis model describe` prints more.
                "enable_model_summary": False,
            },
            parser_kwargs={"prog": "genesis", subcommand: {"prog": f"genesis {subcommand}"}},
            # With None, Lightning reads sys.argv, which a launcher repeats for further ranks.
            args=None if sys.argv[1:] == arguments else arguments,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning asks the instance
        """Returns the Trainer's method that is this command, with the arguments that this class sets itself."""
        # Lightning builds a parser for each method here, and the one of the other command would serve nobody.
        data = {"train_dataloaders", "val_dataloaders"} if self._command == "fit" else {"dataloaders"}
        return {self._command: {"model", "datamodule", "weights_only", *data}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds our callbacks and the options of the run's directory."""
        parser.add_argument("--run_dir", type=str, default="runs/default", help="directory of the run")
        parser.add_argument(
            "--fork",
            type=str | None,
            default=None,
            help="name of a new run next to run_dir that starts from --ckpt_path; run_dir is not changed",
        )
        parser.add_argument(
            "--allow_reward_code",
            type=bool,
            default=False,
            help="whether to run the Python code of data.prompts (rewards, environment); not allowed in a recipe",
        )
        if self._command == "validate":
            text = "also write the figures as JSON to this file"
            parser.add_argument("--json", type=str | None, default=None, help=text)
        parser.add_class_arguments(TokenCounters, "counters", skip={"unit"}, sub_configs=True)
        parser.callback_keys.append("counters")
        parser.add_lightning_class_args(SkipAwareLR, "schedule")
        parser.add_lightning_class_args(CheckpointVerification, "verification")
        own: set[str | int] = {"recipe", "identity", "drift_policy"}  # this class sets them; users cannot
        parser.add_class_arguments(AsyncProcessCheckpoint, "checkpoint", skip=own, sub_configs=True)
        parser.callback_keys.append("checkpoint")
        parser.set_defaults({"model.optimizer": {"class_path": DEFAULT}})  # so that its options need no class
        parser.add_argument("--telemetry", type=TelemetryOptions, default=TelemetryOptions())
        parser.link_arguments(("run_dir", "fork"), "checkpoint.run_dir", compute_fn=place_run)
        # A logger writes into the run's directory; in a list of loggers each one names its own directory.
        parser.link_arguments(("run_dir", "fork"), "trainer.logger.init_args.save_dir", compute_fn=place_run)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: a checkpoint's hyperparameters must not override what the user wrote."""

    def _set_seed(self) -> None:
        """Checks the options that belong to no class, and sets the seed."""
        run_dir = read_run_dir(self._get(self.config, "run_dir"))
        if self._get(self.config, "allow_reward_code") and not self._allows_reward_code:
            raise UserError("allow_reward_code is in a recipe, which must not allow itself; give it as an argument")
        fork, seed = self._get(self.config, "fork"), self._get(self.config, "seed_everything")
        if fork is not None and (fork == ".." or not fork.strip() or Path(fork).name != fork):
            raise UserError(f"--fork is {fork!r}: give a name without a directory; the fork lies next to {run_dir}")
        try:
            super()._set_seed()
        except ValueError as error:
            raise UserError(f"seed_everything is {seed}: give a whole number from 0 to {_MAX_SEED}") from error

    def before_instantiate_classes(self) -> None:
        """Resolves the Trainer's `auto` values, and finds the data of a run that continues elsewhere."""
        is_fit = self.subcommand == "fit"
        recipe = self._complete()
        recipe.check_run(is_fit=is_fit)
        wanted, run_dir = recipe.get("ckpt_path"), Path(recipe.get("run_dir"))
        check_is_named(wanted, "ckpt_path")
        self._reference = reference = None if wanted is None else read_reference(wanted, run_dir=run_dir)
        recipe = self._complete(complete_trainer(recipe, None if reference is None else read_recipe(reference)))
        own = Path(place_run(str(run_dir), recipe.get("fork")))
        if is_fit:
            RunDirectory(own).check_own()
        self._adapter_base, found = find_base(recipe, reference, own)
        self._format = (
            find_format(reference, is_fit=is_fit) if self._adapter_base is None else self._adapter_base.format
        )
        recipe = self._complete(found)
        self._continued = read_continued(reference, own, recipe.get("checkpoint.restore"))
        kept = keep_choices(recipe, None if self._continued is None else self._continued.recipe)
        if is_fit:
            note_dropout(recipe, kept)
            note_frozen_head(recipe)
        recipe = self._complete(kept)
        objective = find_objective(recipe.get("model.objective"))
        continued = (lambda: None) if reference is None else partial(find_continued, reference)
        self._identity, options = objective.resolve(recipe, RecipeContext(continued, own, find_recorded))
        self._learned, found = find_chat_template(self._complete(options))
        recipe = self._complete(found)
        if reference is not None:
            self._find_data(self.config[str(self.subcommand)], recipe, reference.run.path)
            recipe = self._complete()
        self._recipe = self._complete(choose_sizes(recipe, is_fit=is_fit))

    def _complete(self, found: Mapping[str, Any] | None = None) -> ResolvedRecipe:
        """Gives options values that follow from others, for the classes that are built, and returns the recipe."""
        config = self.config[str(self.subcommand)]
        for name, value in (found or {}).items():
            config[name] = Namespace(**value) if isinstance(value, dict) else value  # type: ignore[no-untyped-call]
        return ResolvedRecipe.complete(config.as_dict(), "the recipe")

    @staticmethod
    def _find_data(config: Namespace, recipe: ResolvedRecipe, run_dir: Path) -> None:
        """Finds the data of a run that continues, where the paths of its recipe lead nowhere."""
        for key in map(".".join, TOKENIZER_PATHS):
            given = recipe.get(key)
            if given is not None and not Path(given).exists():
                found = find_path(given, run_dir, recipe.content, what="the corpus", remedy=f"give it by --{key}")
                config[key] = os.path.relpath(found)
        sources = (source for kind in SOURCE_LISTS for source in config.get(f"data.{kind}.sources") or ())
        for source in sources:
            source["paths"] = tuple(
                find_source_path(path, run_dir, recipe.content, name=source["name"]) for path in source["paths"]
            )

    def instantiate_classes(self) -> None:
        """Builds module, data, callbacks and Trainer; turns their ValueErrors into user errors."""
        try:
            super().instantiate_classes()
            self.datamodule.allows_reward_code = self._allows_reward_code
            self.model.base_format = self._format
            if self._adapter_base is not None:
                start_adapter(self.model, self._adapter_base)
        except (ValueError, MisconfigurationException) as error:
            line = " ".join(str(error).split())
            self._check_strategy_name()
            raise UserError(explain_types(line)) from error

    def _check_strategy_name(self) -> None:
        """Refuses a class that is given as the name of a strategy, which Lightning looks up among its own names.

        Raises:
            UserError: The name is that of a class.
        """
        name = self.config[str(self.subcommand)].get("trainer.strategy")
        if isinstance(name, str) and "." in name:
            raise UserError(
                f"trainer.strategy is {name!r}, which is no name of Lightning's: give a class as "
                f"--trainer.strategy.class_path {name}"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the Trainer with the run's own log and progress bar."""
        self._dump_config()
        fork = self._recipe.get("fork")
        run_dir = Path(place_run(self._recipe.get("run_dir"), fork))
        if fork is not None:
            check_fork(run_dir, self._recipe.get("ckpt_path"))
        # The recipe in the fork describes the fork, which resumes from its own directory.
        self.config_dump.update(run_dir=str(run_dir), fork=None)
        self.config_dump.pop("allow_reward_code", None)
        self.config_dump["checkpoint"]["on_existing"] = "refuse"  # consent for this start alone
        if self._adapter_base is not None:  # its scope follows from the adapters
            self.config_dump["checkpoint"]["scope"] = None
        self.config_dump["model"]["decoder"] = dump_decoder_config(self.model.decoder_config)
        self.checkpoint: AsyncProcessCheckpoint = self._get(self.config_init, "checkpoint")
        self.datamodule.read_for(self.model.objective)
        self.config_dump["data"]["packing"] = self.datamodule.training.packing
        self.checkpoint.recipe = self.config_dump
        self.datamodule.recorded_identity = {} if self._continued is None else self._continued.identity
        identity = keep_tokenizer_hash(self.datamodule.identity, self._reference, self._find_tokenizer())
        self.checkpoint.identity = {**identity, **self._identity, **self._prepare_objective(run_dir)}
        # Validating an earlier checkpoint must not write into the log of the run that trains.
        configured = self._get(self.config_init, "trainer").get("logger")
        loggers = list_loggers(configured, run_dir) if self.subcommand == "fit" else False
        telemetry: TelemetryOptions = self._get(self.config_init, "telemetry")
        callbacks: list[Callback] = [SaveRecipe(run_dir, self.config_dump), DataTelemetry(), StartReport()]
        callbacks.append(RecordChatTemplate(run_dir, self._learned))
        if self.subcommand == "fit":
            callbacks += build_telemetry(telemetry, run_dir, has_loss=self.model.objective.reports_loss)
        if self._recipe.get("trainer.enable_progress_bar") is not False:
            callbacks.append(GenesisProgressBar())
        # Bar and heartbeat come after all other callbacks, so that they have the counters of the current step.
        callbacks.append(Heartbeat(run_dir))
        self.trainer_defaults["callbacks"] = callbacks
        try:
            trainer = super().instantiate_trainer(default_root_dir=str(run_dir), logger=loggers, **kwargs)
        except TypeError as error:
            raise explain_devices(self._recipe.get("trainer.devices"), error) from error
        if isinstance(trainer.strategy, Replicated | Sharded):
            trainer.strategy.start.recipe = self.config_dump
        self._start_attention(trainer)
        outlast_hang_watch(trainer)
        return trainer

    def _start_attention(self, trainer: Trainer) -> None:
        """Resolves the kernel of attention, completes the recipe, and lets the kernel be proved before it is used."""
        place, given = find_place(trainer, self.model.decoder_config), self.model.attention
        restored = None if self._reference is None else read_recipe(self._reference)
        if self.model.decoder_config.body is not None and given != AUTO:
            raise UserError(f"model.attention is {given}, and a model of another library has its own: leave it out")
        is_own = self.model.decoder_config.body is None
        found = resolve_attention(given, place, restored, is_shown=is_own)
        self.model.attention = self.config_dump["model"]["attention"] = found
        if self.subcommand == "validate" and restored is not None:
            check_same_model(self.config_dump, restored)
            report_other_choices(self.config_dump, restored)
        proofs = build_proofs(
            self.model, self.config_dump, place, self.datamodule.training.options.seq_len, is_given=given != AUTO
        )
        others = (LOSS_PROOF, *list_mixer_proofs(self.model.decoder_config))
        self.checkpoint.device_proofs = (*proofs, *others, *list_float8_proofs(self.model.float8))
        self.checkpoint.drift_policy = build_policy(place)

    def _find_tokenizer(self) -> str | None:
        keys = ("data.stream.tokenizer", "data.prompts.tokenizer", "data.corpus")
        return next((path for key in keys if (path := self._recipe.get(key))), None)

    def _prepare_objective(self, run_dir: Path) -> Mapping[str, str]:
        """Lets the objective prepare the fit, completes the recipe, and returns its part of the identity."""
        tokenizer = self._find_tokenizer()
        context = FitContext(
            self.datamodule.training,
            tokenizer=None if tokenizer is None else Path(tokenizer),
            has_adapters=self.model.adapter_config is not None,
            is_training=self.subcommand == "fit",
            recorded={} if self._continued is None else self._continued.identity,
            directory=RunDirectory(run_dir).reference,
            find_teacher=find_teacher,
            load_teacher=load_teacher,
            note=lambda: note_progress(self.trainer),  # which is built when it is called
        )
        prepared: Prepared = self.model.objective.prepare_fit(context)
        if prepared.options:
            self.config_dump["model"]["objective"]["init_args"].update(prepared.options)
        return prepared.identity

    def _run_subcommand(self, subcommand: str) -> None:
        # Telemetry may be switched off at any time, and validation needs none: its state may be left in a checkpoint.
        warnings.filterwarnings("ignore", message=_TELEMETRY_LEFT, category=UserWarning)
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            lost = self.checkpoint.lost_ranks
            if lost is None and getattr(error, "ends_all_ranks", False) and self.trainer.global_rank:
                raise QuietExit(getattr(error, "exit_status", 1)) from error  # rank 0 lives and has the same error
            if lost is None or not is_lost_connection(error):
                raise
            if not self.checkpoint.reports_lost_ranks:
                raise QuietExit(LostRankError.exit_status) from error
            committed = list_committed(self.checkpoint.directory)  # only rank 0 may know of the last save yet
            last = f"the newest checkpoint is {committed[-1][0]}" if committed else "no checkpoint is saved yet"
            raise LostRankError(
                f"{lost}, and the other ranks cannot continue; {last}: restart the run with --ckpt_path latest"
            ) from error

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        wanted = arguments.get("ckpt_path")
        if subcommand == "fit":
            self._check_strategy()
            check_not_in_use(self.checkpoint.directory)
        if wanted is not None:
            arguments["ckpt_path"] = self._find(wanted)
        if subcommand == "fit":
            check_continues(self.checkpoint.directory, arguments["ckpt_path"], self.checkpoint.on_existing)
        self.model.is_restored = arguments["ckpt_path"] is not None
        if subcommand == "fit" and not self.model.is_restored:
            report_export(self.model.decoder_config)
        if subcommand == "validate" and arguments["ckpt_path"] is None:
            place = f"{self.checkpoint.directory} has none" if wanted is not None else "none is given"
            raise UserError(f"validation needs a checkpoint, but {place}; give one by --ckpt_path")
        if subcommand == "validate" and self._adapter_base is not None:
            check_has_adapters(arguments["ckpt_path"], self._adapter_base)
        return arguments

    def _check_strategy(self) -> None:
        """Refuses options that do not fit the model, before ranks start, each of which would refuse them."""
        try:
            self.model.check_strategy(self.datamodule, self.trainer.strategy, is_training=True)
            check_float8(self.model.decoder_config, self.model.float8)
            if self.model.decoder_config.body is not None:  # only its library knows what it refuses
                self.model.build_decoder()
        except UserError:
            if self.trainer.local_rank == 0:  # of each node: a directory may be missing on one of them
                raise
            raise QuietExit(UserError.exit_status) from None

    def _find(self, wanted: str) -> Path | None:
        """Returns the checkpoint for `wanted`; None for `latest` if this run has no checkpoint yet.

        Of this run's own, the newest that verifies is taken and damaged ones are quarantined. Where this run is a fork,
        nothing of the other run is renamed.
        """
        reference = read_reference(wanted, run_dir=Path(self._recipe.get("run_dir")))
        run_dir = self.checkpoint.directory.parent
        is_own = reference.kind == "run" and reference.path.resolve() == run_dir
        if is_own and reference.selector in (None, LATEST):
            newest: Path | None = self.checkpoint.latest()
            if newest is None and reference.selector is None:
                raise UserError(f"{run_dir} has no committed checkpoint; `genesis fit` writes them")
            return newest
        found = reference.find_checkpoint(level="deep")
        if not (found / MANIFEST_NAME).is_file():
            raise UserError(
                f"{found} is not a checkpoint (it has no {MANIFEST_NAME}); give a run, RUN/best, RUN/STEP, or latest"
            )
        return found


def fit_main(argv: list[str]) -> int:
    """Trains. Returns 0, or 128 + n if signal n stopped the run."""
    with quiet_lightning():
        cli = GenesisCLI("fit", ["fit", *argv])
    signal_number = cli.checkpoint.stopped_by_signal
    if signal_number and cli.trainer.is_global_zero:
        saved = cli.checkpoint.last_saved
        name = signal.Signals(signal_number).name
        print(f"genesis: stopped by {name}; resume from {saved} with --ckpt_path latest", file=sys.stderr)
    return 128 + signal_number if signal_number else 0


def validate_main(argv: list[str]) -> int:
    """Validates. Returns 0."""
    with quiet_lightning():
        cli = GenesisCLI("validate", ["validate", *argv])
    out = cli.config["validate"]["json"]
    if out is not None and cli.trainer.is_global_zero:
        figures = {name: float(value) for name, value in sorted(cli.trainer.callback_metrics.items())}
        replace_file(Path(out).resolve(), (json.dumps(figures, indent=1) + "\n").encode())
    return 0
