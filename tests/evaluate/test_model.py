"""Ours beside lm-eval's own `hf` backend on the export: the same answers, item for item."""

from pathlib import Path
from typing import Any

import lm_eval.evaluator
import pytest
from lm_eval.models.huggingface import HFLM

from genesis.base.errors import UserError
from genesis.evaluate.complete import spell
from genesis.evaluate.model import GenesisLM
from genesis.evaluate.tasks import load_tasks
from genesis.generate.load import load_decoder
from genesis.tokenizer.open import open_tokenizer
from tests.evaluate.support import write_choices, write_generation, write_rolling, write_task

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def ours(checkpoint: Path) -> GenesisLM:
    loaded = load_decoder(checkpoint)
    return GenesisLM(loaded.decoder, loaded.tokenizer)


@pytest.fixture(scope="module")
def theirs(exported: Path) -> HFLM:
    return HFLM(str(exported), device="cpu", dtype="float32", batch_size=1)


def ask(model: Any, spec: str, num_fewshot: int | None = None) -> dict[str, Any]:
    loaded = load_tasks(spec, num_fewshot)
    for task in loaded.tasks["tasks"].values():
        task.set_fewshot_seed(seed=1234)
    found: dict[str, Any] = lm_eval.evaluator.evaluate(model, loaded.tasks, bootstrap_iters=0)
    return found


def compare(ours: GenesisLM, theirs: HFLM, spec: str, num_fewshot: int | None = None) -> list[dict[str, Any]]:
    """Compares all items, and returns ours."""
    here, there = (ask(model, spec, num_fewshot) for model in (ours, theirs))
    (items,), (other_items,) = here["samples"].values(), there["samples"].values()
    assert len(items) == len(other_items) > 0
    for item, other in zip(items, other_items, strict=True):
        assert item["arguments"] == other["arguments"]
        for (answer,), (other_answer,) in zip(item["resps"], other["resps"], strict=True):
            if isinstance(answer, str):
                assert answer == other_answer
            elif isinstance(answer, float):
                assert answer == pytest.approx(other_answer, abs=TOLERANCE)
            else:
                assert answer == (pytest.approx(other_answer[0], abs=TOLERANCE), other_answer[1])
        for metric in item["metrics"]:
            assert item[metric] == pytest.approx(other[metric], abs=TOLERANCE)
    return items


@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_choices_have_the_likelihoods_and_accuracies_of_hf(
    ours: GenesisLM, theirs: HFLM, tmp_path: Path, num_fewshot: int
) -> None:
    items = compare(ours, theirs, write_choices(tmp_path / "choices"), num_fewshot)
    contexts = [context for item in items for context, _ in item["arguments"]]
    assert ("" in contexts) == (num_fewshot == 0)
    assert max(len(ours.tok_encode(context)) for context in contexts) > ours.max_length


def test_examples_before_every_question_alike_are_scored_as_by_hf(
    ours: GenesisLM, theirs: HFLM, tmp_path: Path
) -> None:
    spec = write_choices(tmp_path / "first", fewshot_config={"sampler": "first_n", "split": "train"})
    compare(ours, theirs, spec, num_fewshot=1)


def test_a_most_likely_continuation_is_greedy_as_for_hf(ours: GenesisLM, theirs: HFLM, tmp_path: Path) -> None:
    told = write_generation(tmp_path / "told", until=[], max_gen_toks=3)
    answers = ask(ours, told)["samples"]["told"]
    rows = [{"begin": item["arguments"][0][0], "end": item["resps"][0][0]} for item in answers]
    settings = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{begin}}",
        "doc_to_target": "{{end}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    items = compare(ours, theirs, write_task(tmp_path / "greedy", settings, test=[row for row in rows if row["end"]]))
    assert any(is_greedy for item in items for ((_, is_greedy),) in item["resps"])


def test_rolling_likelihoods_are_those_of_hf(ours: GenesisLM, theirs: HFLM, tmp_path: Path) -> None:
    compare(ours, theirs, write_rolling(tmp_path / "rolling"))


@pytest.mark.parametrize("until", [["\n\n", "ret"], ["</s>"], []])
def test_greedy_text_is_that_of_hf(ours: GenesisLM, theirs: HFLM, tmp_path: Path, until: list[str]) -> None:
    items = compare(ours, theirs, write_generation(tmp_path / "text", until=until))
    assert any(answer for item in items for (answer,) in item["resps"])


def test_sampled_text_repeats_and_stops(ours: GenesisLM, tmp_path: Path) -> None:
    spec = write_generation(tmp_path / "drawn", until=["a"], do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    answers = [[item["resps"] for item in ask(ours, spec)["samples"]["drawn"]] for _ in range(2)]
    assert answers[0] == answers[1]
    assert not any("a" in text for ((text,),) in answers[0])


def test_an_unknown_way_to_sample_is_refused_by_name(ours: GenesisLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task beams asks for num_beams in its generation_kwargs"):
        ask(ours, write_generation(tmp_path / "beams", num_beams=4))


def test_more_new_tokens_than_the_context_are_refused(ours: GenesisLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task long asks for 256 new tokens, but the model's context has 256"):
        ask(ours, write_generation(tmp_path / "long", max_gen_toks=256))


def test_tokens_that_only_the_model_has_are_no_text(tokenizer_file: Path) -> None:
    tokenizer = open_tokenizer(tokenizer_file)
    ids = [tokenizer.vocab_size, *tokenizer.encode("beta"), tokenizer.vocab_size + 9]
    assert spell(tokenizer, ids, has_controls=True) == "beta"
