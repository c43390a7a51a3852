"""One request for scores: gives its texts to a worker with a reward model, and builds the response, as vLLM has it."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from genesis.base.errors import UserError
from genesis.generate.batch import Request
from genesis.serve.errors import ApiError
from genesis.serve.prompt import EncodedPrompt, Facts
from genesis.serve.request import CompletionRequest
from genesis.serve.worker import Result, TextScore, Ticket, Worker


def check_can_answer(asked: CompletionRequest, facts: Facts) -> None:
    """Refuses to write text by a reward model, and to score texts by any other model.

    Raises:
        ApiError: The model does the other of both.
    """
    if facts.has_scores and not asked.is_score:
        raise ApiError(
            "this model is a reward model, which writes no text: ask it for scores by POST /v1/score, or name another "
            "model",
            param="model",
            code="reward_model",
        )
    if asked.is_score and not facts.has_scores:
        raise ApiError(
            "this model is no reward model and gives no scores: name a reward model (GET /v1/models lists all models), "
            "or send the conversation to /v1/chat/completions, which writes the next turn",
            param="model",
            code="no_reward_model",
        )


class Scoring:
    """The texts of one request, as a context manager: leaving it cancels those that are not scored yet.

    Args:
        model: The id of the model that answers.
        worker: The worker that holds the model.
        texts: The texts.
        client: The client's name in the line of turns.
    """

    def __init__(self, model: str, worker: Worker, texts: Sequence[EncodedPrompt], client: str) -> None:
        self._model, self._worker, self._texts, self._client = model, worker, texts, client
        self._tickets: list[Ticket] = []
        self._results: asyncio.Queue[tuple[int, Result]] = asyncio.Queue()

    def __enter__(self) -> Self:
        for index, text in enumerate(self._texts):
            request = Request(prompt=text.ids, max_new_tokens=0)
            receive = partial(self._receive, index)
            self._tickets.append(self._worker.submit(request, receive, self._client, num_prompt_logprobs=0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    def _receive(self, index: int, result: Result) -> None:
        self._results.put_nowait((index, result))

    async def collect(self) -> dict[str, Any]:
        """Returns the response once all texts have a score."""
        scores: dict[int, float] = {}
        while len(scores) < len(self._texts):
            index, result = await self._results.get()
            if isinstance(result, UserError):
                raise result
            assert isinstance(result, TextScore), "a reward model gives nothing else"
            scores[index] = result.value
        num_tokens = sum(len(text.ids) for text in self._texts)
        return {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": [{"index": index, "object": "score", "score": scores[index]} for index in sorted(scores)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
