"""`/v1/score`: the scores of a reward model, with the limits of the other routes, and what is refused."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.generate.load import Loaded, load_decoder
from genesis.model.scores import score_text
from genesis.serve.catalogue import Catalogue
from genesis.serve.errors import ApiError
from genesis.serve.guard import Guard
from genesis.serve.pool import Limits
from genesis.serve.request import parse_score
from genesis.serve.server import Server, answering, bind
from tests.serve.support import Running, start
from tests.tiny_runs import build_decoder, save
from tests.tokenizer.test_huggingface import qwen

QUESTION, ANSWERS = "All human beings?", ["Yes, all.", "No."]


def save_model(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    qwen(directory)
    save(directory / "checkpoints", 1, build_decoder(5, **changes), {}, **changes)
    return directory


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("score") / "scorer", num_scores=1)


@pytest.fixture(scope="module")
def loaded(scorer: Path) -> Loaded:
    return load_decoder(scorer, allows_scores=True)


def ask(
    run: Path,
    *bodies: Any,
    path: str = "/v1/score",
    limits: Limits | None = None,
    load: Callable[..., Loaded] | None = None,
) -> list[Any]:
    async def run_server() -> list[Any]:
        found = load or (lambda entry: load_decoder(entry.path, allows_scores=True))
        server = Server(Catalogue([run]), found, Guard(None), limits or Limits())
        with bind("127.0.0.1", 0) as sock:
            async with answering(server, sock):
                running = Running(sock.getsockname()[1])
                return [await asyncio.to_thread(running.ask, path, body) for body in bodies]

    return asyncio.run(run_server())


def score_here(loaded: Loaded, *messages: dict[str, Any]) -> tuple[float, int]:
    """The score of a conversation as a corpus renders it, and its number of tokens."""
    renderer = open_renderer(loaded.text_tokenizer, ChatOptions())
    ids = renderer.render(messages).ids.tolist()
    return score_text(loaded.decoder, ids), len(ids)


def talk(question: str, answer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def test_answers_get_the_scores_that_training_gives_to_their_conversations(scorer: Path, loaded: Loaded) -> None:
    wanted = [score_here(loaded, *talk(QUESTION, answer)) for answer in ANSWERS]
    longer = (*talk(QUESTION, ANSWERS[0]), *talk("Are you sure?", "<|im_end|> I am."))
    whole = score_here(loaded, *longer)
    answers = ask(
        scorer,
        {"model": "latest", "text_1": QUESTION, "text_2": ANSWERS},
        {"model": "latest", "text_1": [QUESTION, QUESTION], "text_2": ANSWERS[::-1], "user": "me"},
        {"model": "latest", "messages": list(longer)},
    )
    assert [status for status, *_ in answers] == [200, 200, 200]
    (_, first, _), (_, second, _), (_, third, _) = answers
    assert first["object"] == "list"
    assert first["model"] == "step-00000001"
    assert [(one["index"], one["object"]) for one in first["data"]] == [(0, "score"), (1, "score")]
    assert [one["score"] for one in first["data"]] == pytest.approx([score for score, _ in wanted], abs=1e-6)
    assert [one["score"] for one in second["data"]] == [one["score"] for one in first["data"]][::-1]
    assert third["data"][0]["score"] == pytest.approx(whole[0], abs=1e-6)
    total = sum(number for _, number in wanted)
    assert first["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert len({score for score, _ in wanted}) == 2


GOOD = {"model": "latest", "text_1": QUESTION, "text_2": "Yes."}


@pytest.mark.parametrize(
    ("changes", "param", "line"),
    [
        ({"text_2": None}, "text_1", "must be given alone, or text_1 and text_2 instead"),
        ({"text_1": None, "text_2": None}, "messages", "must be given alone"),
        ({"messages": list(talk("a", "b"))}, "messages", "must be given alone"),
        ({"text_2": []}, "text_2", "must be a text, or a list of texts"),
        ({"text_2": ["a", 3]}, "text_2", "must be a text, or a list of texts"),
        ({"text_1": ["a", "b", "c"], "text_2": ["a", "b"]}, "text_1", "has 3 texts, and text_2 has 2"),
        ({"text_2": "\ud800"}, "text_2", "lone surrogate"),
        ({"text_2": ["a"] * 257}, "text_2", "has 257 texts: send at most 256 in a request"),
        ({"text_1": [3] * 257}, "text_1", "has 257 texts: send at most 256 in a request"),  # before a text is looked at
        ({"text_2": "long " * 300}, "text_2", "text_2 has"),
        ({"text_2": ["a", "long " * 300]}, "text_2", "text_2[1] with its question has"),
        ({"text_2": ["a", "long " * 300]}, "text_2", "more than the model's context of 256 tokens: shorten it"),
        (
            {"text_1": None, "text_2": None, "messages": list(talk("a", "long " * 300))},
            "messages",
            "more than the model's context of 256 tokens",
        ),
        ({"text_1": None, "text_2": None, "messages": [{"role": "user", "content": "a"}]}, "messages", "add it"),
        ({"max_tokens": 3}, "max_tokens", "unknown field"),
        ({"model": "other"}, "model", "no such model"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(scorer: Path, changes: dict[str, Any], param: str, line: str) -> None:
    ((status, answer, _),) = ask(scorer, GOOD | changes)
    assert status in (400, 404)
    assert answer["error"]["param"] == param
    assert line in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_a_reward_model_writes_nothing_and_another_model_scores_nothing(scorer: Path, tmp_path: Path) -> None:
    chat = {"model": "latest", "messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"model": "latest", "prompt": "a"})):
        ((status, answer, _),) = ask(scorer, body, path=path)
        assert (status, answer["error"]["code"]) == (400, "reward_model")
        assert "ask it for scores by POST /v1/score" in answer["error"]["message"]
    writer = save_model(tmp_path / "writer")
    ((status, answer, _),) = ask(writer, GOOD)
    assert (status, answer["error"]["code"]) == (400, "no_reward_model")


def test_a_diverged_reward_model_is_an_error(scorer: Path) -> None:
    def break_after_load(entry: Any) -> Loaded:
        loaded = load_decoder(entry.path, allows_scores=True)
        with torch.no_grad():
            loaded.decoder.output.weight.fill_(3e38)
            loaded.decoder.norm.weight.fill_(3e38)
        return loaded

    ((status, answer, _),) = ask(scorer, GOOD, load=break_after_load)
    assert (status, answer["error"]["code"]) == (500, "model_diverged")


def test_one_question_to_many_answers_counts_for_each() -> None:
    body = json.dumps({**GOOD, "text_1": "a" * 50_000, "text_2": ["a"] * 100})
    with pytest.raises(ApiError, match="5,000,100 characters: send at most 4,194,304 in a request"):
        parse_score(body.encode())


def test_the_number_of_texts_does_not_follow_how_many_a_model_continues(scorer: Path) -> None:
    crowd = {**GOOD, "text_2": [*ANSWERS] * 32}
    ((status, answer, _),) = ask(scorer, crowd, limits=Limits(max_concurrent=1, max_queue=0))
    assert status == 200
    scores = [one["score"] for one in answer["data"]]
    assert len(scores) == 64
    assert scores == scores[:2] * 32


@pytest.mark.slow
def test_the_command_serves_a_reward_model_beside_one_that_writes(scorer: Path, tmp_path: Path) -> None:
    writer = save_model(tmp_path / "writer")
    with start(scorer, writer) as running:
        status, answer, _ = running.ask("/v1/score", {**GOOD, "model": "scorer/latest"})
        assert (status, len(answer["data"])) == (200, 1)
        status, answer, _ = running.ask("/v1/completions", {"model": "writer/latest", "prompt": "a", "max_tokens": 2})
        assert status == 200
        found = running.ask("/api/models")[1]["models"]
        assert {one["run"]: (one["has_chat"], one["has_scores"]) for one in found} == {
            "scorer": (False, True),
            "writer": (True, False),
        }
