"""The keys of a genesis recipe that may change when a run continues."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from genesis.base.determinism import unify_deterministic
from genesis.model.attend.table import FLASH
from genesis.model.compilation import unify_compilation
from genesis.model.precision import unify_precision
from genesis.model.recipe import unify_decoder
from genesis.optim.recipe import read_adapter_decay, unify_optimizer
from genesis.recipe.deprecated import rename_in_recipe
from genesis.recipe.options import CLASS_PATH, INIT_ARGS, Options
from genesis_callbacks.checkpoint import DriftPolicy
from genesis_callbacks.schedule import Schedule, ScheduleOptions

_FREE: Final = (
    # Where the run executes, and the paths of its files.
    *("run_dir", "fork", "ckpt_path", "weights_only", "config", "data.corpus", "data.tokenizer_hash"),
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    *("trainer.default_root_dir", "trainer.use_distributed_sampler", "trainer.sync_batchnorm"),
    # How the same windows are read and cut: the sum over a global batch is the same.
    *("data.micro_batch_size", "data.prefetch_windows", "data.verify_hashes", "data.pads_pairs"),
    # The consent by itself; what a run has skipped is in its order's state.
    "data.skip_positions",
    # The data module compares the packing, and rejects another one.
    "data.packing",
    *("data.stream.num_workers", "data.stream.max_worker_restarts", "data.stream.tokenizer"),
    # The path of a source; the identity of the stream has the hash of its files.
    "data.stream.sources.*.paths",
    # The identity of prompts has the hashes of what these lead to.
    *("data.prompts.sources.*.paths", "data.prompts.tokenizer", "data.prompts.template"),
    *("data.prompts.num_rows", "data.prompts.num_logged_prompts", "data.prompts.reward_seconds"),
    *("data.prompts.num_environments", "data.prompts.step_seconds"),
    "data.prompts.rewards.*.model",
    # Where a server is, and how long it is waited for.
    *("data.prompts.rollouts.url", "data.prompts.rollouts.num_concurrent"),
    *("data.prompts.rollouts.request_seconds", "data.prompts.rollouts.retry_seconds"),
    # Saving, logging and display.
    *("checkpoint", "verification", "telemetry", "trainer.logger", "trainer.log_every_n_steps", "trainer.enable_*"),
    *("trainer.model_registry", "trainer.profiler", "trainer.barebones", "trainer.detect_anomaly"),
    *("trainer.fast_dev_run",),
    # Validation.
    *("data.validation_micro_batch_size", "data.limit_validation_sequences", "trainer.limit_*_batches"),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.num_sanity_val_steps"),
    *("trainer.inference_mode",),
    # Limits at which the run gives up.
    *("trainer.max_time", "counters.max_consecutive_skips"),
)
_OBJECTIVE: Final = "genesis.objectives.objective.Objective"
_NEVER: Final = ("tokenizer_hash", "model.decoder", "model.adapter", "data.seed", "data.seq_len")


def unify_recipe(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe with current option names and one spelling of the decoder, so that equal runs compare equal."""
    unified = unify_deterministic(unify_precision(unify_decoder(unify_optimizer(rename_in_recipe(recipe)))))
    return fill_attention(unify_compilation(_fill_prompts(_fill_objective(_fill_adapter_decay(unified)))))


