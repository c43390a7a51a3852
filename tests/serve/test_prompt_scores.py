"""The probabilities of a prompt: `echo` with `logprobs`, for lm-eval's own client among others."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import pytest
import torch
from lm_eval.models.openai_completions import LocalCompletionsAPI

from genesis.evaluate.model import GenesisLM
from genesis.evaluate.tasks import load_tasks
from genesis.generate.load import Loaded, load_decoder
from genesis.generate.prompt_scores import score_prompt
from genesis.serve.pool import Limits
from tests.evaluate.support import write_choices
from tests.serve.support import Running, elsewhere, start_here
from tests.serve.test_ids import ask_all
from tests.tiny_runs import build_decoder, save

ASKED = {"model": "latest", "temperature": 0.0, "echo": True, "logprobs": 2}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def loaded(run: Path) -> Loaded:
    return load_decoder(run)


def _log_probs(loaded: Loaded, ids: list[int]) -> torch.Tensor:
    """Of each token after the tokens before it, by one plain forward."""
    with torch.no_grad():
        return loaded.decoder(torch.tensor([ids]))[0, :-1].log_softmax(dim=1)


def test_each_token_has_the_log_probability_of_a_plain_forward(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.decoder.config.vocab_size, (150,), generator=generator).tolist()
    monkeypatch.setattr("genesis.generate.prompt_scores._CHUNK_TOKENS", 64)  # the last chunk is shorter
    first, *rest = score_prompt(loaded.decoder, ids, 3)
    assert (first.id, first.log_prob, first.top_logprobs) == (ids[0], None, ())
    expected = _log_probs(loaded, ids)
    for place, token in enumerate(rest):
        assert token.id == ids[place + 1]
        assert token.log_prob == pytest.approx(float(expected[place, token.id]), abs=TOLERANCE)
        values, places = expected[place].topk(3)
        assert [other for other, _ in token.top_logprobs] == places.tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(values.tolist(), abs=TOLERANCE)
    assert [token.id for token in score_prompt(loaded.decoder, [5], 1)] == [5]


def test_an_echo_comes_with_the_probabilities_of_prompt_and_text(run: Path, loaded: Loaded) -> None:
    tokenizer = loaded.text_tokenizer
    whole, alone, plain = ask_all(
        run,
        {**ASKED, "prompt": "class alpha", "max_tokens": 4},
        {**ASKED, "prompt": "class alpha", "max_tokens": 0},
        {"model": "latest", "temperature": 0.0, "prompt": "class alpha", "max_tokens": 4, "logprobs": 2},
    )
    assert [status for status, _, _ in (whole, alone, plain)] == [200] * 3
    (choice,), (prompt,), (text,) = (answer["choices"] for _, answer, _ in (whole, alone, plain))
    assert choice["text"] == "class alpha" + text["text"]
    assert (prompt["text"], prompt["finish_reason"]) == ("class alpha", "length")
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert choice["logprobs"][key] == prompt["logprobs"][key] + text["logprobs"][key]
    ids = [tokenizer.bos_id, *tokenizer.encode("class alpha")]
    assert prompt["logprobs"]["token_logprobs"][0] is None
    expected = _log_probs(loaded, ids)
    for place, value in enumerate(prompt["logprobs"]["token_logprobs"][1:]):
        assert value == pytest.approx(float(expected[place, ids[place + 1]]), abs=TOLERANCE)
    offsets = prompt["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len("class alpha") for offset in offsets)
    assert choice["logprobs"]["text_offset"][len(offsets)] == len("class alpha")
    counts = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    assert alone[1]["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def test_prompts_of_ids_and_a_full_context_are_scored(tmp_path: Path) -> None:
    decoder = build_decoder(5)
    save(tmp_path / "run" / "checkpoints", 1, decoder, {})
    length = decoder.config.max_seq_len
    full, longer, two = ask_all(
        tmp_path / "run",
        {**ASKED, "prompt": [7] * length, "max_tokens": 0},
        {**ASKED, "prompt": [7] * (length + 1), "max_tokens": 0},
        {**ASKED, "prompt": [[5, 6], [7, 8, 9]], "max_tokens": 0, "logprobs": 0, "n": 2},
    )
    assert full[0] == 200
    assert len(full[1]["choices"][0]["logprobs"]["tokens"]) == length
    assert longer[0] == 400
    assert "longer than the model's context" in longer[1]["error"]["message"]
    choices = two[1]["choices"]
    assert [choice["text"] for choice in choices] == ["5 6", "5 6", "7 8 9", "7 8 9"]
    assert choices[2]["logprobs"]["text_offset"] == [0, 1, 3]


def _run_here(run: Path, call: Callable[[Running], Any]) -> Any:
    async def ask() -> Any:
        async with start_here([run], Limits()) as running:
            return await elsewhere(call, running)

    return asyncio.run(ask())


@pytest.mark.slow
def test_lm_evals_own_client_gets_the_scores_of_genesis_evaluate(run: Path, exported: Path, tmp_path: Path) -> None:
    loaded = load_decoder(run)
    # The client puts two bos before a text without a context, and cuts long contexts by one token more.
    spec = write_choices(tmp_path / "choices", num_rows=3)

    def evaluate(lm: Any) -> list[Any]:
        tasks = load_tasks(spec, 1)
        for task in tasks.tasks["tasks"].values():
            task.set_fewshot_seed(seed=1234)
        found: Any = lm_eval.evaluator.evaluate(lm, tasks.tasks, bootstrap_iters=0)
        (items,) = found["samples"].values()
        return [answer for item in items for (answer,) in item["resps"]]

    def ask(running: Running) -> list[Any]:
        client = LocalCompletionsAPI(
            base_url=f"{running.url}/v1/completions",
            model="latest",
            tokenizer=str(exported),
            tokenizer_backend="huggingface",
            max_length=loaded.decoder.config.max_seq_len,
            add_bos_token=True,
        )
        return evaluate(client)

    theirs = _run_here(run, ask)
    ours = evaluate(GenesisLM(loaded.decoder, loaded.text_tokenizer))
    assert len(ours) == len(theirs) > 0
    for (value, is_greedy), (other, is_also_greedy) in zip(ours, theirs, strict=True):
        assert is_greedy == is_also_greedy
        assert value == pytest.approx(other, abs=1e-3)
