"""A model without a tokenizer answers ids with ids, and refuses text by name."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from genesis.generate.batch import NewToken, Request
from genesis.generate.load import load_decoder
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.serve.pool import Limits
from genesis.serve.worker import Result, Worker
from tests.serve.support import DEADLINE_SECONDS, elsewhere, start_here
from tests.tiny_runs import build_decoder, save

GREEDY = {"model": "latest", "temperature": 0.0, "max_tokens": 7}


@pytest.fixture(scope="module")
def run_of_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ids") / "run"
    save(directory / "checkpoints", 1, build_decoder(5), {})
    return directory


def ask_all(run: Path, *bodies: dict[str, Any]) -> list[tuple[int, Any, Any]]:
    async def ask() -> list[tuple[int, Any, Any]]:
        async with start_here([run], Limits()) as running:
            return [await elsewhere(running.ask, "/v1/completions", body) for body in bodies]

    return asyncio.run(ask())


def test_token_ids_are_answered_by_token_ids(run_of_ids: Path) -> None:
    options = GenerateOptions(7, SamplingOptions(temperature=0.0))
    wanted = [token.id for token in generate(load_decoder(run_of_ids).decoder, [(5, 17, 300)], options, frozenset())]
    asked = {**GREEDY, "prompt": [5, 17, 300]}
    (status, answer, _), (_, echoed, _) = ask_all(run_of_ids, {**asked, "logprobs": 2}, {**asked, "echo": True})
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["text"] == "".join(f" {token}" for token in wanted)
    assert (choice["finish_reason"], choice["logprobs"]["tokens"]) == ("length", [f" {token}" for token in wanted])
    counts = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    assert echoed["choices"][0]["text"] == "5 17 300" + choice["text"]


def test_text_and_what_needs_text_is_refused_by_name(run_of_ids: Path) -> None:
    answers = ask_all(
        run_of_ids,
        {**GREEDY, "prompt": "alpha"},
        {**GREEDY, "prompt": [5], "stop": "a"},
        {**GREEDY, "prompt": [700]},
    )
    assert [status for status, _, _ in answers] == [400] * 3
    messages = [answer["error"]["message"] for _, answer, _ in answers]
    assert "this model has no tokenizer: send a list of token ids" in messages[0]
    assert "stop is not supported by this model" in messages[1]
    assert "token ids must be from 0 to 699" in messages[2]


def test_a_long_text_that_is_refused_keeps_no_other_waiting(run_of_ids: Path) -> None:
    async def ask() -> list[Result]:
        loop = asyncio.get_running_loop()
        worker = Worker(lambda: load_decoder(run_of_ids), 2)
        ends = [loop.create_future(), loop.create_future()]
        try:
            for end, num_tokens in zip(ends, (5000, 5), strict=True):  # both wait for the model
                worker.submit(Request([5] * num_tokens, 1), end.set_result, "client")
            return await asyncio.wait_for(asyncio.gather(*ends), DEADLINE_SECONDS)
        finally:
            worker.stop()
            worker.join()

    refused, token = asyncio.run(ask())
    assert "prompt 1 has 5,000 tokens" in str(refused)
    assert isinstance(token, NewToken)
    assert token.is_last
