"""A teacher behind an OpenAI-compatible server: the log-probabilities of answers' tokens, by `echo` of completions.

A request has the ids of a prompt with its answer, generates nothing, and gets the log-probability of each of its tokens
after those before it. The server's own distribution counts, at temperature 1.

The server is the user's own, and still is not trusted: no proxy of the environment gets the ids, redirects are not
followed, a request has a limit of time and its response one of bytes, and a log-probability must be one.
"""

import asyncio
import http
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import torch
from torch import Tensor

from genesis.base.errors import RunEndedError, UserError, printable
from genesis.base.model_server import explain_refusal, find_root, is_log_prob, read_key, receive, show
from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.objectives.policy_gradient import TEMPERATURE
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.base.json_text import load_json

KEY_VARIABLE: Final = "GENESIS_TEACHER_KEY"
"""The environment variable with the server's key, which no recipe can name."""
_PROBED_IDS: Final = 256
_WAITS_SECONDS: Final = (1.0, 4.0, 16.0)
"""Before each further try, where the server is not there or has too much to do."""
_REMEDY: Final = "start the server again, then the run with --ckpt_path latest"


class TeacherServer:
    """Asks a server for the log-probabilities of tokens. Several requests are under way at a time.

    Args:
        url: Its address, which ends before `/completions`.
        model: The teacher's name there.
        seconds: How long a request may take.
        num_requests: Requests at a time.

    Attributes:
        note: Called after each response.

    Raises:
        UserError: A value is out of its range.
    """

    def __init__(self, url: str, model: str, seconds: float, num_requests: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(
                f"model.objective.url is {url}; give the address of a server, such as http://127.0.0.1:8000/v1"
            )
        if not 0.0 < seconds < float("inf"):
            raise UserError(f"model.objective.request_seconds is {seconds}; it must be a number above 0")
        if num_requests < 1:
            raise UserError(f"model.objective.num_requests is {num_requests}; it must be at least 1")
        self.model = model
        self.note: Callable[[], None] = lambda: None
        self._url, self._seconds, self._num_requests = f"{find_root(url)}/v1/completions", seconds, num_requests

    def check(self, tokenizer: Path, seq_len: int) -> None:
        """Refuses a server that gives no log-probabilities, or has other tokens than the student's tokenizer.

        Args:
            tokenizer: Where the files of the student's tokenizer lie.
            seq_len: The longest prompt with its answer.

        Raises:
            UserError: The server has another vocabulary.
            RunEndedError: The server does not answer as it should.
        """
        own = open_tokenizer(tokenizer)
        number = min(_PROBED_IDS, seq_len, own.vocab_size)
        ids = sorted({index * (own.vocab_size - 1) // max(number - 1, 1) for index in range(number)})
        ((names, _),) = self._ask_all([ids])
        for token, name in zip(ids, names, strict=True):
            content = b"" if own.is_control(token) else own.decode_bytes([token]).strip()
            as_bytes = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)  # how servers spell a piece of one byte
            if content.isalnum() and content.isascii() and name.strip() not in (content.decode(), as_bytes):
                raise UserError(
                    f"the teacher {self.model} at {self._url} has {name!r} for the id {token}, and the student's "
                    f"tokenizer {content.decode()!r}: give a teacher with the student's tokenizer"
                )

    def score(self, micro_batches: Sequence[MicroBatch], sum_over_ranks: Any) -> list[Tensor]:
        """Returns the log-probabilities of the labels of each micro-batch, 0 where there is none. Communicates.

        Args:
            micro_batches: The micro-batches of a window on this rank.
            sum_over_ranks: Returns the sums of numbers over all ranks.

        Raises:
            RunEndedError: The server does not answer as it should, to this rank or to another one.
        """
        failure: RunEndedError | UserError | None = None
        found: list[Tensor] = []
        try:
            found = self._score(micro_batches)
        except (RunEndedError, UserError) as error:
            failure = error
        # A rank that goes on alone would wait for the others in its next backward.
        (num_failed,) = sum_over_ranks((float(failure is not None),))
        if failure is not None:
            raise failure
        if num_failed:
            raise RunEndedError("another rank got no log-probabilities of the teacher; its error has the reason")
        return found

    def _score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        rows: list[tuple[list[int], Any]] = []
        for one in micro_batches:
            if float(one.extra[TEMPERATURE]) != 1.0:
                raise UserError(
                    f"data.prompts.temperature is {float(one.extra[TEMPERATURE]):g}, and a server gives the teacher's "
                    "probabilities at temperature 1; set it to 1, or give model.objective.teacher"
                )
            for ids, labels in zip(one.input_ids.cpu().numpy(), one.labels.cpu().numpy(), strict=True):
                places = np.flatnonzero(labels != IGNORE_INDEX)
                end = int(places[-1]) + 1
                rows.append(([*ids[:end].tolist(), int(labels[end - 1])], places))
        scored = iter([log_probs for _, log_probs in self._ask_all([ids for ids, _ in rows])])
        found, left = [], iter(rows)
        for one in micro_batches:
            of_tokens = torch.zeros(one.labels.shape)
            for own in of_tokens:
                _, places = next(left)
                own[places] = torch.tensor(next(scored)[1:], dtype=torch.float32)[places]
            found.append(of_tokens.to(one.labels.device))
        return found

    def _ask_all(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[str], list[float]]]:
        """Returns the text and the log-probability of each token of prompts; that of the first token is 0."""
        return asyncio.run(self._gather(prompts))

    async def _gather(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[str], list[float]]]:
        places = asyncio.Semaphore(self._num_requests)

        async def ask(ids: Sequence[int]) -> tuple[list[str], list[float]]:
            async with places:
                found = await self._ask(session, ids)
            self.note()
            return found

        limit = aiohttp.ClientTimeout(total=self._seconds)
        async with aiohttp.ClientSession(headers=read_key(KEY_VARIABLE), timeout=limit) as session:
            tasks = [asyncio.ensure_future(ask(ids)) for ids in prompts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, session: aiohttp.ClientSession, ids: Sequence[int]) -> tuple[list[str], list[float]]:
        asked = {"model": self.model, "prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 0}
        body = await self._post(session, asked, len(ids))
        try:
            (choice,) = load_json(body)["choices"]
            names, log_probs = (choice["logprobs"][name][: len(ids)] for name in ("tokens", "token_logprobs"))
            numbers = [0.0, *log_probs[1:]]
            is_good = len(names) == len(numbers) == len(ids) and all(map(is_log_prob, numbers))
        except (ValueError, TypeError, KeyError, RecursionError):
            is_good = False
        if not is_good:
            raise RunEndedError(
                f"the teacher at {self._url} gave no log-probability for each token of a prompt ({show(body)!r}): it "
                f"must support echo and logprobs of completions; {_REMEDY}"
            )
        return [str(name) for name in names], numbers

    async def _post(self, session: aiohttp.ClientSession, content: dict[str, Any], num_tokens: int) -> bytes:
        name = f"the teacher at {self._url}"
        for wait_seconds in (*_WAITS_SECONDS, None):
            try:
                async with session.post(self._url, json=content, allow_redirects=False) as response:
                    body, status = await receive(response, num_tokens, name, _REMEDY), response.status
            except TimeoutError:
                reason = f"took longer than model.objective.request_seconds {self._seconds:g}"
                break
            except (aiohttp.ClientError, OSError) as error:
                reason = f"cannot be asked ({printable(str(error))})"
            else:
                if status == http.HTTPStatus.OK:
                    return body
                reason = f"answered with status {status} ({show(body)!r})"
                if status != http.HTTPStatus.TOO_MANY_REQUESTS and status < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                    known = explain_refusal(status, dict(session.headers), KEY_VARIABLE)
                    raise UserError(
                        f"the teacher {self.model} at {self._url} {reason}{known}: correct model.objective, or "
                        "the server"
                    )
            if wait_seconds is not None:
                await asyncio.sleep(wait_seconds)
        raise RunEndedError(f"{name} {reason}; {_REMEDY}")
