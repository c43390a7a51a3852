"""Restores a checkpoint of the engine into a Lightning Trainer, before or after its strategy has set up."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from genesis_callbacks.base.errors import numbered

from ._data_position import (
    LostDataPositionWarning,
    OnLostDataPosition,
    count_epoch,
    describe_reset_position,
    place,
    read_saved_states,
)
from ._trainer_state import HasRankState, read_rank_role
from .base.checkpoint_errors import CheckpointError
from .base.local_shards import LocalShard
from .base.manifest import Ancestor, Manifest, read_committed_hash
from .base.run_directory import checkpoint_name
from .checkpoint.collect import (
    MODEL_PREFIX,
    SWAPPED_PREFIX,
    NamedModel,
    canonical_name,
    model_parts,
    name_groups,
    name_model,
    name_optimizer,
    name_parameters,
    optimizer_parts,
    prepare_optimizer,
)
from .checkpoint.device import apply_rng_state, read_rng_state
from .checkpoint.device_proof import THREADS_KEY
from .checkpoint.drift import DriftPolicy, DriftWarning, check_drift, find_drift
from .checkpoint.lightning_file import index_optimizer_state, read_optimizer_state
from .checkpoint.ranks import Ranks
from .checkpoint.restore import check_restored, read_recorded_tensors, restore_shards, separate_shared
from .checkpoint.save_target import RunMetadata, read_versions
from .checkpoint.scope import SaveScope
from .checkpoint.sections import GroupNames, SavedSections, check_groups, find_options
from .checkpoint.verify import VerifyLevel, verify

_EXTRAS, _SWAPPED = "model_extras", "swapped"


@dataclass(frozen=True)
class RestoreReport:
    """The report of one restore.

    Attributes:
        path: The checkpoint.
        step: Its step.
        kept: State that is bit for bit the saved state.
        rebuilt: State with the saved values in another form, such as another sharding.
        reset: State that was not in the checkpoint, or could not be taken from it, and starts from scratch.
        changed: Differences between this run and the run that saved, with both values.
    """

    path: Path
    step: int
    kept: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The report as lines: what was restored, and below it each part that was kept, rebuilt, reset or changed."""
        groups = [("kept", self.kept), ("rebuilt", self.rebuilt), ("reset", self.reset), ("changed", self.changed)]
        lines = [f"Restored step {self.step} from {self.path}."]
        for verb, items in groups[: 4 if self.changed else 3]:
            lines += [f"  {verb:<7}  {item}" for item in items or ("nothing",)]
        return "\n".join(lines)


def describe_model(manifest: Manifest) -> str:
    """Returns how many tensors of the model a checkpoint has, and how many of them lie in its base."""
    num_tensors = sum(name.startswith(MODEL_PREFIX) for name in manifest.tensors)
    base = manifest.base
    return f"{numbered(num_tensors, 'model tensors')}" + (
        f" ({len(base.names)} of them in the base {base.path})" if base else ""
    )


def name_classes(state_keys: Sequence[str]) -> str:
    """Returns the names of callbacks without the arguments that Lightning's keys of their states have."""
    return ", ".join(key.partition("{")[0] for key in state_keys)


@dataclass(frozen=True)
class LiveNames:
    """The names of the tensors that one restoring rank holds.

    Attributes:
        model: Full names of its model's tensors.
        optimizers: The names of the parameters in the groups of each of its optimizers.
    """

    model: frozenset[str]
    optimizers: tuple[GroupNames, ...]


