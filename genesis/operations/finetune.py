"""From a model and data to a fine-tuned model in one call: each part is a command that a user could type.

    OUT/finetune.json      what was asked for
    OUT/base               `genesis import`, with the recipe for training; left out where the model is imported already
    OUT/corpus             `genesis data prepare`
    OUT/before.json        `genesis validate` of the base on the held-out documents
    OUT/run                `genesis fit`
    OUT/after.json         `genesis validate` of the result
    OUT/adapter            `genesis export --adapter`, where adapters were trained for which PEFT has a form
    OUT/model              `genesis export` of the whole model

The next call goes on after an interruption: what appears as a whole is not made again, and the other commands continue
their own work. All defaults but those below are those of the commands, and of the recipe that the import writes.
"""

import fcntl
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from genesis.base.available_memory import available_memory
from genesis.base.device import CPU, find_kind, read_free_memory
from genesis.base.errors import UserError, blaming, numbered
from genesis.base.run_directory import RUNS_NAME, RunDirectory
from genesis.data.manifest import MANIFEST_NAME, CorpusManifest, read_manifest
from genesis.data.sources import SourceOptions, list_source, plan_spans, read_documents
from genesis.data.sources.options import ChatForm
from genesis.huggingface.adapter_config import describe_adapter
from genesis.huggingface.shape import find_names
from genesis.model.recipe import build_decoder_config, read_adapter_config
from genesis.operations.commands import Commands, StepFailedError
from genesis.recipe.resolved import ResolvedRecipe, list_overrides, list_steps
from genesis.recipe.run_length import find_replaced
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.locks import lock_file, open_lock
from genesis_callbacks.base.untrusted import MAX_DOCUMENT_BYTES, read_file
from genesis_callbacks.checkpoint import list_committed

Method = Literal["lora", "full", "nf4"]

VALIDATION_FRACTION: Final = 0.05
"""Fifteen of 300 conversations; the default of `data prepare` is for corpora of millions of documents."""
YAML: Final = (".yaml", ".yml")
"""Suffixes of a file of options for `data prepare` in the place of data."""
_RANK: Final = 16
_PAIRS: Final = ("--model.objective", "genesis.objectives.DPO")
_PAIRS_LENGTH: Final = ("--data.num_epochs", "1")
_PAIRS_RATE: Final[dict[Method, str]] = {"lora": "5e-6", "nf4": "5e-6", "full": "5e-7"}
"""Preferences are learned at a fortieth of the usual rates, in one epoch, as in the alignment handbook's recipes."""
_REQUEST_NAME: Final = "finetune.json"
_LOCK_NAME: Final = ".finetune.lock"
_SPAN_BYTES: Final = 1 << 20
_NOT_IN_NAMES: Final = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        model: A directory in Hugging Face's layout, a model on the Hub, or an imported run.
        data: Paths of the data, or one YAML file of `genesis data prepare`.
        method: What is trained: adapters, all weights, or adapters beside a base in 4 bits.
        validation_fraction: Share of the documents that are held out; None where the YAML file decides.
        options: Options of `genesis fit`.
    """

    model: str
    data: tuple[str, ...]
    method: Method
    validation_fraction: float | None
    options: tuple[str, ...] = ()

    def describe(self, name: str) -> str:
        """Returns an attribute as a user writes it."""
        value = getattr(self, name)
        return {
            "method": f"--{self.method}",
            "validation_fraction": f"--validation_fraction {self.validation_fraction}",
            "options": f"the options of fit '{' '.join(self.options)}'",
        }.get(name, f"{name.upper()} {' '.join(value) if isinstance(value, tuple) else value}")


def name_directory(request: Request) -> Path:
    """Returns the directory of a fine-tuning whose user gives none.

    Example:
        >>> str(name_directory(Request("Qwen/Qwen3-0.6B", ("data/chat.jsonl", "more.jsonl"), "lora", 0.05)))
        'runs/Qwen3-0.6B-chat'
    """
    parts = Path(request.model).name, Path(request.data[0]).name.partition(".")[0]
    return Path(RUNS_NAME, _NOT_IN_NAMES.sub("-", "-".join(parts)).strip(".-") or "finetuned")


def find_imported(model: str) -> RunDirectory | None:
    """Returns the run of an import that a user names by its directory, or by its name in `runs/`; None for others."""
    places = (RunDirectory(place) for place in (Path(model), Path(RUNS_NAME, model)))
    # Directories of other programs may have a recipe.yaml of their own.
    return next((run for run in places if run.imported_recipe.is_file() and run.checkpoints.is_dir()), None)


def choose_dtype(method: Method) -> tuple[str, ...]:
    """Returns the option of `genesis import` for the type of the base's weights."""
    if method == "nf4":
        return ("--dtype", "nf4")
    # Beside adapters 16 bits are enough, and half the memory; but most CPUs multiply bfloat16 many times more slowly.
    return ("--dtype", "stored") if method == "lora" and find_kind() != CPU else ()