def _fill_adapter_decay(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe with the weight decay of its adapters: before there was a choice, it was that of matrices."""
    model = recipe.get("model")
    if not isinstance(model, Mapping) or model.get("adapter") is None:
        return recipe
    options = {**(model.get("optimizer") or {}), "adapter_weight_decay": read_adapter_decay(recipe)}
    return {**recipe, "model": {**model, "optimizer": options}}


def _fill_objective(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe with all options of its objective: the default of an option that is added is what ran before."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return recipe
    objective = model.get("objective")
    if not isinstance(objective, Mapping) or not isinstance(objective.get(CLASS_PATH), str):
        return recipe
    options = Options.read()
    known = options.classes.get(options.find_class(objective[CLASS_PATH], _OBJECTIVE), {})
    given = {name: option.default for name, option in known.items()} | (objective.get(INIT_ARGS) or {})
    return {**recipe, "model": {**model, "objective": {**objective, INIT_ARGS: given}}}


def _fill_prompts(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe with what training on prompts did before there was a choice."""
    data = recipe.get("data")
    if not isinstance(data, Mapping) or not isinstance(data.get("prompts"), Mapping):
        return recipe
    prompts = {"rewards": [], "max_resamples": 0, "environment": None, "rollouts": None, **data["prompts"]}
    if prompts["environment"] is None:  # the option has no effect
        prompts["max_turns"] = None
    rewards = prompts["rewards"]
    if isinstance(rewards, list):
        prompts["rewards"] = [{"model": None, **one} if isinstance(one, Mapping) else one for one in rewards]
    return {**recipe, "data": {**data, "prompts": prompts}}


def fill_attention(recipe: Mapping[str, Any], kernel: str = FLASH.name) -> Mapping[str, Any]:
    """Returns a recipe with a kernel of attention, if it has none: before there was a choice, these are what ran."""
    model = recipe.get("model")
    if not isinstance(model, Mapping) or "attention" in model:
        return recipe
    return {**recipe, "model": {**model, "attention": kernel}}


_SCHEDULE: Final = {field.name for field in fields(ScheduleOptions)}


def align_schedule(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a recipe with the schedule of an earlier one, if both are the same: lengths have several spellings.

    A schedule of 5,000 updates with a warm-up of 100 is one with a warm-up of 0.02 that ends with a run of 5,000 steps.
    """
    planned = _plan_schedule(before)
    if planned is None or planned != _plan_schedule(now):
        return now
    return {**now, "schedule": before["schedule"]}


def _plan_schedule(recipe: Mapping[str, Any]) -> tuple[Schedule, Mapping[str, Any]] | None:
    """Returns the schedule of a recipe and its other options; None if it depends on the data, or there is none."""
    trainer, options = recipe.get("trainer"), recipe.get("schedule")
    max_steps = trainer.get("max_steps") if isinstance(trainer, Mapping) else None
    if not isinstance(options, Mapping):
        return None
    others = {name: value for name, value in options.items() if name not in _SCHEDULE}
    try:
        known = {name: value for name, value in options.items() if name in _SCHEDULE}
        schedule = ScheduleOptions(**known).plan(max_steps if isinstance(max_steps, int) else -1)
    except (TypeError, ValueError, ArithmeticError):  # of an untrusted manifest, or a length in epochs
        return None
    return None if schedule is None else (schedule, {"by": options.get("by"), **others})


RECIPE_POLICY: Final = DriftPolicy(
    rules=(
        ("allow", "model.decoder.dropout"),
        ("allow", "trainer.limit_train_batches"),
        ("allow", "model.adapter.dropout"),
        ("free", "model.keeps_dropout"),  # what follows from it are the two before
        # Compiled kernels round in other places.
        ("allow", "trainer.strategy.init_args.compile_blocks"),
        # The base is compared by hash, and `start` affects only the first start.
        ("free", "model.adapter.base"),
        ("free", "model.adapter.start"),
        # The identity has the hash of the reference, which the command compares: a new run has one of its own.
        ("free", "model.objective.init_args.reference"),
        ("free", "reference"),
        # The identity has the hashes of a distillation's teacher and cache.
        ("free", "model.objective.init_args.teacher"),
        ("free", "model.objective.init_args.cache"),
        *(("free", f"model.objective.init_args.{name}") for name in ("url", "request_seconds", "num_requests")),
        *(("never", pattern) for pattern in _NEVER),
        *(("free", pattern) for pattern in _FREE),
    ),
    areas=(
        ("optimizer", "model.optimizer"),
        ("optimizer", "schedule"),
        ("optimizer", "trainer.gradient_clip_*"),
        ("model", "model"),
        ("data", "data"),
        ("trainer", "trainer"),
    ),
    remedy="--checkpoint.allow_changed '{keys}'",
    unify=unify_recipe,
    align=align_schedule,
)
"""Keys in neither list (learning rate, schedule, max_steps, mix, precision, ...) need permission by name to change."""
