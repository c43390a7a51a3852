"""The objectives train a model of transformers as a plain loop of transformers with their definitions trains it."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from genesis.data.window import IGNORE_INDEX
from genesis.model.adapter import AdapterConfig, attach_adapters, init_adapters
from genesis.model.foreign.decoder import TransformersDecoder
from genesis.objectives.objective import ObjectiveSums, prepare
from genesis.objectives.preference import DPO
from genesis.objectives.vocabulary import WHOLE
from genesis.optim import AdamW, build_optimizer
from tests.model.foreign.models import configure, make_theirs, wrap
from tests.model.foreign.test_decoder import split_by_kind
from tests.objectives import test_distillation, test_preference
from tests.objectives.support import make_pairs, window_of
from tests.outside.kto import KTO
from tests.outside.test_kto import open_data, prepare_answers, split

STEPS = 3


def read_logits(theirs: Any) -> Any:
    """Returns what the slow references call with ids alone: the logits of transformers' own forward."""
    return lambda ids: theirs(input_ids=ids, use_cache=False).logits


def compare(theirs: Any, step_ours: Callable[[Any, int], Tensor], step_theirs: Callable[[Any, int], Tensor]) -> None:
    """Trains both models and compares their losses."""
    theirs.get_input_embeddings().padding_idx = None
    ours = wrap(theirs).train()
    optimizer = build_optimizer(ours, AdamW(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95)))
    reference = torch.optim.AdamW(split_by_kind(theirs), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        losses = []
        for model, run, algorithm in ((ours, step_ours, optimizer), (theirs, step_theirs, reference)):
            algorithm.zero_grad()
            loss = run(model, step)
            loss.backward()
            algorithm.step()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def adapt(base: Any) -> tuple[TransformersDecoder, Any]:
    """Returns the model with adapters that change it, and transformers' model with the merged weights."""
    policy, merged = wrap(base), copy.deepcopy(base)
    config = AdapterConfig(rank=3, alpha=6.0, include=("*_proj",))
    layers = attach_adapters(policy, config)
    init_adapters(policy, 1)
    with torch.no_grad():
        for name in layers:
            layer: Any = policy.get_submodule(name)
            layer.lora_B.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
            merged.get_parameter(f"{name.removeprefix('model.')}.weight").add_(2.0 * layer.lora_B @ layer.lora_A)
    return policy.eval(), merged.eval()


@pytest.mark.parametrize("kind", ["gemma2", "phi3"])
def test_preferences_are_learned_beside_a_reference(kind: str) -> None:
    reference = read_logits(make_theirs(configure(kind, hidden_size=48)))
    objective, options = DPO(beta=0.3, sft_weight=0.2), {"beta": 0.3, "sft_weight": 0.2}

    def step_ours(model: Any, step: int) -> Tensor:
        pairs = make_pairs(4, seed=step)
        objective.log_probs = test_preference.table_of(reference, pairs)
        return test_preference.run(objective, model, window_of(pairs, 2), WHOLE.bounded(model.softcap))[0]

    def step_theirs(model: Any, step: int) -> Tensor:
        return test_preference.slow_loss(read_logits(model), reference, make_pairs(4, seed=step), options)

    compare(make_theirs(configure(kind)), step_ours, step_theirs)


def test_the_reference_of_adapters_is_the_model_without_them() -> None:
    base = make_theirs(configure("gemma3_text"))
    policy, merged = adapt(base)
    loss, _ = test_preference.run(DPO(), policy, window_of(make_pairs(4), 2))
    wanted = test_preference.slow_loss(read_logits(merged), read_logits(base), make_pairs(4), {})
    assert abs(float(wanted.detach()) - math.log(2)) > 1e-2
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    loss.backward()
    assert all(("lora" in name) == (one.grad is not None) for name, one in policy.named_parameters())


def test_a_student_learns_a_teacher() -> None:
    teacher = test_distillation.build_decoder(32, seed=0)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(6.0)
    objective = test_distillation.build_objective(teacher.eval())

    def step_ours(model: Any, step: int) -> Tensor:
        return test_distillation.run(model, test_distillation.make_text(4, seed=step), objective)[0]

    def step_theirs(model: Any, step: int) -> Tensor:
        text, at = test_distillation.make_text(4, seed=step), objective.temperature
        logits = model(input_ids=text.input_ids, use_cache=False).logits
        with torch.no_grad():
            log_p = (teacher(text.input_ids) / at).log_softmax(-1)
        log_q, top = (logits / at).log_softmax(-1), log_p.topk(objective.top_k).indices
        p, q = (
            torch.cat((one.gather(-1, top), one.scatter(-1, top, -torch.inf).logsumexp(-1, True)), -1)
            for one in (log_p, log_q)
        )
        divergence = (p.exp() * (p - q)).sum(-1).mean()
        own = cross_entropy(logits.flatten(0, 1), text.labels.flatten(), ignore_index=IGNORE_INDEX)
        share = objective.teacher_share
        return (1 - share) * own + share * at**2 * divergence

    compare(make_theirs(configure("olmo3", vocab_size=test_distillation.VOCAB)), step_ours, step_theirs)


@pytest.mark.slow
@torch.no_grad()
def test_an_objective_of_another_package_has_its_own_loss(tmp_path: Path) -> None:
    window, objective = open_data(prepare_answers(tmp_path), "best_fit").window(0), KTO(beta=0.5)
    base = make_theirs(configure("granite", vocab_size=400)).eval()
    policy, merged = adapt(base)
    (given,) = window.micro_batches
    ready = prepare(objective, policy, given, WHOLE)
    result = policy(
        ready.input_ids,
        document_ids=ready.document_ids,
        document_offsets=ready.document_offsets,
        head=objective.head(ready, WHOLE),
    )
    sums = ({name: float(value) for name, value in of.items()} for of in result)
    measured = objective.measure(ObjectiveSums(*sums, objective.count(window)))

    def score(prompt: list[int], answer: list[int]) -> float:
        ids, wanted = torch.tensor([[*prompt, *answer[:-1]]]), torch.tensor(answer)[:, None]
        logs = [read_logits(one)(ids).log_softmax(-1)[0, len(prompt) - 1 :] for one in (merged, base)]
        return float((logs[0] - logs[1]).gather(1, wanted).sum())

    documents = split(window)
    others = [*documents[1:], documents[0]]
    crossed = [score(one.prompt, other.answer) for one, other in zip(documents, others, strict=True)]
    baseline = max(0.0, sum(crossed) / len(documents))
    margins = [(score(one.prompt, one.answer) - baseline) * (1 if one.value else -1) for one in documents]
    wanted = sum(1 - 1 / (1 + math.exp(-0.5 * margin)) for margin in margins) / len(documents)
    assert measured["loss"] == pytest.approx(wanted, rel=1e-4)
    assert measured["baseline"] == pytest.approx(baseline, rel=1e-3, abs=1e-5)
