"""Planted faults of model, loss and batch: each is caught by the name of its check. All in one fit of one step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from genesis.data.window import IGNORE_INDEX, AccumulationWindow, MicroBatch
from genesis.model.attention import AttentionConfig
from genesis.model.loss import sum_cross_entropy
from genesis.model.mixer import ForwardTokens
from genesis.objectives.vocabulary import Vocabulary
from genesis.operations.doctor.checks import Check
from genesis.operations.doctor.model_checks import CHECKS, Scene
from genesis.operations.doctor.observe import Watch
from genesis.operations.doctor.protocol import _find_tokenizer
from genesis.operations.doctor.recipe import SINGLE
from genesis.operations.doctor.sample import choose_places, show_sample
from tests.operations.doctor.recipes import builder, write_recipe

Fault = Callable[[Scene], AbstractContextManager[Any]]
NAMES = set(CHECKS)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def leak_documents(scene: Scene) -> AbstractContextManager[None]:
    """A mask that forgets documents."""
    build = AttentionConfig.build_metadata

    def forget(attention: AttentionConfig, tokens: ForwardTokens, layers: Sequence[int]) -> Any:
        return build(attention, tokens._replace(document_ids=None, offsets=None), layers)

    return patched(AttentionConfig, "build_metadata", forget)


@contextmanager
def see_later_tokens(scene: Scene) -> Iterator[None]:
    """Each token also gets the embedding of the next one."""
    handle = scene.decoder.embedding.register_forward_hook(lambda part, given, out: out + out.roll(-1, 1))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def have_large_weights(scene: Scene) -> Iterator[None]:
    weight = scene.decoder.output_weight.data
    weight.mul_(60.0)
    try:
        yield
    finally:
        weight.div_(60.0)


def shift_loss(scene: Scene) -> AbstractContextManager[None]:
    """A loss that shifts the labels once more."""

    class Shifted(Vocabulary):
        def sum_cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], 1)
            return sum_cross_entropy(hidden, weight, shifted)

    return patched(scene.trainer.strategy, "vocabulary", Shifted())


def normalise_each(scene: Scene) -> AbstractContextManager[None]:
    """A training loss that divides by the valid tokens of each micro-batch."""

    class Mean(Vocabulary):
        def sum_cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            total = sum_cross_entropy(hidden, weight, labels)
            return 50 * total / (labels != IGNORE_INDEX).sum() if torch.is_grad_enabled() else total

    return patched(scene.trainer.strategy, "vocabulary", Mean())


# ---- batches


def with_labels(window: AccumulationWindow, change: Callable[[MicroBatch], Tensor]) -> AccumulationWindow:
    changed = tuple(replace(micro, labels=change(micro)) for micro in window.micro_batches)
    num_valid = sum(int((micro.labels != IGNORE_INDEX).sum()) for micro in changed)
    return replace(window, micro_batches=changed, num_valid_tokens=num_valid, packed=None)


def shift_twice(micro: MicroBatch) -> Tensor:
    return torch.cat([micro.labels[:, 1:], torch.full_like(micro.labels[:, :1], IGNORE_INDEX)], 1)


def cross_ends(micro: MicroBatch) -> Tensor:
    """The first token of the next document is learned from the last one of a document."""
    after = torch.cat([micro.input_ids[:, 1:], micro.labels[:, -1:]], 1)
    return torch.where(micro.labels == IGNORE_INDEX, after, micro.labels)


def join_documents(window: AccumulationWindow) -> AccumulationWindow:
    joined = tuple(
        replace(micro, document_ids=torch.zeros_like(micro.document_ids), document_offsets=None)
        for micro in window.micro_batches
    )
    return replace(window, micro_batches=joined, packed=None)


MODEL_FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "none": (lambda scene: nullcontext(), set()),
    "leaking mask": (leak_documents, {"documents"}),
    "large weights": (have_large_weights, {"initial loss"}),
    "loss shifted again": (shift_loss, {"loss", "initial loss"}),
    "normalised by micro-batch": (normalise_each, {"accumulation"}),
}
BATCH_FAULTS: dict[str, tuple[Callable[[AccumulationWindow], AccumulationWindow], set[str]]] = {
    "shift of 0": (
        lambda window: with_labels(window, lambda micro: micro.input_ids.clone()),
        {"labels", "initial loss"},
    ),
    "shift of 2": (lambda window: with_labels(window, shift_twice), {"labels"}),
    "labels across the ends": (lambda window: with_labels(window, cross_ends), {"labels"}),
    "no labels": (
        lambda window: with_labels(window, lambda micro: torch.full_like(micro.labels, IGNORE_INDEX)),
        {"labels", "sample"},
    ),
    "joined documents": (join_documents, {"documents"}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> dict[str, dict[str, Check]]:
    """Returns what each check found for each fault."""
    directory = tmp_path_factory.mktemp("faults")
    options = {**SINGLE, "run_dir": str(directory / "run"), "trainer.max_steps": 3, "checkpoint.save_at_end": False}
    recipe = write_recipe(directory, tiny_corpus)
    built = builder(recipe)({**options, "checkpoint.every_n_steps": None})
    found: dict[str, dict[str, Check]] = {}

    def check(scene: Scene) -> dict[str, Check]:
        checks = [show_sample(scene)[0], *(run(scene) for run in CHECKS.values())]
        return {each.name: each for each in checks}

    def at_start(trainer: Any, module: Any, window: AccumulationWindow) -> None:
        tokenizer = _find_tokenizer(built.data)
        scene = Scene(trainer, built.module, built.data, window, tokenizer, True)
        for name, (fault, _) in MODEL_FAULTS.items():
            with fault(scene):
                found[name] = check(scene)
        with see_later_tokens(scene):
            found["later tokens"] = check(scene)
        for name, (change, _) in BATCH_FAULTS.items():
            found[name] = check(replace(scene, window=change(window)))
        console = Console(record=True, width=100)
        console.print(show_sample(scene)[1])
        found["sample"] = {"text": Check("text", "passed", console.export_text())}

    built.fit(Watch(at_start))
    return found


EXPECTED = {name: due for name, (_, due) in {**MODEL_FAULTS, **BATCH_FAULTS}.items()}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.xdist_group("doctor-faults")
def test_each_fault_fails_its_checks_and_no_other(name: str, outcomes: dict[str, dict[str, Check]]) -> None:
    found = outcomes[name]
    assert {check.name for check in found.values() if check.status == "failed"} == EXPECTED[name], found
    assert all(check.remedy for check in found.values() if check.status == "failed")


@pytest.mark.xdist_group("doctor-faults")
def test_a_model_that_sees_later_tokens_is_caught(outcomes: dict[str, dict[str, Check]]) -> None:
    assert outcomes["later tokens"]["later tokens"].status == "failed"


@pytest.mark.xdist_group("doctor-faults")
def test_a_wrong_shift_is_named(outcomes: dict[str, dict[str, Check]]) -> None:
    assert "equal the input 0 tokens later" in outcomes["shift of 0"]["labels"].found
    assert "equal the input 2 tokens later" in outcomes["shift of 2"]["labels"].found


@pytest.mark.xdist_group("doctor-faults")
def test_the_check_of_accumulation_says_what_it_would_have_seen(outcomes: dict[str, dict[str, Check]]) -> None:
    found = outcomes["none"]["accumulation"].found
    assert float(found.rpartition("differ by ")[2]) > 0.05


@pytest.mark.xdist_group("doctor-faults")
def test_the_sample_shows_tokens_labels_and_documents(outcomes: dict[str, dict[str, Check]]) -> None:
    text = outcomes["sample"]["text"].found
    assert "- (not learned)" in text
    assert "document" in text
    assert "'" in text


def test_the_sample_shows_the_edges_of_documents() -> None:
    documents = [0] * 20 + [1] * 20
    assert choose_places([True] * 40, documents) == [0, 1, 2, 3, 18, 19, 20, 21]