def name_optimizer_groups(index: int, optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    """Returns the names of the parameters in each group of the run's optimizer number `index`."""
    return tuple(map(tuple, name_groups(index, optimizer, names)))


def name_live(module: LightningModule, optimizers: Iterable[Optimizer]) -> LiveNames:
    """Returns the names that this rank holds. No communication."""
    model = name_model(module.state_dict(keep_vars=True))
    names = name_parameters(module)
    return LiveNames(
        frozenset(MODEL_PREFIX + name for name in model.tensors),
        tuple(name_optimizer_groups(index, optimizer, names) for index, optimizer in enumerate(optimizers)),
    )


class Restore:
    """One restore of a verified checkpoint into one Trainer.

    All ranks make it together; rank 0 verifies and broadcasts the result. The docstring of each method states whether
    it communicates.

    Ranks may hold different parts of the model (stages of a pipeline), and other parts than the ranks that saved:
    tensors and optimizer groups are matched by name over all ranks, and a rank's other state by the rank's role.

    Args:
        path: The checkpoint.
        ranks: The run's.
        strategy: The Trainer's, which gives this rank's role.
        level: How much is verified.
        scope: The scope of the run's saves. Its base is one of the places where the checkpoint's is looked for, and
            tensors that it does not leave to the base may be missing where only weights are restored.

    Raises:
        CheckpointError: The checkpoint does not verify; on every rank alike.
    """

    def __init__(self, path: Path, ranks: Ranks, strategy: Any, *, level: VerifyLevel, scope: SaveScope) -> None:
        self.path = path
        self._ranks, self._scope = ranks, scope
        answers = ranks.attempt_and_gather(
            "verifying the checkpoint",
            lambda: (verify(path, level, places=scope.places) if ranks.is_first else None, read_rank_role(strategy)),
            error_type=CheckpointError,
        )
        manifest = answers[0][0]
        assert manifest is not None
        self.manifest: Manifest = manifest
        # By its step: a copy may have another name, but a manifest names checkpoints as a run does.
        self.ancestor = Ancestor(checkpoint_name(manifest.step), read_committed_hash(path))
        self.has_weights_alone = False
        """Whether the run restores only the weights and starts everything else from scratch."""
        self.leaves_optimizer = False
        """Whether the optimizers start from scratch, and everything else continues."""
        self._reset_parts: list[str] = []
        self._changed: tuple[str, ...] = ()
        self._roles = [role for _, role in answers]
        self._rng: Any = None
        self._fetch_rng: Any = None
        self._sections, self._content = ranks.attempt(
            "reading the state", self._read_content, error_type=CheckpointError
        )
        self._match = self._sections.match
        self._has_combined = False
        self._has_lightning_filled = False
        """Whether Lightning has loaded the optimizers from the dict of `build_lightning_checkpoint`."""

    def check_drift(self, run: RunMetadata, policy: DriftPolicy, allow_changed: Sequence[str]) -> None:
        """Compares this run's identity, recipe and environment, on rank 0, with the checkpoint's. Communicates once.

        Raises:
            DriftError: A value differs that must not; on every rank alike.
        """

        def compare() -> tuple[list[str], list[str]]:
            if not self._ranks.is_first:
                return [], []
            differences = find_drift(
                self.manifest,
                identity=run.identity,
                recipe=run.recipe,
                versions={**read_versions(), **run.environment},
                policy=policy,
                allow_changed=allow_changed,
            )
            check_drift(self.manifest, differences, policy)
            # Another number of ranks adds in another order in any case.
            has_same_ranks = self.manifest.world_size == self._ranks.world_size
            warned = [
                difference.text
                for difference in differences
                if difference.verdict == "warned" and (has_same_ranks or difference.key != THREADS_KEY)
            ]
            return warned, [difference.text for difference in differences if difference.verdict == "allowed"]

        warned, allowed = self._ranks.attempt_and_gather(
            "comparing this run with the checkpoint", compare, error_type=CheckpointError
        )[0]
        self._changed = (*allowed, *warned)
        if warned:
            rank_zero_warn(
                f"{self.path.name} was saved with other packages, threads or proofs of the device, so that this "
                f"run may not continue bit for bit: {'; '.join(warned)}",
                category=DriftWarning,
            )

    def check_has_optimizer(self) -> None:
        """Refuses to continue from a checkpoint without the optimizers' state. No communication.

        Raises:
            CheckpointError: The checkpoint has no such state, and more than the weights is wanted.
        """
        if not (self.manifest.has_optimizer or self.has_weights_alone or self.leaves_optimizer):
            raise CheckpointError(
                f"{self.path} was saved without the optimizers' state: to go on with optimizers that start from "
                "scratch, give restore='no_optimizer'; to begin a new run from the weights, give that another run_dir, "
                "and restore='weights'"
            )

    def _read_content(self) -> tuple[SavedSections, Any]:
        """Returns the sections and the content of this rank's section; generators are decoded later."""
        sections = SavedSections(self.path, self.manifest, self._roles, self._ranks.rank)
        own, match = sections.own, sections.match
        rng, fetch_rng = own.pop("rng"), own.pop("rng_of_fetch", None)
        for key in (_EXTRAS, _SWAPPED):  # what a rank needs of other sections, too, depends on its model
            own.pop(key, None)
        self._rng = rng if match.is_same_role else None
        self._fetch_rng = fetch_rng if match.is_same_data else None
        content = sections.decode(own)
        loops = content["trainer"].get("loops", {})
        if "fit_loop" in loops:
            loops["fit_loop"] = count_epoch(loops["fit_loop"])
        return sections, content

    def combine_rank_states(self, datamodule: Any) -> None:
        """Combines the states of all data ranks for a data module whose state differs by rank. No communication."""
        key = type(datamodule).__qualname__
        if isinstance(datamodule, HasRankState) and key in self._content["trainer"]:
            self._content["trainer"][key] = datamodule.combine_rank_states(self._sections.read_states(key))
            self._has_combined = True

    def build_lightning_checkpoint(self, module: LightningModule, *, with_optimizers: bool) -> dict[str, Any]:
        """Returns the dict that a strategy would have loaded, with full tensors on the CPU. Every rank calls it.

        Raises:
            CheckpointError: A tensor differs from the saved one; on every rank alike.
        """
        live = self._separate_and_gather(module, [])
        return self._ranks.attempt(
            "restoring",
            lambda: self._read_lightning_checkpoint(module, live, with_optimizers),
            error_type=CheckpointError,
        )

    def _separate_and_gather(self, module: LightningModule, optimizers: Iterable[Optimizer]) -> list[LiveNames]:
        """Separates tensors that the checkpoint stores separately, then returns what each rank holds."""
        self._ranks.attempt(
            "separating tensors that share memory",
            lambda: separate_shared(self.path, self.manifest, module),
            error_type=CheckpointError,
        )
        return self._gather_live(module, optimizers)

    def _gather_live(self, module: LightningModule, optimizers: Iterable[Optimizer]) -> list[LiveNames]:
        """Returns what each rank holds. Communicates once."""
        return self._ranks.attempt_and_gather(
            "listing the tensors to restore", lambda: name_live(module, optimizers), error_type=CheckpointError
        )

    def _recorded_names(self) -> set[str]:
        return {name for name in self.manifest.tensors if name.startswith(MODEL_PREFIX)}

    def _read_lightning_checkpoint(
        self, module: LightningModule, live_by_rank: Sequence[LiveNames], with_optimizers: bool
    ) -> dict[str, Any]:
        live = module.state_dict(keep_vars=True)
        names = self._stored_names(name_model(live).names)
        recorded, everyone = self._recorded_names(), self._unite(live_by_rank)
        if any(other.model != everyone for other in live_by_rank):
            # Lightning would find what is missing on one rank alone, and leave the others waiting for that rank.
            self._check_model(everyone, is_strict=module.strict_loading)
        # A tensor that no rank's module has is passed under its stored name, so that a strict load reports it.
        wanted = ({MODEL_PREFIX + name for name in names.values()} & recorded) | (recorded - everyone)
        prefix_length = len(MODEL_PREFIX)
        saved = {
            name[prefix_length:]: tensor
            for name, tensor in read_recorded_tensors(self.path, self.manifest, sorted(wanted)).items()
        }
        state_dict = {key: saved[name] for key, name in names.items() if name in saved}
        state_dict |= {name: saved[name] for name in saved.keys() - set(names.values())}
        state_dict |= self._read_extras(live)
        # Load hooks find the values that save hooks put there. An averaging callback finds its average, and its
        # `on_load_checkpoint` restores the model; `check_after_lightning` does so if that callback is gone.
        swapped = self._sections.merge(_SWAPPED, live)
        state_dict |= {key: value for key, value in swapped.items() if key in live}
        optimizer_states = self._read_optimizer_states(set(name_parameters(module).values())) if with_optimizers else []
        return {**self._content["trainer"], "state_dict": state_dict, "optimizer_states": optimizer_states}

    def _stored_names(self, names: Mapping[str, str]) -> dict[str, str]:
        """Returns the stored name of each key of the live state dict, including keys that were tied at the save.

        A module may make one of its buffers the same object as another while it trains, and has two when it is built.
        """
        tied = self._content.get("model_keys", {})
        recorded = self._recorded_names()
        return {
            key: name if MODEL_PREFIX + name in recorded else tied.get(canonical_name(key), name)
            for key, name in names.items()
        }

    def _read_extras(self, live: Collection[str]) -> dict[str, Any]:
        """Returns the entries of the model's state dict that are no tensors, for the keys in `live`."""
        names = {key: canonical_name(key) for key in live}
        extras = self._sections.merge(_EXTRAS, set(names.values()))
        return {key: extras[name] for key, name in names.items() if name in extras}

    def _read_optimizer_states(self, live: Collection[str]) -> list[dict[str, Any]]:
        """Returns the states that Lightning gives to the optimizers by the order of their parameters.

        The list is empty if this rank's section covers other parameters than this rank holds: the order of its groups
        is then unknown until the optimizers are made, and `check_after_lightning` fills them by name.

        Args:
            live: Names of the parameters that this rank holds.
        """
        states = []
        for index in range(self._sections.num_optimizers):
            groups_by_rank = self._sections.name_groups(index)
            own = {name for names in groups_by_rank[0] for name in names}
            saved = {name for groups in groups_by_rank for names in groups for name in names}
            if own != saved.intersection(live):
                return []
            state = read_optimizer_state(
                self.path, self.manifest, index, self._sections.read_optimizer_values(index), leave_out=saved - own
            )
            states.append(index_optimizer_state(next(self._sections.read_groups(index)), state))
        self._has_lightning_filled = True
        return states

    def load_in_place(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Fills the live, placed tensors and returns the rest as Lightning's dict. Collective; it communicates.

        Raises:
            CheckpointError: The live tensors do not fit the saved ones; on every rank alike.
        """
        live = self._separate_and_gather(module, optimizers)
        parts = self._ranks.attempt(
            "restoring", lambda: self._fill(module, optimizers, live), error_type=CheckpointError
        )
        check_restored(self.manifest, parts, self._ranks)
        swapped = self._ranks.attempt(
            "reading the tensors that callbacks saved for the model's",
            lambda: self._sections.merge(_SWAPPED, set(module.state_dict())),
            error_type=CheckpointError,
        )
        return {**self._content["trainer"], "state_dict": swapped, "optimizer_states": []}

    def check_after_lightning(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Compares the live tensors with the saved ones, once Lightning has loaded its dict. Every rank calls it.

        Optimizer state that Lightning cannot load exactly (torch casts it to the parameter's dtype) is restored here.
        Buffers are left out: hooks that ran since may have changed them.

        Raises:
            CheckpointError: A tensor differs from the saved one; on every rank alike.
        """

        def settle() -> list[LocalShard]:
            parts = self._settle_optimizers(module, optimizers, live)
            model = self._recorded(name_model(module.state_dict(keep_vars=True)))
            restore_shards(self.path, self.manifest, [part for part in model if self._is_swapped(part)])
            return parts + [part for part in model if part.part.kind == "parameter"]

        if self.has_weights_alone or self.leaves_optimizer:
            optimizers = []
        live = self._gather_live(module, optimizers)
        parts = self._ranks.attempt("restoring the optimizer", settle, error_type=CheckpointError)
        check_restored(self.manifest, parts, self._ranks)

    def _is_swapped(self, part: LocalShard) -> bool:
        return SWAPPED_PREFIX + part.part.name.removeprefix(MODEL_PREFIX) in self.manifest.tensors

    def _recorded(self, model: NamedModel) -> list[LocalShard]:
        return [part for part in model_parts(model) if part.part.name in self.manifest.tensors]

    @staticmethod
    def _unite(live_by_rank: Sequence[LiveNames]) -> frozenset[str]:
        """Returns the names of the model's tensors that any rank holds."""
        return frozenset[str]().union(*(live.model for live in live_by_rank))

    def _check_model(self, everyone: frozenset[str], *, is_strict: bool) -> None:
        """Compares the names of the model's tensors, over all ranks together, with the saved names.

        Raises:
            CheckpointError: The names differ, and loading is strict.
        """
        recorded = self._recorded_names()
        missing, unexpected = sorted(everyone - recorded), sorted(recorded - everyone)
        if self.has_weights_alone and self._scope.base is not None:
            # A new run beside a base: what its saves will hold is new, too, or else in the checkpoint.
            new = [name for name in missing if not self._scope.leaves(name)]
            missing = [name for name in missing if self._scope.leaves(name)]
            if new:
                self._reset_parts.append(
                    f"{numbered(len(new), 'model tensors')} that the base does not have, such as {new[0]}"
                )
        if (missing or unexpected) and is_strict:
            raise CheckpointError(
                f"the model and the checkpoint of step {self.manifest.step} have different tensors: "
                f"{', '.join(missing[:3]) or 'none'} not saved, {', '.join(unexpected[:3]) or 'none'} not in the "
                "model; use the model that was saved, or strict_loading = False"
            )
        if missing:
            number = numbered(len(missing), "model tensors")
            self._reset_parts.append(f"{number} that the checkpoint lacks, such as {missing[0]}")

    def _fill(
        self, module: LightningModule, optimizers: Sequence[Optimizer], live_by_rank: Sequence[LiveNames]
    ) -> list[LocalShard]:
        self._check_model(self._unite(live_by_rank), is_strict=module.strict_loading)
        parts = self._recorded(name_model(module.state_dict(keep_vars=True)))
        restore_shards(self.path, self.manifest, parts)
        extras = self._read_extras(set(module.state_dict()))
        if extras:
            module.load_state_dict(extras, strict=False)
        return parts + self._settle_optimizers(module, optimizers, live_by_rank)

    def _settle_optimizers(
        self, module: LightningModule, optimizers: Sequence[Optimizer], live_by_rank: Sequence[LiveNames]
    ) -> list[LocalShard]:
        """Restores each optimizer's state as far as Lightning has not done so, and returns its parts."""
        num_live = max(len(live.optimizers) for live in live_by_rank)
        if num_live == 0:
            return []
        sections = self._sections
        if num_live != sections.num_optimizers:
            count = numbered(sections.num_optimizers, "optimizers")
            raise CheckpointError(f"the checkpoint has {count}, but the run has {num_live}")
        names = name_parameters(module)
        settled: list[LocalShard] = []
        for index in range(num_live):
            live = [other.optimizers[index] for other in live_by_rank if index < len(other.optimizers)]
            check_groups(index, live, sections.name_groups(index))
        for index, optimizer in enumerate(optimizers):
            if not self._has_lightning_filled:
                groups = sections.read_groups(index)
                options = find_options(index, name_optimizer_groups(index, optimizer, names), next(groups), groups)
                for group, saved in zip(optimizer.param_groups, options, strict=True):
                    group.update(saved)
            values = sections.read_optimizer_values(index)
            made = prepare_optimizer(index, optimizer, names, self.manifest, values)
            parts = optimizer_parts(name_optimizer(index, optimizer, names))
            is_due = [part for part in parts if not self._has_lightning_filled or part.part.name in made]
            restore_shards(self.path, self.manifest, is_due)
            settled += parts
        return settled

    def keep_rates(self, trainer: Trainer) -> None:
        """Gives optimizers that start from scratch the rates of their restored schedulers. No communication."""
        if self.leaves_optimizer:
            # A scheduler multiplies the rate that it finds in the group, which was not restored.
            for config in trainer.lr_scheduler_configs:
                scheduler = config.scheduler
                for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=False):
                    group["lr"] = lr

    def place_data(self, trainer: Trainer, on_lost: OnLostDataPosition) -> None:
        """Puts the fit's loaders where the checkpoint left them, before `apply_rng`. Communicates once.

        Raises:
            CheckpointError: A loader's position is lost, by `on_lost="raise"`; on every rank alike.
        """
        if self.has_weights_alone:
            return
        problems = self._ranks.attempt_and_gather(
            "restoring the data's position", lambda: self._place_data(trainer), error_type=CheckpointError
        )
        found = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
        if not found:
            return
        rank, problem = found[0]
        message = f"the position in the data is lost on rank {rank}: {problem}"
        if on_lost == "raise":
            raise CheckpointError(f"{message}; on_lost_data_position='warn' continues at the loader's own position")
        self._reset_parts.append(f"the position in the data ({problem})")
        rank_zero_warn(message, category=LostDataPositionWarning)

    def _place_data(self, trainer: Trainer) -> str | None:
        fit_loop = self._content["trainer"].get("loops", {}).get("fit_loop")
        if fit_loop is None:
            return None
        before = read_rng_state() if self._rng is None else None
        if self._fetch_rng is not None:
            apply_rng_state(self._sections.decode(self._fetch_rng))
        generators = self._content.get("loader_generators") if self._match.is_same_data else None
        problem = place(trainer, fit_loop, generators)
        if before is not None and self._fetch_rng is not None:
            apply_rng_state(before)  # the saved generators of the fetch serve the loaders alone
        # A data module that combines the ranks' states knows what its loaders mean on another number of ranks.
        is_combined = hasattr(trainer.datamodule, "combine_rank_states")  # type: ignore[attr-defined]  # Lightning
        if problem is None and read_saved_states(fit_loop) and not self._match.is_same_data and not is_combined:
            num_live = len({role.data_rank for role in self._roles})
            saved = numbered(self._sections.num_data_ranks, "ranks")
            return f"{saved} saved the states of their loaders, but {num_live} restore"
        return problem

    def apply_rng(self) -> None:
        """Sets this rank's generators to the state that the rank of the same role saved.

        It does nothing if ranks of other roles saved, or if only the weights are restored.
        """
        if self._rng is not None and not self.has_weights_alone:
            apply_rng_state(self._sections.decode(self._rng))

    def build_report(self, trainer: Trainer) -> RestoreReport:
        """Returns the parts that were kept, rebuilt and reset. No communication."""
        manifest = self.manifest
        model = describe_model(manifest)
        if self.has_weights_alone:
            rest = "all but the weights: clocks, optimizers, schedulers, data, generators"
            return RestoreReport(
                self.path,
                manifest.step,
                kept=(f"{model}, compared by digest",),
                reset=(*self._reset_parts, rest),
                changed=self._changed,
            )
        num_optimizer = sum(name.startswith("optimizer.") for name in manifest.tensors)
        num_kept = 0 if self.leaves_optimizer else num_optimizer
        saved_callbacks = set(self._content["trainer"]["callbacks"])
        kept = [
            f"{model} and {num_kept} of optimizer state, compared by digest",
            "loops, schedulers and precision",
        ]
        num_swapped = sum(name.startswith(SWAPPED_PREFIX) for name in manifest.tensors)
        kept += [f"average of the weights: {numbered(num_swapped, 'tensors')}"] if num_swapped else []
        kept += [f"state of {name_classes(sorted(saved_callbacks))}"] if saved_callbacks else []
        data = type(trainer.datamodule).__qualname__  # type: ignore[attr-defined]  # Lightning sets it
        kept += [f"state of {data} (the data's position)"] if data in self._content["trainer"] else []
        kept += ["random number generators of each rank"] if self._match.is_same_role else []
        rebuilt = []
        reset = list(self._reset_parts)
        loop = self._content["trainer"].get("loops", {}).get("fit_loop")
        reset += [] if loop is None else describe_reset_position(trainer, loop)
        if not self._match.is_same_role:
            change = f"world size {manifest.world_size} at the save, {self._ranks.world_size} now"
            if manifest.world_size == self._ranks.world_size:
                change = "the ranks have other data ranks or stages than the ranks that saved"
            owner = "that of each data rank" if self._match.is_same_data else "rank 0's"
            owner += ", the data's of all ranks" if self._has_combined else ""
            rebuilt.append(f"placement of tensors ({change}); other state is {owner}")
            reset.append(f"random number generators ({change})")
        if self.leaves_optimizer:
            left = f"{numbered(num_optimizer, 'tensors')}" if manifest.has_optimizer else "none was saved"
            reset.append(f"optimizer state ({left}; restore is 'no_optimizer')")
        elif not num_optimizer:
            reset.append("optimizer state (there was none yet)")
        new_callbacks = [
            callback.state_key
            for callback in trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it
            if callback.state_key not in saved_callbacks and callback.state_dict()
        ]
        reset += [f"state of {name_classes(new_callbacks)} (not saved)"] if new_callbacks else []
        return RestoreReport(self.path, manifest.step, tuple(kept), tuple(rebuilt), tuple(reset), self._changed)