def find_chat(paths: Sequence[str]) -> ChatForm | None:
    """Returns what the first document of the data is: `auto` for a conversation, `pairs`, or None for plain text.

    Of data that is none of these, `genesis data prepare` reports why it is no conversation.

    Raises:
        UserError: There are no such files.
    """
    files = list_source(SourceOptions("data", tuple(paths))).files
    forms: tuple[ChatForm | None, ...] = ("pairs", "auto", None)  # a pair has a prompt, as a conversation may
    for chat in forms:
        source = SourceOptions("data", tuple(paths), chat=chat)
        try:
            if any(True for span in plan_spans(source, files, _SPAN_BYTES) for _ in read_documents(source, span)):
                return chat
        except UserError:
            continue
    return "auto"


class Finetuning:
    """The parts of a fine-tuning in order.

    Args:
        request: What the user asks for.
        out: The directory of all results.
        proof: How much `import` and `export` compare.
    """

    def __init__(self, request: Request, out: Path, proof: str) -> None:
        self.request, self.out, self.proof = request, out, ("--proof", proof)
        imported = find_imported(request.model)
        if imported is not None and request.method == "nf4":
            raise UserError(
                f"{request.model} is imported already, and --nf4 chooses how a model is imported: give the model "
                "itself, or leave --nf4 out, which trains adapters beside an import of any type"
            )
        self.base = RunDirectory(out / "base") if imported is None else imported
        self.corpus, self.run = out / "corpus", RunDirectory(out / "run")
        self.before, self.after = out / "before.json", out / "after.json"
        self.adapter, self.model = out / "adapter", out / "model"
        self.restart: tuple[str, ...] = ()
        self.commands = Commands()

    def execute(self) -> None:
        """Runs every part that is not done, and prints the results.

        Raises:
            UserError: The directory belongs to something else, or to another request.
            StepFailedError: A part failed.
        """
        with self._begun() as lock:
            self._lock = lock
            if self.model.exists():
                self.commands.console.print(f"nothing to do: {self.out} is complete; start over in another --out")
            else:
                self._make_all()
            self._summarise()

    def _make_all(self) -> None:
        request, out = self.request, str(self.out)
        sources = self._sources()  # before the import, which may be a download of hours
        if not self.base.path.exists():
            imports = ("import", request.model, str(self.base.path), *choose_dtype(request.method))
            self._run("Import of the model", *imports, *self.proof)
        prepare = ("data", "prepare", *sources, "--name", self.corpus.name, "--out", out, *self.restart)
        self._run("Data become tokens", *prepare, "--tokenizer", str(self.base.path))
        manifest = read_manifest(self.corpus)
        fit = self._fit_options(manifest)
        unexported = self._check_exports(fit)
        if unexported is not None:
            self.commands.console.print(
                f"{self.adapter} will not be made, and {self.model} will: {unexported}", markup=False
            )
        if request.method == "full":
            self._warn_of_memory(fit)
        validates = bool(manifest.validation)
        if validates and not manifest.is_paired and not self.before.exists():
            base = ("--model.adapter", "null", "--ckpt_path", str(self.base.path), "--json", str(self.before))
            self._run("Before: the loss on held-out data", "validate", *fit, *base)
        has_begun = bool(list_committed(self.run.path))
        if not self.after.exists() and not self.adapter.exists():
            self._run("Training", "fit", *fit, *(("--ckpt_path", "latest") if has_begun else ()))
        if validates and not self.after.exists():
            end = ("--ckpt_path", "latest", "--json", str(self.after))
            self._run("After: the loss on held-out data", "validate", *fit, *end)
        run = str(self.run.path)
        if request.method != "full" and unexported is None and not self.adapter.exists():
            self._run("Export of the adapters", "export", run, str(self.adapter), "--adapter", *self.proof)
        merge = () if request.method == "full" else ("--merge",)
        # The export of a model of transformers takes no choice: it always compares all tensors, and no logits.
        proof = () if self._is_foreign() else self.proof
        export = ("export", run, str(self.model), *merge, "--dtype", "bfloat16", *proof)
        self._run("Export of the whole model", *export)

    def _run(self, title: str, *command: str) -> None:
        self.commands.title(title)
        self.commands.run(*command, pass_fds=(self._lock,))

    def _sources(self) -> tuple[str, ...]:
        """Returns the options of `data prepare` that name the data."""
        data = self.request.data
        if self.request.validation_fraction is None:
            if not Path(data[0]).is_file():
                raise UserError(f"no such file: {data[0]}")
            return ("--config", *data)
        chat = find_chat(data)
        source = {"name": "data", "paths": list(data), **({} if chat is None else {"chat": chat})}
        sources = json.dumps([source], ensure_ascii=False)
        return ("--sources", sources, "--validation_fraction", str(self.request.validation_fraction))

    def _fit_options(self, manifest: CorpusManifest) -> tuple[str, ...]:
        """Returns the options of `fit` and `validate`; those of the user come last, and win."""
        method = self.request.method
        length = () if "data.num_epochs" in find_replaced(list_overrides(self.request.options)) else _PAIRS_LENGTH
        return (
            *("--config", str(self.base.imported_recipe), "--run_dir", str(self.run.path)),
            *("--data.corpus", str(self.corpus)),
            *(() if method == "full" else ("--model.adapter.rank", str(_RANK))),
            *((*_PAIRS, *length, "--model.optimizer.lr", _PAIRS_RATE[method]) if manifest.is_paired else ()),
            *self.request.options,
        )

    def _is_foreign(self) -> bool:
        """Whether the model is one of transformers (`genesis import --as transformers`)."""
        recipe = self.base.imported_recipe
        return recipe.is_file() and ResolvedRecipe.read([recipe]).get("model.decoder.body") is not None

    def _check_exports(self, fit: Sequence[str]) -> UserError | None:
        """Returns why the adapters will have no export; None if they will have one, or none are trained.

        Raises:
            UserError: The whole model will have no export, or the options train something else than was asked for.
        """
        recipe = ResolvedRecipe.read(list_steps(fit))
        config = build_decoder_config(recipe.get("model.decoder"), where=f"{recipe.where}: model.decoder")
        adapter, method = read_adapter_config(recipe.content, recipe.where), self.request.method
        if (adapter is None) != (method == "full"):
            trained = "all weights" if adapter is None else "adapters"
            raise UserError(f"--{method} is asked for, and the options of fit train {trained}: correct one of them")
        find_names(config)
        try:
            if adapter is not None:
                describe_adapter(config, adapter)
        except UserError as error:
            return error
        return None

    def _warn_of_memory(self, fit: Sequence[str]) -> None:
        """Runs `genesis plan`, which prints what the training of all weights needs, and warns if it does not fit."""
        kind = find_kind()
        free = (read_free_memory(kind) or (None,))[0] if kind != CPU else available_memory()
        if free is None:
            return
        place = fit.index("--run_dir")  # the plan takes none
        options = (*fit[:place], *fit[place + 2 :], "--memory", f"{free // 10**6}MB")
        try:
            self._run("Plan: whether the memory suffices", "plan", *options)
        except StepFailedError as error:
            if error.status not in (1, 2):
                raise
            if error.status == 2:  # it has printed why; what is wrong with the recipe itself, the training says, too
                return
            self.commands.console.print(
                "genesis: warning: all weights will not fit into the memory that is free here, by the plan above: "
                "--lora trains adapters alone, --nf4 beside a base in 4 bits"
            )

    @contextmanager
    def _begun(self) -> Iterator[int]:
        """Locks the directory, which a command of a killed call may still hold, and yields the lock's descriptor."""
        request = self.out / _REQUEST_NAME
        # A call that was killed, or runs beside this one, may have the lock alone, or a part of the request.
        begun = (_LOCK_NAME, _REQUEST_NAME)
        has_others = self.out.is_dir() and not all(path.name.startswith(begun) for path in self.out.iterdir())
        if has_others and not request.exists():
            raise UserError(f"{self.out} is not empty and was not made by `genesis finetune`: give another --out")
        self.out.mkdir(parents=True, exist_ok=True)
        with open_lock(self.out / _LOCK_NAME) as lock:
            try:
                lock_file(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, self.out)
            except BlockingIOError:
                self.commands.console.print(f"waiting: another `genesis finetune` in {self.out} has not ended")
                lock_file(lock.fileno(), fcntl.LOCK_EX)
            if request.exists():
                with blaming(request, "give another --out"):
                    earlier = load_json(read_file(request, MAX_DOCUMENT_BYTES))
                    old = Request(**earlier | {name: tuple(earlier[name]) for name in ("data", "options")})
                self._compare(old)
            replace_file(request, (json.dumps(asdict(self.request), ensure_ascii=False, indent=1) + "\n").encode())
            yield lock.fileno()

    def _compare(self, old: Request) -> None:
        """Refuses to change what a part that has begun was made with.

        What no part has used yet may change, and so may data that are not prepared to their end, which then starts
        over, and the options of a training that has not ended, as far as `fit` allows it; the loss before is then
        computed again.
        """
        imported, trained = (self.out / "base", self.corpus), (self.after, self.adapter, self.model)
        prepared = (self.corpus / MANIFEST_NAME,)
        made = {"model": imported, "method": imported, "data": prepared, "validation_fraction": prepared}
        for name, places in (made | {"options": trained}).items():
            used = next((place for place in places if place.exists()), None)
            if getattr(old, name) != getattr(self.request, name) and used is not None:
                raise UserError(
                    f"{used} was made with {old.describe(name)}, and this call has {self.request.describe(name)}: "
                    "give the same, or another --out"
                )
        if old.options != self.request.options:
            self.before.unlink(missing_ok=True)
        has_other_data = (old.data, old.validation_fraction) != (self.request.data, self.request.validation_fraction)
        self.restart = ("--restart",) if has_other_data and self.corpus.exists() else ()

    def _summarise(self) -> None:
        print_ = self.commands.console.print
        manifest = read_manifest(self.corpus)
        self.commands.title("Results")
        losses = [
            f"{name} {read_loss(path):.4f}"
            for name, path in (("before", self.before), ("after", self.after))
            if path.exists()
        ]
        num_held_out = sum(source.num_documents for source in manifest.validation) // (1 + manifest.is_paired)
        what = numbered(num_held_out, "pairs" if manifest.is_paired else "documents")
        print_(f"held-out loss   {', '.join(losses) or 'not measured'} (held out: {what})")
        if self.adapter.exists():
            print_(f"adapter         {self.adapter}, in PEFT's format")
        print_(f"whole model     {self.model}, for transformers")
        print_(f"recipe          {self.run.recipe}")
        if self._is_foreign():  # without a cache it answers in transformers alone
            return
        print_("\nTalk to it:")
        asks = '--prompt "..."' if manifest.chat is None else "--chat"
        print_(f"  genesis generate {self.run.path} {asks}", markup=False)
        print_(f"  genesis serve {self.run.path}   a page, and /v1/chat/completions", markup=False)


def read_loss(figures: Path) -> float:
    """Returns the loss in a file of `genesis validate --json`."""
    return float(load_json(read_file(figures, MAX_DOCUMENT_BYTES))["validation/loss"])
