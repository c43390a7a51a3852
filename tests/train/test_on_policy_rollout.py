"""On-policy distillation in training: exact gradients, equal ranks, and a killed run that ends with the same bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.data.window import IGNORE_INDEX
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.objectives import OnPolicyDistillation
from genesis.objectives.teacher import Teacher
from genesis.train.module import GenesisModule
from genesis_callbacks.testing import run_ranks
from tests.serve.support import start
from tests.tiny_runs import SHAPE, save
from tests.train.rollouts import SEQ_LEN, STEPS, answer, build_data, build_module, read_rows, write_case
from tests.train.support import build_trainer
from tests.train.test_rollout import KeepWindows, KillBeforeStep, KillInGeneration, assert_same_bits, list_answers

pytestmark = pytest.mark.xdist_group("rollouts")

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": ({}, {"group_size": 2, "reward": None}),
    "sampled": ({"divergence": "sampled"}, {"group_size": 2, "reward": None}),
    "with_rewards": ({"rewards": "dapo", "teacher_weight": 0.3}, {}),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("case"))


def build_teacher(vocab_size: int, num_more: int = 3) -> Decoder:
    """Returns a teacher whose vocabulary has more rows than the student's."""
    config = DecoderConfig(
        vocab_size=vocab_size + num_more,
        dim=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        ffn_dim=32,
        max_seq_len=SEQ_LEN,
    )
    decoder = Decoder(config)
    decoder.init_weights(7)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4.0)
    return decoder.eval()


def build_objective(form: str, vocab_size: int) -> OnPolicyDistillation:
    objective = OnPolicyDistillation("set below", **FORMS[form][0])
    objective.loaded_teacher = Teacher(build_teacher(vocab_size), vocab_size=vocab_size, top_k=1, temperature=1.0)
    return objective


