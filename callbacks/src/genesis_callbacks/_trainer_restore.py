"""Puts a checkpoint of the engine into a Lightning Trainer, before or after its strategy has set up."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from ._data_position import LostDataPositionWarning, OnLostDataPosition, count_epoch, place, read_saved_states
from ._trainer_state import HasRankState
from .checkpoint.collect import (
    MODEL_PREFIX,
    SWAPPED_PREFIX,
    NamedModel,
    canonical_name,
    check_groups,
    load_groups,
    model_parts,
    name_model,
    name_optimizer,
    name_parameters,
    optimizer_parts,
    prepare_optimizer,
)
from .checkpoint.drift import DriftPolicy, DriftWarning, check_drift, find_drift
from .checkpoint.errors import CheckpointError
from .checkpoint.lightning_file import index_optimizer_state, read_optimizer_state
from .checkpoint.manifest import Ancestor, Manifest, read_committed_hash
from .checkpoint.plan import LocalPart
from .checkpoint.ranks import Ranks
from .checkpoint.restore import check_restored, read_recorded_tensors, read_state, restore_parts
from .checkpoint.rng import apply_rng_state
from .checkpoint.save_target import read_versions
from .checkpoint.tagged_json import decode_tagged, named_tensors
from .checkpoint.verify import VerifyLevel, verify
from .restore_report import RestoreReport


class Restore:
    """One restore of a verified checkpoint into one Trainer.

    Every rank makes it, together; it verifies on rank 0 and tells the others. Its methods say which of them
    communicate.

    Raises:
        CheckpointError: The checkpoint does not verify; on every rank alike.
    """

    def __init__(self, path: Path, ranks: Ranks, *, level: VerifyLevel) -> None:
        self.path = path
        self._ranks = ranks
        manifest = ranks.attempt_and_gather(
            "verifying the checkpoint",
            lambda: verify(path, level) if ranks.is_first else None,
            error_type=CheckpointError,
        )[0]
        assert manifest is not None
        self.manifest: Manifest = manifest
        self.ancestor = Ancestor(path.name, read_committed_hash(path))
        self.has_weights_alone = False
        """Whether the run takes the weights and begins everything else anew."""
        self._has_same_world = manifest.world_size == ranks.world_size
        self._afresh: list[str] = []
        self._changed: tuple[str, ...] = ()
        self._sections: list[Any] = []
        self._rng: Any = None
        self._fetch_rng: Any = None
        self._content: Any = ranks.attempt("reading the state", self._read_content, error_type=CheckpointError)
        self._has_combined = False

    def check_drift(
        self,
        *,
        identity: Mapping[str, Any],
        recipe: Mapping[str, Any],
        policy: DriftPolicy,
        allow_changed: Sequence[str],
    ) -> None:
        """Compares what this run says about itself, on rank 0, with what the checkpoint says. Communicates once.

        Raises:
            DriftError: Something differs that must not; on every rank alike.
        """

        def compare() -> tuple[list[str], list[str]]:
            if not self._ranks.is_first:
                return [], []
            versions = read_versions()
            differences = find_drift(
                self.manifest,
                identity=identity,
                recipe=recipe,
                versions=versions,
                policy=policy,
                allow_changed=allow_changed,
            )
            check_drift(self.manifest, differences, policy)
            warned = [difference.text for difference in differences if difference.verdict == "warned"]
            return warned, [difference.text for difference in differences if difference.verdict == "allowed"]

        warned, allowed = self._ranks.attempt_and_gather(
            "comparing this run with the checkpoint", compare, error_type=CheckpointError
        )[0]
        self._changed = (*allowed, *warned)
        if warned:
            rank_zero_warn(
                f"{self.path.name} was saved with other packages, so that this run need not go on bit for bit: "
                f"{'; '.join(warned)}",
                category=DriftWarning,
            )

    def check_has_optimizer(self) -> None:
        """Refuses to go on from what was saved without the optimizers' state. No communication.

        Raises:
            CheckpointError: It was, and more than the weights is wanted.
        """
        if not (self.manifest.has_optimizer or self.has_weights_alone):
            raise CheckpointError(
                f"{self.path} was saved without the optimizers' state, so that no run can go on from it; to begin a "
                "new one from its weights, give that another run_dir, and restore='weights'"
            )

    def _read_content(self) -> Any:
        """This rank's section where as many ranks saved, else rank 0's; generators are decoded later."""
        self._sections = read_state(self.path, self.manifest)
        own = dict(self._sections[self._ranks.rank if self._has_same_world else 0])
        rng, fetch_rng = own.pop("rng"), own.pop("rng_of_fetch", None)
        self._rng, self._fetch_rng = (rng, fetch_rng) if self._has_same_world else (None, None)
        content = self._decode(own)
        loops = content["trainer"].get("loops", {})
        if "fit_loop" in loops:
            loops["fit_loop"] = count_epoch(loops["fit_loop"])
        return content

    def combine_rank_states(self, datamodule: Any) -> None:
        """Gives a data module that keeps a state by rank what all of them saved. No communication."""
        key = type(datamodule).__qualname__
        if isinstance(datamodule, HasRankState) and key in self._content["trainer"]:
            states = [self._decode(section["trainer"][key]) for section in self._sections]
            self._content["trainer"][key] = datamodule.combine_rank_states(states)
            self._has_combined = True

    def _decode(self, content: Any) -> Any:
        return decode_tagged(content, read_recorded_tensors(self.path, self.manifest, sorted(named_tensors(content))))

    @property
    def _swapped(self) -> dict[str, Any]:
        """What hooks had put in the place of the model's own values, by key of the state dict."""
        return self._content.get("swapped", {})  # type: ignore[no-any-return]  # it is what take_snapshot made

    @property
    def _groups(self) -> list[list[dict[str, Any]]]:
        return [section["groups"] for section in self._content["optimizers"]]

    def _optimizer_values(self, index: int) -> dict[str, dict[str, Any]]:
        """Per-parameter values that are no tensors: each rank that held a part of the optimizer saved its own."""
        values: dict[str, dict[str, Any]] = {}
        for section in self._sections:
            values.update(self._decode(section["optimizers"][index]["values"]))
        return values

    def build_lightning_checkpoint(self, module: LightningModule, *, with_optimizers: bool) -> dict[str, Any]:
        """Returns the dict that a strategy would have loaded, with full tensors on the CPU. Every rank calls it.

        Raises:
            CheckpointError: A tensor is not what was saved; on every rank alike.
        """
        return self._ranks.attempt(
            "restoring", lambda: self._read_lightning_checkpoint(module, with_optimizers), error_type=CheckpointError
        )

    def _read_lightning_checkpoint(self, module: LightningModule, with_optimizers: bool) -> dict[str, Any]:
        live = module.state_dict(keep_vars=True)
        names = name_model(live).names
        prefix_length = len(MODEL_PREFIX)
        recorded = [name for name in self.manifest.tensors if name.startswith(MODEL_PREFIX)]
        saved = {
            name[prefix_length:]: tensor
            for name, tensor in read_recorded_tensors(self.path, self.manifest, recorded).items()
        }
        state_dict = {key: saved[name] for key, name in names.items() if name in saved}
        # What the module does not have goes in under its own name, so that a strict load says so.
        state_dict |= {name: saved[name] for name in saved.keys() - set(names.values())}
        extras = self._content["model_extras"]
        state_dict |= {key: extras[canonical_name(key)] for key in live if canonical_name(key) in extras}
        # Hooks find what hooks put there: an averaging callback its average, whose `on_load_checkpoint` makes the model
        # what it was; `check_after_lightning` does so where that callback is gone.
        state_dict |= {key: value for key, value in self._swapped.items() if key in live}
        optimizer_states = []
        for index, groups in enumerate(self._groups if with_optimizers else []):
            state = read_optimizer_state(self.path, self.manifest, index, self._optimizer_values(index))
            optimizer_states.append(index_optimizer_state(groups, state))
        return {**self._content["trainer"], "state_dict": state_dict, "optimizer_states": optimizer_states}

    def load_in_place(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Fills the live, placed tensors and returns the rest as Lightning's dict. Collective; it communicates.

        Raises:
            CheckpointError: What is live does not fit what was saved; on every rank alike.
        """
        parts = self._ranks.attempt("restoring", lambda: self._fill(module, optimizers), error_type=CheckpointError)
        check_restored(self.manifest, parts, self._ranks)
        return {**self._content["trainer"], "state_dict": dict(self._swapped), "optimizer_states": []}

    def check_after_lightning(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Compares the live tensors with what was saved, once Lightning has loaded its dict. Every rank calls it.

        Optimizer state that Lightning could not take as it was saved (it casts to the parameter's dtype) is put in
        place here. Buffers are left out: hooks that ran since may have changed them.

        Raises:
            CheckpointError: A tensor is not what was saved; on every rank alike.
        """

        def settle() -> list[LocalPart]:
            parts = self._settle_optimizers(module, optimizers, has_loaded=True)
            model = self._recorded(name_model(module.state_dict(keep_vars=True)))
            restore_parts(self.path, self.manifest, [part for part in model if self._is_swapped(part)])
            return parts + [part for part in model if part.part.kind == "parameter"]

        if self.has_weights_alone:
            optimizers = []
        parts = self._ranks.attempt("restoring the optimizer", settle, error_type=CheckpointError)
        check_restored(self.manifest, parts, self._ranks)

    def _is_swapped(self, part: LocalPart) -> bool:
        return SWAPPED_PREFIX + part.part.name.removeprefix(MODEL_PREFIX) in self.manifest.tensors

    def _recorded(self, model: NamedModel) -> list[LocalPart]:
        return [part for part in model_parts(model) if part.part.name in self.manifest.tensors]

    def _fill(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> list[LocalPart]:
        live = name_model(module.state_dict(keep_vars=True))
        recorded = {name for name in self.manifest.tensors if name.startswith(MODEL_PREFIX)}
        missing = sorted({MODEL_PREFIX + name for name in live.tensors} - recorded)
        unexpected = sorted(recorded - {MODEL_PREFIX + name for name in live.tensors})
        if (missing or unexpected) and module.strict_loading:
            raise CheckpointError(
                f"the model and the checkpoint of step {self.manifest.step} have different tensors: "
                f"{', '.join(missing[:3]) or 'none'} not saved, {', '.join(unexpected[:3]) or 'none'} not in the "
                "model; use the model that was saved, or strict_loading = False"
            )
        if missing:
            self._afresh.append(f"{len(missing)} model tensors that were not saved, such as {missing[0]}")
        parts = self._recorded(live)
        restore_parts(self.path, self.manifest, parts)
        extras = self._content["model_extras"]
        if extras:
            module.load_state_dict(
                {key: extras[canonical_name(key)] for key in module.state_dict() if canonical_name(key) in extras},
                strict=False,
            )
        return parts + self._settle_optimizers(module, optimizers, has_loaded=False)

    def _settle_optimizers(
        self, module: LightningModule, optimizers: Sequence[Optimizer], *, has_loaded: bool
    ) -> list[LocalPart]:
        """Makes each optimizer hold what was saved and returns its parts; `has_loaded`: Lightning has filled it."""
        if not optimizers:
            return []
        if len(optimizers) != len(self._groups):
            raise CheckpointError(f"{len(self._groups)} optimizers were saved, the run has {len(optimizers)}")
        names = name_parameters(module)
        settled: list[LocalPart] = []
        for index, optimizer in enumerate(optimizers):
            check_groups(index, optimizer, names, self._groups[index])
            if not has_loaded:
                load_groups(optimizer, self._groups[index])
            made = prepare_optimizer(index, optimizer, names, self.manifest, self._optimizer_values(index))
            parts = optimizer_parts(name_optimizer(index, optimizer, names))
            restore_parts(
                self.path, self.manifest, [part for part in parts if not has_loaded or part.part.name in made]
            )
            settled += parts
        return settled

    def place_data(self, trainer: Trainer, on_lost: OnLostDataPosition) -> None:
        """Puts the fit's loaders where the checkpoint left them, before `apply_rng`. Communicates once.

        Raises:
            CheckpointError: A loader's position is lost, by `on_lost="raise"`; on every rank alike.
        """
        if self.has_weights_alone:
            return
        problems = self._ranks.attempt_and_gather(
            "placing the data", lambda: self._place_data(trainer), error_type=CheckpointError
        )
        found = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
        if not found:
            return
        rank, problem = found[0]
        message = f"the position in the data is lost on rank {rank}: {problem}"
        if on_lost == "raise":
            raise CheckpointError(
                f"{message}; on_lost_data_position='warn' goes on with the data where the loader then stands"
            )
        self._afresh.append(f"the position in the data ({problem})")
        rank_zero_warn(message, category=LostDataPositionWarning)

    def _place_data(self, trainer: Trainer) -> str | None:
        fit_loop = self._content["trainer"].get("loops", {}).get("fit_loop")
        if fit_loop is None:
            return None
        if self._fetch_rng is not None:
            apply_rng_state(self._decode(self._fetch_rng))
        generators = self._content.get("loader_generators") if self._has_same_world else None
        problem = place(trainer, fit_loop, generators)
        # A data module that combines the ranks' states knows what its loaders mean on another number of ranks.
        is_combined = hasattr(trainer.datamodule, "combine_rank_states")  # type: ignore[attr-defined]  # Lightning
        if problem is None and read_saved_states(fit_loop) and not self._has_same_world and not is_combined:
            return (
                f"{self.manifest.world_size} ranks saved the states of their loaders, {self._ranks.world_size} restore"
            )
        return problem

    def apply_rng(self) -> None:
        """Sets this rank's generators to what it saved; nothing happens where another number of ranks saved.

        Nor where the weights alone are taken.
        """
        if self._rng is not None and not self.has_weights_alone:
            apply_rng_state(self._decode(self._rng))

    def build_report(self, trainer: Trainer) -> RestoreReport:
        """Returns what was kept, rebuilt and started afresh. No communication."""
        manifest = self.manifest
        num_model = sum(name.startswith(MODEL_PREFIX) for name in manifest.tensors)
        if self.has_weights_alone:
            anew = "all but the weights: clocks, optimizers, schedulers, data, generators"
            return RestoreReport(
                self.path,
                manifest.step,
                kept=(f"{num_model} model tensors, compared by digest",),
                afresh=(*self._afresh, anew),
                changed=self._changed,
            )
        num_optimizer = sum(name.startswith("optimizer.") for name in manifest.tensors)
        saved_callbacks = set(self._content["trainer"]["callbacks"])
        kept = [
            f"{num_model} model tensors and {num_optimizer} of optimizer state, compared by digest",
            "loops, schedulers and precision",
        ]
        num_swapped = sum(name.startswith(SWAPPED_PREFIX) for name in manifest.tensors)
        kept += [f"{num_swapped} tensors that callbacks give for the model's (an average)"] if num_swapped else []
        kept += [f"state of {', '.join(sorted(saved_callbacks))}"] if saved_callbacks else []
        data = type(trainer.datamodule).__qualname__  # type: ignore[attr-defined]  # Lightning sets it
        kept += [f"state of {data} (the data's position)"] if data in self._content["trainer"] else []
        kept += ["random number generators of each rank"] if self._has_same_world else []
        rebuilt = []
        afresh = list(self._afresh)
        if not self._has_same_world:
            change = f"{manifest.world_size} ranks saved, {self._ranks.world_size} restore"
            owner = "rank 0's, the data's of all ranks" if self._has_combined else "rank 0's"
            rebuilt.append(f"placement of tensors ({change}); other state is {owner}")
            afresh.append(f"random number generators ({change})")
        if not num_optimizer:
            afresh.append("optimizer state (there was none yet)")
        new_callbacks = [
            callback.state_key
            for callback in trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it
            if callback.state_key not in saved_callbacks and callback.state_dict()
        ]
        afresh += [f"state of {', '.join(new_callbacks)} (not saved)"] if new_callbacks else []
        return RestoreReport(self.path, manifest.step, tuple(kept), tuple(rebuilt), tuple(afresh), self._changed)
