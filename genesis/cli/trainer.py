"""The Trainer of a fit, and what the `auto` values of its options stand for, before anything is built."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer

from genesis.base.determinism import AUTO as AUTO_DETERMINISTIC
from genesis.base.determinism import check_deterministic, choose_deterministic
from genesis.base.device import CPU, count_devices, find_kind, leave_memory_unfilled
from genesis.base.errors import UserError
from genesis.generate.checkpoint_reference import Reference
from genesis.model.compilation import check_compilation, choose_compilation, read_compilation
from genesis.model.precision import AUTO, choose_precision, unify_precision
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.checkpoint import CheckpointError, read_manifest

PrecisionName = Literal["auto", "bf16-mixed", "32-true", "16-mixed", "bf16-true", "bf16", "32", "16", 32, 16]


class GenesisTrainer(Trainer):
    """Lightning's Trainer, which also takes `auto` as a precision and as a choice of kernels.

    Args:
        precision: `auto` for `bf16-mixed` on CUDA devices that have bfloat16 and `32-true` elsewhere; a run that
            continues keeps its own. `bf16-mixed`, `32-true`, `16-mixed` and `bf16-true` as in Lightning.
        deterministic: Whether an accelerator takes only kernels that repeat, so that a run that is killed and resumed
            equals one that was never killed, bit for bit. `auto` for true; a run that continues keeps its own choice.
            On the CPU, whose kernels repeat, it changes nothing.
        max_steps: Number of steps; -1 or null for no limit. On the command line it replaces a length in epochs or
            tokens that the recipe has.
        kwargs: Of Lightning's Trainer.
    """

    def __init__(
        self,
        *,
        precision: PrecisionName | None = "auto",
        deterministic: bool | str | None = "auto",
        max_steps: int | None = -1,
        **kwargs: Any,
    ) -> None:
        resolved: Any = choose_precision("auto") if precision == AUTO else precision
        if _has_accelerator(kwargs.get("accelerator", "auto")):
            kwargs["deterministic"] = deterministic in (AUTO_DETERMINISTIC, None, True)
            leave_memory_unfilled()
        super().__init__(precision=resolved, max_steps=-1 if max_steps is None else max_steps, **kwargs)

    # Lightning's own docstrings are the help of both commands otherwise, and name forms of ckpt_path that are refused.
    def fit(self, *args: Any, ckpt_path: str | Path | None = None, **kwargs: Any) -> None:
        """Trains a model from a recipe, or resumes it (--ckpt_path latest). Code of others needs --allow-imports NAME.

        Args:
            args: As of Lightning's Trainer.
            ckpt_path: The checkpoint to continue from: `latest` (the run's newest, or the start if it has none), a
                run's directory, RUN/best, RUN/STEP such as runs/mine/1000, or a checkpoint's directory.
            kwargs: As of Lightning's Trainer.
        """
        super().fit(*args, **{**kwargs, "ckpt_path": ckpt_path})

    def validate(self, *args: Any, ckpt_path: str | Path | None = None, verbose: bool = True, **kwargs: Any) -> Any:
        """Computes the loss of a checkpoint on the validation set.

        Args:
            args: As of Lightning's Trainer.
            ckpt_path: The checkpoint: `latest` (the run's newest), a run's directory, RUN/best, RUN/STEP such as
                runs/mine/1000, or a checkpoint's directory.
            verbose: Whether to print the results.
            kwargs: As of Lightning's Trainer.

        Returns:
            What Lightning's Trainer returns.
        """
        return super().validate(*args, **{**kwargs, "ckpt_path": ckpt_path, "verbose": verbose})


def _has_accelerator(accelerator: Any) -> bool:
    return accelerator != CPU and (not isinstance(accelerator, str) or find_kind() != CPU)


def complete_trainer(recipe: ResolvedRecipe, recorded: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what the `auto` values of the Trainer's options stand for; a run that continues keeps its own.

    Args:
        recipe: The recipe of the run.
        recorded: The recipe in the checkpoint from which it continues; None for a new run.

    Raises:
        UserError: A value is unknown, or the device cannot train so.
    """
    found: dict[str, Any] = {}
    if recipe.get("trainer.max_steps") is None:
        found["trainer.max_steps"] = -1
    deterministic, accelerator = recipe.get("trainer.deterministic"), recipe.get("trainer.accelerator")
    check_deterministic(deterministic)
    if deterministic in (AUTO_DETERMINISTIC, None):
        found["trainer.deterministic"] = choose_deterministic(recorded)
    precision = recipe.get("trainer.precision")
    if precision == AUTO:
        precision = found["trainer.precision"] = (
            choose_precision(accelerator)
            if recorded is None
            else unify_precision({"trainer": {}, **recorded})["trainer"].get("precision")
        )
    if precision in ("16-mixed", "16", 16) and not _has_accelerator(accelerator):
        # Lightning would train in bfloat16 with a warning, and the recipe would name what did not run.
        raise UserError(
            "trainer.precision is '16-mixed', which a CPU does not have: give --trainer.precision bf16-mixed or 32-true"
        )
    strategy = recipe.find_choice("trainer.strategy")
    if strategy is not None and "compile_blocks" in strategy.options:
        given = strategy.options["compile_blocks"]
        check_compilation(given)
        if given == AUTO:
            compiled = choose_compilation(accelerator) if recorded is None else read_compilation(recorded)
            found["trainer.strategy.init_args.compile_blocks"] = compiled
    return found


def read_recipe(restored: Reference) -> dict[str, Any] | None:
    """Returns the recipe in the checkpoint that is meant, as it is; None where there is none that can be read.

    Whether the checkpoint is whole is found out, and reported, when the run is restored from it.
    """
    try:
        path: Path = restored.find_checkpoint(level=None)
        recipe = read_manifest(path).recipe
    except (UserError, CheckpointError, OSError):
        return None
    return recipe or None


def count_ranks(recipe: ResolvedRecipe) -> int:
    """Returns the number of ranks of each node of this kind; the CPU counts as one device."""
    named, kind = recipe.count_devices(), find_kind()
    if named is not None:
        return named
    return 1 if CPU in (recipe.get("trainer.accelerator"), kind) else max(1, count_devices(kind))