def slow_gradients(module: GenesisModule, window: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradient of a step in float64, answer by answer without padding, from whole distributions."""
    model, vocab_size = Decoder(module.decoder_config), module.decoder_config.vocab_size
    model.load_state_dict(weights)
    model.double()
    teacher = build_teacher(vocab_size).double()
    objective, losses = module.objective, []
    assert isinstance(objective, OnPolicyDistillation)
    for micro_batch in window.micro_batches:
        for row, labels in enumerate(micro_batch.labels):
            places = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            ids, own = micro_batch.input_ids[row : row + 1, : int(places[-1]) + 1], labels[places]
            log_probs = model(ids)[0, places].log_softmax(-1)
            log_teacher = teacher(ids)[0, places, :vocab_size].log_softmax(-1).detach()
            if objective.is_exact:
                loss = (log_probs.exp() * (log_probs - log_teacher)).sum(-1)
            else:
                new, of_teacher = (one.gather(1, own[:, None]).squeeze(1) for one in (log_probs, log_teacher))
                ratios = torch.exp(new - micro_batch.extra["old_token_log_prob"][row, places].double())
                loss = ratios * (new - of_teacher).detach()
            loss = objective.teacher_weight * loss
            if objective.learns_rewards:
                new = log_probs.gather(1, own[:, None]).squeeze(1)
                ratios = torch.exp(new - micro_batch.extra["old_token_log_prob"][row, places].double())
                advantage = micro_batch.extra["advantage"][row].double()
                loss = loss - torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.28) * advantage)
            losses.append(loss)
    torch.cat(losses).mean().backward()
    return {f"decoder.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", FORMS)
def test_the_gradients_of_every_step_equal_a_slow_reference(case: Path, form: str) -> None:
    data = build_data(case, **(FORMS[form][1] | ({"group_size": 1} if form == "exact" else {})))
    module, keep = build_module(data, objective=build_objective(form, data.training.vocab_size)), KeepWindows()
    build_trainer("auto", 1, 3, [keep]).fit(module, data)
    assert len(keep.steps) == 3
    for window, weights, gradients in keep.steps:
        expected = slow_gradients(module, window, weights)
        assert expected.keys() == gradients.keys()
        assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).abs().max()) < 1e-5, name


# ---- runs


def answer_taught(form: str, directory: str, case: str, strategy: str, *arguments: Any) -> dict[str, Any]:
    objective = build_objective(form, build_data(Path(case)).training.vocab_size)
    options = {"prompts": FORMS[form][1], "module": {"objective": objective}}
    return answer(directory, case, strategy, *arguments, **options)


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("form", FORMS)
def test_a_distillation_repeats_after_a_kill_and_on_two_ranks(form: str, case: Path, tmp_path: Path) -> None:
    (straight,) = run_ranks(answer_taught, 1, form, str(tmp_path / "straight"), str(case), "replicated")
    log = read_rows(tmp_path / "straight", "train/reverse_kl")
    assert len(log) == STEPS
    if form != "sampled":  # whose estimates of so few tokens are noise
        assert log[-1]["train/reverse_kl"] < log[0]["train/reverse_kl"]
    for row in log:
        assert row["train/entropy"] > 0.0
        assert 0.0 <= row["train/finished"] <= 1.0
        assert 1.0 <= row["train/answer_tokens"] <= 12.0
        assert ("train/reward" in row) == (form == "with_rewards")
        if form != "with_rewards":
            assert row["train/loss"] == row["train/reverse_kl"]

    killer = KillInGeneration() if form == "exact" else KillBeforeStep()
    arguments = (form, str(tmp_path / "killed"), str(case), "replicated", STEPS)
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(answer_taught, 1, *arguments, killer)
    (resumed,) = run_ranks(answer_taught, 1, *arguments)
    assert resumed["restored"] in (3, 4)
    assert_same_bits(straight, resumed)

    strategy = "full" if form == "exact" else "replicated"
    ranks = run_ranks(answer_taught, 2, form, str(tmp_path / "two"), str(case), strategy)
    for step in range(STEPS):
        assert [row for rank in ranks for row in list_answers(rank["batches"])[step]] == list_answers(
            straight["batches"]
        )[step]
    for name, tensor in straight["weights"].items():
        assert float((ranks[0]["weights"][name] - tensor).abs().max()) < 1e-5, name
    for one, other in zip(log, read_rows(tmp_path / "two", "train/reverse_kl"), strict=True):
        for name in ("loss", "reverse_kl", "entropy", "answer_tokens", "finished"):
            assert other[f"train/{name}"] == pytest.approx(one[f"train/{name}"], abs=1e-5), name


# ---- a teacher behind a server


def answer_served(directory: str, case: str, port: int, *arguments: Any) -> dict[str, Any]:
    objective = OnPolicyDistillation(url=f"http://127.0.0.1:{port}/v1", model="latest")
    options = {"prompts": FORMS["sampled"][1], "module": {"objective": objective}}
    return answer(directory, case, "replicated", *arguments, **options)


def answer_loaded(directory: str, case: str) -> dict[str, Any]:
    vocab_size = build_data(Path(case)).training.vocab_size
    objective = OnPolicyDistillation("set below", divergence="sampled")
    objective.loaded_teacher = Teacher(build_teacher(vocab_size, 0), vocab_size=vocab_size, top_k=1, temperature=1.0)
    options = {"prompts": FORMS["sampled"][1], "module": {"objective": objective}}
    return answer(directory, case, "replicated", 3, **options)


@pytest.mark.slow
def test_a_served_teacher_teaches_as_one_that_is_loaded_and_repeats_after_a_kill(case: Path, tmp_path: Path) -> None:
    vocab_size = build_data(case).training.vocab_size
    teacher = build_teacher(vocab_size, 0)  # of others the server's distribution has more ids
    run = tmp_path / "teacher"
    shape = {name: getattr(teacher.config, name) for name in SHAPE}
    save(run / "checkpoints", 1, teacher, {}, **shape)
    shutil.copytree(case / "tokenizer", run, dirs_exist_ok=True)
    run_ranks(answer_loaded, 1, str(tmp_path / "loaded"), str(case))
    with start(run) as server:
        (served,) = run_ranks(answer_served, 1, str(tmp_path / "served"), str(case), server.port)
        arguments = (str(tmp_path / "killed"), str(case), server.port, STEPS)
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(answer_served, 1, *arguments, KillBeforeStep())
        (resumed,) = run_ranks(answer_served, 1, *arguments)
        objective = OnPolicyDistillation(url=f"http://127.0.0.1:{server.port}/v1", model="latest")
        assert objective._server is not None
        objective._server.check(case / "tokenizer", SEQ_LEN)
    assert_same_bits(served, resumed)
    logs = [read_rows(tmp_path / name, "train/reverse_kl") for name in ("served", "loaded")]
    for one, other in zip(logs[0][:3], logs[1], strict=True):  # those of the first rollout
        for name in ("loss", "reverse_kl", "entropy", "answer_tokens", "grad_norm"):
            assert one[f"train/{name}"] == pytest.approx(other[f"train/{name}"], abs=1e-5), name
