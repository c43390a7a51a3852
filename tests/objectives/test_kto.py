"""KTO: values and gradients equal to the definition and to TRL's trainer, whatever the split of the window."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.data.pairs import Answer, Pair
from genesis.data.window import AccumulationWindow
from genesis.huggingface.llama import LLAMA
from genesis.model.decoder import Decoder
from genesis.objectives import KTO
from genesis.objectives.objective import ObjectiveSums, prepare
from genesis.objectives.vocabulary import WHOLE
from tests.chat.support import write_tokenizer
from tests.objectives.support import make_adapted, make_decoder, make_pairs, slow_log_prob, window_of
from tests.objectives.test_preference import gradients_of, table_of
from tests.objectives.test_trl import to_transformers


def make_answers(count: int) -> list[Pair]:
    """Returns answers with a value, and each prompt with the answer to the next one."""
    answers = [pair.chosen for pair in make_pairs(count)]
    found = []
    for number, answer in enumerate(answers):
        other, asked = answers[(number + 1) % count], int(answer.has_label.argmax())
        begin = int(other.has_label.argmax())
        tokens = torch.cat([torch.from_numpy(answer.tokens[:asked]), torch.from_numpy(other.tokens[begin:])]).numpy()
        mismatched = Answer(tokens, torch.arange(len(tokens)).ge(asked).numpy())
        found.append(Pair(number, answer, mismatched, number % 3 % 2))
    return found


valued_window = partial(window_of, is_valued=True)


def slow_loss(policy: Decoder, reference: Decoder, answers: list[Pair], objective: KTO) -> tuple[Tensor, float]:
    """The loss of all answers as the paper writes it, and z."""

    def ratio(answer: Answer) -> Tensor:
        with torch.no_grad():
            given = slow_log_prob(reference, answer)
        return slow_log_prob(policy, answer) - given

    with torch.no_grad():
        z = max(0.0, float(torch.stack([ratio(one.rejected) for one in answers]).mean()))
    losses = []
    for one in answers:
        r = ratio(one.chosen)
        if one.value:
            losses.append(objective.desirable_weight * (1 - torch.sigmoid(objective.beta * (r - z))))
        else:
            losses.append(objective.undesirable_weight * (1 - torch.sigmoid(objective.beta * (z - r))))
    return torch.stack(losses).mean(), z


def run(objective: KTO, decoder: Decoder, window: AccumulationWindow) -> tuple[Tensor, ObjectiveSums]:
    """A step without a strategy."""
    counts = objective.count(window)
    sums, losses = ObjectiveSums(counts=counts), []
    with torch.no_grad():
        given = objective.prepare_window(decoder, window.micro_batches, WHOLE, lambda values: values)
    for one in given:
        micro_batch = prepare(objective, decoder, one, WHOLE)
        result = decoder(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            document_offsets=micro_batch.document_offsets,
            head=objective.head(micro_batch, WHOLE),
        )
        losses.append(result.terms["answers"] / counts["answers"])
        values = ({name: float(value.detach()) for name, value in of_one.items()} for of_one in result)
        sums = sums + ObjectiveSums(*values)
    return torch.stack(losses).sum(), sums


@pytest.mark.parametrize(
    ("size", "is_padded", "num_missing"), [(6, False, 0), (2, False, 0), (3, True, 0), (4, False, 2)]
)
@pytest.mark.parametrize("seeds", [(1, 0), (0, 1)], ids=["above", "at_zero"])
def test_loss_and_gradients_equal_the_definition_in_float64(
    size: int, is_padded: bool, num_missing: int, seeds: tuple[int, int]
) -> None:
    answers, objective = make_answers(6), KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    exact, reference = (make_decoder(seed).double() for seed in seeds)
    wanted, z = slow_loss(exact, reference, answers, objective)
    assert (z > 0.0) == (seeds == (1, 0))
    wanted_gradients = gradients_of(exact, wanted)
    policy = make_decoder(seeds[0])
    objective.log_probs = table_of(reference, answers)
    loss, sums = run(objective, policy, valued_window(answers, size, is_padded=is_padded, num_missing=num_missing))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    values = objective.measure(sums)
    assert values["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert values["kl"] == pytest.approx(z, rel=1e-5, abs=1e-6)
    assert values["desirable"] == pytest.approx(sum(one.value for one in answers) / 6)
    assert values["reward_margin"] == pytest.approx(values["rewards_desirable"] - values["rewards_undesirable"])
    for name, gradient in gradients_of(policy, loss).items():
        error = (gradient - wanted_gradients[name]).norm() / wanted_gradients[name].norm()
        assert error < 1e-5, name


def test_the_reference_of_adapters_is_the_base_and_a_validation_has_the_z_of_each_micro_batch() -> None:
    answers, base, objective = make_answers(4), make_decoder(0), KTO(beta=0.5)
    policy = make_adapted(base)
    wanted, _ = slow_loss(policy, base, answers, objective)
    loss, _ = run(objective, policy, valued_window(answers, 2))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    (micro_batch,) = valued_window(answers, 4).micro_batches
    alone = prepare(objective, policy, micro_batch, WHOLE)
    (in_window,) = objective.prepare_window(policy, [micro_batch], WHOLE, lambda values: values)
    assert alone.tensors.keys() == in_window.tensors.keys()
    assert all(torch.equal(tensor, in_window.tensors[name]) for name, tensor in alone.tensors.items())


def test_z_is_that_of_all_ranks() -> None:
    answers, base, objective = make_answers(6), make_decoder(0), KTO()
    policy = make_adapted(base)
    _, z = slow_loss(policy, base, answers, objective)
    whole = valued_window(answers, 6).micro_batches
    halves = [valued_window(answers[first : first + 3], 3).micro_batches for first in (0, 3)]
    shares: list[tuple[float, ...]] = []
    for half in halves:
        objective.prepare_window(policy, half, WHOLE, lambda values: shares.append(tuple(values)) or values)  # type: ignore[func-returns-value]
    total = [sum(values) for values in zip(*shares, strict=True)]
    found = [objective.prepare_window(policy, half, WHOLE, lambda values: total)[0].extra["kl"] for half in halves]
    (one,) = objective.prepare_window(policy, whole, WHOLE, lambda values: values)
    for kl in (*found, one.extra["kl"]):
        assert float(kl) == pytest.approx(z, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"beta": 0.0}, "beta is 0: it must be a number above 0"),
        ({"desirable_weight": -1.0}, "desirable_weight is -1: it must be a number of at least 0"),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "are 0: give at least one of them"),
        ({"reference": ""}, "model.objective.reference is empty"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        KTO(**options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_loss_gradients_and_log_equal_those_of_trl(tmp_path: Path) -> None:
    trl, transformers = import_module("trl"), import_module("transformers")
    policy, reference, answers = make_decoder(0), make_decoder(1), make_answers(6)
    objective = KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    objective.log_probs = table_of(reference, answers)
    loss, sums = run(objective, policy, valued_window(answers, 2))
    gradients = LLAMA.to_theirs(gradients_of(policy, loss))

    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer/tokenizer.json"), eos_token="</s>", pad_token="<pad>"
    )
    arguments = trl.KTOConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        report_to="none",
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=False,
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.7,
        per_device_train_batch_size=6,
        train_sampling_strategy="sequential",
    )
    rows = import_module("datasets").Dataset.from_list(
        [{"prompt": text, "completion": text, "label": True} for text in "abcdef"]
    )
    model, given = to_transformers(policy), to_transformers(reference)
    trainer = trl.KTOTrainer(
        model=model, ref_model=given, args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    examples = []
    for one in answers:
        asked = int(one.chosen.has_label.argmax())
        examples.append(
            {
                "prompt_ids": one.chosen.tokens[:asked].tolist(),
                "completion_ids": one.chosen.tokens[asked:].tolist(),
                "KL_completion_ids": one.rejected.tokens[asked:].tolist(),
                "label": bool(one.value),
            }
        )
    wanted = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name
    logged, values = {name: value[-1] for name, value in trainer._metrics["train"].items()}, objective.measure(sums)
    pairs = {"kl": "kl", "rewards/chosen": "rewards_desirable", "rewards/rejected": "rewards_undesirable"}
    for name, own in pairs.items():
        assert values[own] == pytest.approx(logged[name], rel=1e-4, abs=1e-5), name
