"""Rollouts in training: exact gradients, equal ranks, and a run that is killed anywhere and ends with the same bits."""

import csv
import json
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from genesis.base.errors import RunEndedError, UserError
from genesis.data.window import IGNORE_INDEX
from genesis.generate.batch import Batch
from genesis.model.adapter import AdapterConfig
from genesis.model.decoder import Decoder
from genesis.objectives.cross_entropy import CrossEntropy
from genesis.objectives.gspo import GSPO
from genesis.strategies.degrees import Degrees
from genesis.train.data_module import CorpusDataModule
from genesis.train.module import GenesisModule
from genesis_callbacks.checkpoint import list_committed, verify
from genesis_callbacks.phases import Phase, PhaseListener
from genesis_callbacks.testing import run_ranks
from tests.mixtures import MIXTURES
from tests.objectives.test_mixtures import auxiliary_loss
from tests.train.rollouts import GROUP_SIZE, NUM_PROMPTS, STEPS, answer, build_data, build_module, read_log, write_case
from tests.train.support import KeepGradients, build_strategy, build_trainer, whole

pytestmark = pytest.mark.xdist_group("rollouts")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("case"))


Straight = Callable[..., tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def straight(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Returns a run that nothing stops, by ranks and strategy: its directory, and the results of its ranks."""

    @cache
    def run(world_size: int, strategy: str = "replicated") -> tuple[Path, list[dict[str, Any]]]:
        directory = tmp_path_factory.mktemp("straight")
        return directory, run_ranks(answer, world_size, str(directory), str(case), strategy)

    return run


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
    assert (one["counters"], one["position"]) == (other["counters"], other["position"])
    # What the resumed run trained is the end of what the other run trained.
    assert one["batches"][-len(other["batches"]) :] == other["batches"]
    assert one["extras"][-len(other["extras"]) :] == other["extras"]


# ---- a run


@pytest.mark.slow
def test_the_first_step_of_a_rollout_has_the_ratio_one_and_later_ones_do_not(straight: Straight) -> None:
    directory, (run,) = straight(1)
    log = read_log(directory)
    assert len(log) == STEPS
    # Exactly: the old log-probabilities come from the same forward, in the same micro-batches.
    assert [row["train/ratio"] == 1.0 for row in log] == [True, False, False] * 2
    assert [row["train/clipped"] == 0.0 for row in log if row["train/ratio"] == 1.0] == [True, True]
    assert log[-1]["data/prompts_questions"] == run["position"] == 2 * STEPS
    for step, extra in enumerate(run["extras"]):
        assert log[step]["train/reward"] == pytest.approx(sum(extra["reward"]) / len(extra["reward"]), rel=1e-5)
        groups = torch.tensor(extra["advantage"]).view(-1, GROUP_SIZE)
        assert float(groups.sum(1).abs().max()) < 1e-5
        assert log[step]["train/answer_tokens"] <= 12


def test_the_answers_to_some_prompts_are_written_with_their_rewards(straight: Straight) -> None:
    directory, (run,) = straight(1)
    files = sorted((directory / "rollouts").iterdir())
    assert [file.name for file in files] == ["0000000000.rank-0.jsonl", "0000000006.rank-0.jsonl"]
    samples = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [sample["answer"] for sample in samples] == [1, 2, 3, 4]
    assert [sample["reward"] for sample in samples] == pytest.approx(run["extras"][3]["reward"][:GROUP_SIZE])
    assert all(sample["prompt"].startswith("questions ") for sample in samples)
    for sample in samples:
        vowels = sum(character in "aeiou" for character in sample["text"])
        bonus = int(sample["messages"][0]["content"].removeprefix("Question ").removesuffix("?")) / 10
        assert sample["reward"] == pytest.approx(vowels / (len(sample["text"]) + 1) + bonus)


class KeepWindows(KeepGradients):
    """Keeps windows, weights and gradients of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, dict[str, Tensor], dict[str, Tensor]]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.window, self.weights = batch, {k: whole(v) for k, v in pl_module.decoder.state_dict().items()}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self.steps.append((self.window, self.weights, self.gradients))


def slow_gradients(module: GenesisModule, window: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradient of a step in float64, answer by answer without padding."""
    model = Decoder(module.decoder_config)
    model.load_state_dict(weights)
    model.double()
    assert isinstance(module.objective, GSPO)
    losses = []
    for micro_batch in window.micro_batches:
        for row, labels in enumerate(micro_batch.labels):
            places = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            length = int(places[-1]) + 1
            logits = model(micro_batch.input_ids[row : row + 1, :length])[0]
            log_prob = logits.log_softmax(-1)[places, labels[places]].sum()
            ratio = torch.exp((log_prob - micro_batch.extra["old_log_prob"][row].double()) / len(places))
            advantage = micro_batch.extra["advantage"][row].double()
            held = ratio.clamp(1 - module.objective.options.clip_low, 1 + module.objective.options.clip_high)
            losses.append(-torch.minimum(ratio * advantage, held * advantage))
    (torch.stack(losses).mean() + auxiliary_loss(model, window)).backward()
    return {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "mixture", [None, *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.each]) for name in MIXTURES)]
)
def test_the_gradients_of_every_step_equal_a_slow_reference(case: Path, mixture: str | None) -> None:
    data = build_data(case)
    module, keep = build_module(data, mixture), KeepWindows()
    build_trainer("auto", 1, 3, [keep]).fit(module, data)
    assert len(keep.steps) == 3
    for window, weights, gradients in keep.steps:
        expected = slow_gradients(module, window, weights)
        assert expected.keys() == gradients.keys()
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        assert largest > 1e-3
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).abs().max()) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicated", "zero1", "full", "grad_op"])
def test_two_ranks_equal_one(straight: Straight, strategy: str) -> None:
    directory, (alone,) = straight(1)
    others_directory, ranks = straight(2, strategy)
    for step in range(STEPS):
        assert [row for rank in ranks for row in rank["batches"][step]] == alone["batches"][step]
        for name in ("reward", "advantage", "spread"):
            assert [value for rank in ranks for value in rank["extras"][step][name]] == alone["extras"][step][name]
    for name, tensor in alone["weights"].items():
        assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name])
        assert float((ranks[0]["weights"][name] - tensor).abs().max()) < 1e-5
    for one, other in zip(read_log(directory), read_log(others_directory), strict=True):
        for name in ("reward", "reward_spread", "ratio", "clipped", "answer_tokens", "entropy", "finished", "loss"):
            assert other[f"train/{name}"] == pytest.approx(one[f"train/{name}"], abs=1e-5)


# ---- ranks that share the rows, matrices or layers of the same prompts

AXES = [("tensor", 2), ("context", 2), ("pipeline", 2), ("tensor, context", 4), ("tensor, pipeline", 4)]


def list_answers(batches: list[list[Any]]) -> list[list[list[int]]]:
    """Returns the labels of each step without padding, whose length depends on the strategy."""
    return [[[label for label in row if label >= 0] for batch in step for row in batch] for step in batches]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), AXES)
def test_ranks_that_share_prompts_train_on_the_answers_of_one_process(
    straight: Straight, strategy: str, world_size: int
) -> None:
    directory, (alone,) = straight(1)
    shared, ranks = straight(world_size, strategy)
    for rank in ranks:
        assert list_answers(rank["batches"]) == list_answers(alone["batches"])
        assert rank["extras"] == ranks[0]["extras"]
        for name, tensor in rank["weights"].items():  # a rank of a pipeline has those of its layers
            assert float((tensor - alone["weights"][name]).abs().max()) < 5e-5, name
    assert {name for rank in ranks for name in rank["weights"]} == alone["weights"].keys()
    for one, other in zip(read_log(directory), read_log(shared), strict=True):
        # Exactly: the old log-probabilities come from the same forward, also of ranks that share it.
        assert (one["train/ratio"] == 1.0) == (other["train/ratio"] == 1.0)
        for name in ("reward", "reward_spread", "ratio", "clipped", "answer_tokens", "entropy", "finished", "loss"):
            assert other[f"train/{name}"] == pytest.approx(one[f"train/{name}"], abs=1e-5)
    assert len(list((shared / "rollouts").iterdir())) == 2


COUNTED = """
import random
from pathlib import Path

def reward(messages, text, columns):
    with (Path(__file__).parent / "calls").open("a") as calls:
        calls.write("x")
    return random.SystemRandom().random()
"""


def answer_by_chance(directory: str, case: str, strategy: str, is_alone: bool) -> dict[str, Any]:
    if is_alone:
        Degrees.peer_groups = lambda self: tuple((rank,) for rank in range(self.world_size))  # type: ignore[method-assign]
    return answer(directory, case, strategy, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "context", "pipeline"])
def test_an_answer_is_scored_once_and_a_rank_that_rolls_out_alone_is_seen(tmp_path: Path, strategy: str) -> None:
    seen = []
    for is_alone in (False, True):
        case = write_case(tmp_path / str(is_alone), COUNTED)
        first, second = run_ranks(answer_by_chance, 2, str(case / "run"), str(case), strategy, is_alone)
        calls = len((case / "calls").read_text())
        seen.append((first["extras"] == second["extras"], calls // (3 * 2 * GROUP_SIZE)))
    assert seen == [(True, 1), (False, 2)]


def learn_in_form(case: str, form: str) -> set[str]:
    """Trains two steps and returns the names of the tensors that changed."""
    data = build_data(Path(case))
    adapter = AdapterConfig(rank=2, alpha=4.0, dropout=0.2) if form == "adapters" else None
    module, keep = build_module(data, adapter=adapter), KeepWindows()
    options = {"precision": "bf16-mixed"} if form.startswith("bf16") else {}
    strategy = {"bf16, sharded": "full", "compiled": "compiled"}.get(form, "replicated")
    build_trainer(build_strategy(strategy), 1, 2, [keep], **options).fit(module, data)
    assert module.decoder is not None
    assert module.decoder.training
    before, after = keep.steps[0][1], module.decoder.state_dict()
    return {name for name, tensor in after.items() if not torch.equal(whole(tensor), before[name])}


@pytest.mark.parametrize(
    "form",
    ["adapters", *(pytest.param(form, marks=pytest.mark.slow) for form in ("bf16", "bf16, sharded", "compiled"))],
)
def test_other_forms_of_a_model_answer_and_learn(case: Path, form: str) -> None:
    (changed,) = run_ranks(learn_in_form, 1, str(case), form)
    assert changed
    assert all("lora_" in name for name in changed) == (form == "adapters")


def learn_with_experts(case: str, mixture: str, strategy: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Trains two steps; returns the weights after them, whole, and the answers of this rank."""
    data, keep = build_data(Path(case)), ShareAdapters()
    module = build_module(data, mixture)
    build_trainer(build_strategy(strategy), int(os.environ["WORLD_SIZE"]), 2, [keep]).fit(module, data)
    return keep.after, [[m.labels.tolist() for m in window.micro_batches] for window, *_ in keep.steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "strategy"), [("softmax", "experts_2"), ("shared", "experts_2"), ("linear", "full")]
)
def test_ranks_that_share_experts_answer_and_learn_as_one(case: Path, mixture: str, strategy: str) -> None:
    ((alone, batches),) = run_ranks(learn_with_experts, 1, str(case), mixture, "replicated")
    ranks = run_ranks(learn_with_experts, 2, str(case), mixture, strategy)
    assert [[row for _, of_rank in ranks for row in of_rank[step]] for step in range(2)] == batches
    for name, tensor in alone.items():
        assert float((ranks[0][0][name] - tensor).abs().max()) < 1e-5, name


# ---- killed and resumed


class KillBeforeStep(pl.Callback):
    """Kills its rank, by SIGKILL, when a window of a later step of a rollout is about to be trained."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


class KillInGeneration(pl.Callback):
    """Kills its rank, by SIGKILL, when the answers of the second rollout are half written."""

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if trainer.global_step == 3:
            step, count = Batch.step, iter(range(7))

            def step_or_die(batch: Batch) -> Any:
                if next(count, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(batch)

            Batch.step = step_or_die  # type: ignore[method-assign]


class KillInSave(pl.Callback):
    """Kills its rank, by SIGKILL, while the save of a step in the middle of a rollout is copied or written."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("replicated", 1),
        pytest.param("replicated", 2, marks=pytest.mark.slow),
        pytest.param("full", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("killer", "mode", "restored"),
    [
        pytest.param(KillInGeneration, "sync", (3,), marks=pytest.mark.slow),
        (KillBeforeStep, "sync", (4,)),
        # The orphaned writers may or may not have finished the save of the last step.
        pytest.param(KillInSave, "process", (3, 4, 5), marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(
    tmp_path: Path,
    case: Path,
    straight: Straight,
    killer: type[pl.Callback],
    mode: str,
    restored: tuple[int, ...],
    strategy: str,
    world_size: int,
) -> None:
    check_killed(tmp_path, case, straight, strategy, world_size, killer, mode, restored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "killer"), [("tensor", KillInGeneration), ("context", KillBeforeStep), ("pipeline", KillInGeneration)]
)
def test_ranks_that_share_prompts_end_with_the_same_bits_after_a_kill(
    tmp_path: Path, case: Path, straight: Straight, strategy: str, killer: type[pl.Callback]
) -> None:
    check_killed(tmp_path, case, straight, strategy, 2, killer, "sync", (3, 4))


def check_killed(
    tmp_path: Path,
    case: Path,
    straight: Straight,
    strategy: str,
    world_size: int,
    killer: type[pl.Callback],
    mode: str,
    restored: tuple[int, ...],
) -> None:
    directory, ranks = straight(world_size, strategy)
    arguments = (str(tmp_path), str(case), strategy, STEPS)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(answer_in_mode, world_size, mode, *arguments, killer())
    resumed = run_ranks(answer_in_mode, world_size, mode, *arguments)
    for one, other in zip(ranks, resumed, strict=True):
        assert other["restored"] in restored
        assert_same_bits(one, other)
    for one, other in zip(read_log(directory), read_log(tmp_path), strict=True):
        names = ("loss", "reward", "reward_spread", "ratio", "clipped", "no_signal", "entropy", "grad_norm")
        assert [one[f"train/{name}"] for name in names] == [other[f"train/{name}"] for name in names]
    newest, _ = list_committed(tmp_path)[-1]
    assert verify(newest, "deep").counters["updates"] == STEPS


def answer_in_mode(mode: str, *arguments: Any) -> dict[str, Any]:
    return answer(*arguments, mode=mode)


@pytest.mark.slow
def test_a_rollout_continues_on_another_number_of_ranks(tmp_path: Path, case: Path, straight: Straight) -> None:
    _, (alone,) = straight(1)
    run_ranks(answer, 2, str(tmp_path), str(case), "replicated", 2)
    (resumed,) = run_ranks(answer, 1, str(tmp_path), str(case), "replicated", 3)
    # The third step has the answers that two ranks wrote before the first.
    assert resumed["batches"] == alone["batches"][2:3]
    assert resumed["extras"][0]["old_log_prob"] == pytest.approx(alone["extras"][2]["old_log_prob"], abs=1e-4)


# ---- refused


def test_an_error_of_the_reward_function_ends_the_run_with_the_row(tmp_path: Path) -> None:
    for body, message in (
        ("1 / columns['bonus']", r"failed for answer 1 to .*prompts.jsonl, line 1: ZeroDivisionError.*; correct it$"),
        (
            "float('nan')",
            r"gave nan for answer 1 to .*prompts.jsonl, line \d; return a finite number that fits float32$",
        ),
    ):
        case = write_case(tmp_path, f"def reward(messages, text, columns):\n    return {body}\n")
        data = build_data(case)
        with pytest.raises(UserError, match=message):
            build_trainer("auto", 1, STEPS, []).fit(build_module(data), data)


def fail_on_one_rank(directory: str, case: str) -> str:
    try:
        answer(directory, case)
    except (UserError, RunEndedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    # The ranks share each global batch of two prompts; of position 0 and 1 only one has this record.
    case = write_case(tmp_path)
    first = build_data(case).training.prompt_at(0)  # type: ignore[attr-defined]
    (case / "reward.py").write_text(
        f"def reward(messages, text, columns):\n    return 1 / (columns['bonus'] != {first.columns['bonus']!r})\n"
    )
    outcomes = run_ranks(fail_on_one_rank, 2, str(tmp_path / "run"), str(case))
    assert outcomes[0].startswith("UserError: the reward function")
    assert outcomes[1].startswith("RunEndedError: another rank could not answer or score its prompts")


def test_data_objective_and_strategy_that_do_not_fit_are_refused(case: Path, tiny_corpus: Path, tmp_path: Path) -> None:
    data = build_data(case)
    module = build_module(data, objective=CrossEntropy())
    with pytest.raises(UserError, match=r"data\.prompts is given, but model\.objective is CrossEntropy"):
        build_trainer("auto", 1, 2, []).fit(module, data)
    corpus = CorpusDataModule(str(tiny_corpus), seq_len=16, micro_batch_size=2, global_batch_size=8)
    with pytest.raises(UserError, match=r"model\.objective is GSPO, which learns from its own answers"):
        build_trainer("auto", 1, 2, []).fit(build_module(build_data(case)), corpus)
    data = build_data(case)
    with pytest.raises(UserError, match="but the model has no adapters"):
        build_trainer("auto", 1, 2, []).fit(build_module(data, objective=GSPO(kl=0.1)), data)
    data = build_data(case)
    data.allows_reward_code = False
    with pytest.raises(UserError, match="--allow_reward_code true"):
        build_trainer("auto", 1, 2, []).fit(build_module(data), data)


def refuse_offloaded(case: str) -> str:
    data = build_data(Path(case))
    try:
        build_trainer(build_strategy("offload"), 1, 2, []).fit(build_module(data), data)
    except UserError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_offloaded_parameters_are_refused_by_name(case: Path) -> None:
    (message,) = run_ranks(refuse_offloaded, 1, str(case))
    assert message.startswith("trainer.strategy has cpu_offload")


def hold_to_base(directory: str, case: str, strategy: str) -> None:
    module = {
        "adapter": AdapterConfig(rank=2, alpha=4.0, dropout=0.1),
        "objective": GSPO(clip_low=0.01, clip_high=0.01, kl=0.1),
    }
    answer(directory, case, strategy, 3, module=module, prompts={"steps_per_rollout": 1})


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("replicated", 1), ("full", 2), *AXES[:3]])
def test_the_kl_to_the_base_begins_at_zero_and_grows(
    tmp_path: Path, case: Path, strategy: str, world_size: int
) -> None:
    run_ranks(hold_to_base, world_size, str(tmp_path), str(case), strategy)
    first, second, third = (row["train/kl"] for row in read_log(tmp_path))
    assert first == 0.0  # new adapters add nothing
    assert 0.0 < second < third


class ShareAdapters(KeepWindows):
    """Keeps the gathered weights after training, too."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.after = {name: whole(tensor) for name, tensor in pl_module.decoder.state_dict().items()}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.window, self.weights = batch, {}


def train_adapters(case: str, strategy: str) -> tuple[dict[str, Tensor], list[Any]]:
    data = build_data(Path(case))
    module, keep = build_module(data, adapter=AdapterConfig(rank=2, alpha=4.0)), ShareAdapters()
    build_trainer(build_strategy(strategy), int(os.environ["WORLD_SIZE"]), 2, [keep]).fit(module, data)
    return keep.after, [[m.labels.tolist() for m in window.micro_batches] for window, *_ in keep.steps]


@pytest.mark.slow
def test_sharded_adapters_answer_and_learn_as_whole_ones(case: Path) -> None:
    ((alone, batches),) = run_ranks(train_adapters, 1, str(case), "replicated")
    ranks = run_ranks(train_adapters, 2, str(case), "full")
    assert [[row for _, of_rank in ranks for row in of_rank[step]] for step in range(2)] == batches
    for name, tensor in alone.items():
        assert float((ranks[0][0][name] - tensor).abs().max()) < 1e-5, name


# ---- validation


class Phases(pl.Callback, PhaseListener):
    """Notes each phase with what the Trainer does meanwhile."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self._trainer: pl.Trainer | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer

    def enter_phase(self, phase: Phase) -> None:
        if self._trainer is not None and phase != "save":
            self.found.add((phase, "validate" if self._trainer.validating else "train"))


@pytest.mark.slow
def test_held_out_prompts_are_validated_by_greedy_answers_and_change_no_training(case: Path, tmp_path: Path) -> None:
    prompts = {"validation_share": 0.4}
    silent = answer(str(tmp_path / "silent"), str(case), prompts=prompts, limit_val_batches=0)
    phases = Phases()
    words = (str(tmp_path / "validated"), str(case), "replicated", STEPS)
    validated = answer(*words, phases, prompts=prompts, val_check_interval=2)
    assert_same_bits(silent, validated)
    # `HangWatch` and the supervisor have a limit of their own for answers, also for those of a validation.
    assert phases.found == {("generate", "train"), ("generate", "validate")}
    rewards = read_rewards(tmp_path / "validated")
    assert len(rewards) == STEPS // 2
    # Killed after a step and resumed: the later validations are the same.
    answer(str(tmp_path / "resumed"), str(case), "replicated", 3, prompts=prompts, val_check_interval=2)
    answer(str(tmp_path / "resumed"), str(case), prompts=prompts, val_check_interval=2)
    assert read_rewards(tmp_path / "resumed") == rewards

    data = build_data(case, **prompts)
    held_out, trained = data.training.prompts.held_out, data.training.prompts.of_source["questions"]
    assert (len(held_out) > 0, len(held_out) + len(trained)) == (True, NUM_PROMPTS)
    assert {p.ids for p in held_out}.isdisjoint(p.ids for p in trained)
    decoder = Decoder(build_module(data).decoder_config).eval()
    decoder.load_state_dict({name.removeprefix("decoder."): w for name, w in validated["weights"].items()})
    assert rewards[-1] == pytest.approx(mean_greedy_reward(decoder, data, held_out))


def read_rewards(directory: Path) -> list[float]:
    with (directory / "metrics.csv").open() as file:
        return [float(row["validation/reward"]) for row in csv.DictReader(file) if row.get("validation/reward")]


def mean_greedy_reward(decoder: Decoder, data: CorpusDataModule, prompts: Any) -> float:
    """Returns the mean reward of answers that are written token by token, without a cache."""
    tokenizer, rewards, stop_ids = data.training.tokenizer, [], data.training.stop_ids
    for prompt in prompts:
        ids = list(prompt.ids)
        while len(ids) < len(prompt.ids) + 12 and (ids == list(prompt.ids) or ids[-1] not in stop_ids):
            with torch.no_grad():
                ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
        new = [token for token in ids[len(prompt.ids) :] if token not in stop_ids]
        text = tokenizer.spell(new, has_controls=True)
        rewards.append(sum(c in "aeiou" for c in text) / (len(text) + 1) + prompt.columns["bonus"])
    return sum(rewards) / len(rewards)


def validate_some(directory: str, case: str, strategy: str) -> None:
    answer(directory, case, strategy, prompts={"validation_share": 0.4, "num_rows": 1}, val_check_interval=2)


@pytest.mark.slow
def test_two_ranks_validate_as_one(case: Path, tmp_path: Path) -> None:
    found = []
    for world_size, strategy in ((1, "replicated"), (2, "replicated"), (2, "tensor"), (2, "pipeline")):
        directory = tmp_path / f"{strategy} {world_size}"
        run_ranks(validate_some, world_size, str(directory), str(case), strategy)
        found.append(read_rewards(directory))
    for rewards in found[1:]:
        assert rewards == pytest.approx(found[0], rel=1e-4)


def test_a_share_that_holds_out_nothing_or_everything_is_refused(case: Path) -> None:
    with pytest.raises(UserError, match=r"validation_share is 1.0; it must be at least 0 and below 1"):
        build_data(case, validation_share=1.0)
    with pytest.raises(UserError, match=r"validation_share 1e-09 holds out none of 7 prompts"):
        _ = build_data(case, validation_share=1e-9).training.prompts
    with pytest.raises(UserError, match=r"no prompt that fits .* and is not held out"):
        _ = build_data(case, validation_share=0.999999999).training.prompts
