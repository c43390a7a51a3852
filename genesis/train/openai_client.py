"""A client of servers that write answers, by OpenAI's `/v1/completions` with prompts and answers as ids of tokens.

    server         ids of an answer                        new weights
    genesis serve  `token_ids`, by `return_token_ids`      /v1/load_weights {"path", "digest"}
    vLLM 0.10.2    the same                                /v1/load_lora_adapter {"lora_name", "lora_path"}
    llama.cpp      `logprobs.content[].id`                 none

Weights are models with names of their own, which requests and answers have: no answer of other weights is taken. A
server that does not know the name, because it has started again, loads the weights again.

All that a server sends is a stranger's: it is read up to a limit, and an answer has ids of the vocabulary, finite
log-probabilities, and an end where the run's model ends its answers. Nothing of it is text that anything reads.

References:
    vLLM's documentation, "OpenAI-Compatible Server" (`return_token_ids`) and "LoRA Adapters" (dynamic serving).
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.errors import RunEndedError, numbered
from genesis.base.model_server import explain_refusal, find_root, is_log_prob, receive, show
from genesis.data.rollout_options import KEY_VARIABLE, RolloutOptions
from genesis.generate.batch import Request
from genesis.train.answer_journal import Completion
from genesis.train.served_weights import Weights
from genesis_callbacks.base.json_text import load_json

_FIRST_PAUSE_SECONDS: Final = 0.2
_MAX_PAUSE_SECONDS: Final = 5.0
_MAX_WAIT_SECONDS: Final = 60.0
"""The longest pause that a server may ask for."""
_FULL: Final = (425, 429)
_TIMED_OUT: Final = 408
_MAX_LOADS: Final = 3
"""How often a request may find that the server does not know the weights, which are then loaded again."""
_SMALL_SEEDS: Final = 1 << 31
"""Seeds that llama.cpp and most servers take."""
_RESUMES: Final = "a resume goes on from the last checkpoint, and asks for no answer again that it has"


class _RefusedError(RunEndedError):
    """The server refuses a request, which it would do again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OpenAIClient:
    """Asks a server. Its coroutines run in one event loop.

    Args:
        options: The server, and how it gets weights.
        headers: Those with the server's key; none without one.
        directory: The directory of the weights, as the server sees it.
        vocab_size: The number of ids that an answer may have.
        stop_ids: The ids that end an answer.
    """

    def __init__(
        self,
        options: RolloutOptions,
        headers: dict[str, str],
        directory: Path,
        vocab_size: int,
        stop_ids: frozenset[int],
    ) -> None:
        assert options.url is not None, "a server's options"
        self._options, self._directory = options, directory
        self._url, self._vocab_size, self._stop_ids = find_root(options.url), vocab_size, stop_ids
        self._headers = headers
        self._loaded: set[str] = set()
        self._is_warned = False
        self._turn = asyncio.Lock()
        self._places = asyncio.Semaphore(options.num_concurrent)
        # When a request had an answer for the last time, and when the server had any reason to be taken for well.
        self._answered_seconds = self._alive_seconds = -math.inf

    async def ask(self, weights: Weights, requests: Sequence[Request], take: Callable[[int, Completion], None]) -> None:
        """Gets the answers to requests, several at a time, of all calls together.

        Args:
            weights: The weights that answer.
            requests: The requests.
            take: Called with the index of a request and its answer, as answers come.

        Raises:
            RunEndedError: The server refuses, cannot be reached for too long, or gives what is no answer.
        """

        async def answer(index: int, request: Request) -> None:
            async with self._places:
                take(index, await self._answer(session, weights, request))

        limit = aiohttp.ClientTimeout(total=self._options.request_seconds)
        # No proxy of the environment: the server is the user's own. The number of connections is that of the places.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=self._headers, timeout=limit, connector=connector) as session:
            if requests and weights.name not in self._loaded:
                await self._load(session, weights)
            tasks = [asyncio.ensure_future(answer(index, request)) for index, request in enumerate(requests)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, session: aiohttp.ClientSession, weights: Weights, request: Request) -> Completion:
        assert request.max_new_tokens is not None, "a rollout limits its answers"
        body = {
            "model": weights.name,
            "prompt": list(request.prompt),
            "max_tokens": request.max_new_tokens,
            "temperature": request.sampling.temperature,
            "top_p": 1.0,  # or a server takes that of the model's generation_config.json
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            **self._extras(request.seed),
        }
        for _ in range(_MAX_LOADS):
            try:
                content = await self._post(session, "/v1/completions", body, request.max_new_tokens)
                break
            except _RefusedError as error:
                if error.status != 404 or weights.digest is None:
                    raise
                refused = error
            await self._load(session, weights, is_again=True)
        else:
            raise refused
        return self._read(content, weights, request.max_new_tokens)

    def _extras(self, seed: int) -> dict[str, Any]:
        """Returns the fields that servers have different names or values for."""
        if self._options.reload == "genesis":
            return {"seed": seed, "logprobs": 0, "return_token_ids": True}
        stops = sorted(self._stop_ids)
        # What a server does not know it ignores: its answer lacks the ids then, and is refused.
        extras = {"seed": seed, "logprobs": 1, "return_token_ids": True, "stop_token_ids": stops, "top_k": 0}
        if self._options.reload == "vllm":
            return extras
        return {**extras, "seed": seed % _SMALL_SEEDS, "repeat_penalty": 1.0, "cache_prompt": False}

    async def _load(self, session: aiohttp.ClientSession, weights: Weights, *, is_again: bool = False) -> None:
        """Lets the server load weights, once for all requests that wait for them."""
        async with self._turn:
            if weights.digest is None or (not is_again and weights.name in self._loaded):
                return
            if self._options.reload == "genesis":
                asked = {"path": weights.name, "digest": weights.digest}
                found = await self._post(session, "/v1/load_weights", asked)
                if not isinstance(found, dict) or (found.get("id"), found.get("digest")) != weights:
                    raise RunEndedError(f"{self._url} has not loaded the weights {weights.name}; {_RESUMES}")
            else:
                path = str((self._directory / weights.name).absolute())
                with suppress(_LoadedError):
                    await self._post(session, "/v1/load_lora_adapter", {"lora_name": weights.name, "lora_path": path})
            self._loaded.add(weights.name)

    async def forget(self, name: str) -> None:
        """Lets a server that keeps all adapters remove those that no request names any more."""
        self._loaded.discard(name)
        if self._options.reload != "vllm":
            return
        limit = aiohttp.ClientTimeout(total=self._options.request_seconds)
        async with aiohttp.ClientSession(headers=self._headers, timeout=limit) as session:
            with suppress(RunEndedError):  # one that it has forgotten already
                await self._post(session, "/v1/unload_lora_adapter", {"lora_name": name})

    async def _post(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], num_tokens: int = 0) -> Any:
        """Returns the JSON of the answer to a request, which is repeated while the server is gone or full.

        A server that is full is well: its places are waited for as long as for an answer. Both limits count from the
        last time that any request of this client had an answer.
        """
        begin, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            is_full, wanted_seconds = False, 0.0
            try:
                async with session.post(self._url + path, json=body, allow_redirects=False) as response:
                    content = await receive(response, num_tokens, f"the server {self._url}", _RESUMES)
                    status, is_final = response.status, response.headers.get("X-Should-Retry") == "false"
                    wanted_seconds = _read_seconds(response.headers.get("Retry-After", ""))
            except TimeoutError:
                problem = f"has not answered in {self._options.request_seconds:g} s"
            except (aiohttp.ClientError, OSError) as error:
                problem = f"cannot be reached ({type(error).__name__})"
            else:
                if status == 200:
                    self._is_warned = False
                    self._answered_seconds = self._alive_seconds = time.monotonic()
                    return self._parse(content, path)
                is_full = status in _FULL or (status == 503 and wanted_seconds > 0)
                problem = f"answers {path} with status {status}: {_find_message(content)}"
                if (status < 500 and not is_full and status != _TIMED_OUT) or is_final:
                    kind = _LoadedError if "already been loaded" in problem else _RefusedError
                    known = explain_refusal(status, self._headers, KEY_VARIABLE)
                    raise kind(f"the server {self._url} {problem}{known}; correct it: {_RESUMES}", status)
            self._check_patience(begin, problem, is_full=is_full)
            if not (is_full or self._is_warned):
                self._is_warned = True
                seconds = self._options.retry_seconds
                rank_zero_info(f"the server {self._url} {problem}; it is asked again for {seconds:g} s")
            await asyncio.sleep(max(pause, wanted_seconds))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _check_patience(self, begin: float, problem: str, *, is_full: bool) -> None:
        """Ends the run when a server has been gone, or full, for too long since a request began."""
        now = time.monotonic()
        if is_full:
            self._alive_seconds = now
            name, remedy = "request_seconds", "lower num_concurrent, or let the server take more requests"
        else:
            name, remedy = "retry_seconds", "start it again"
        limit = getattr(self._options, name)
        if now - max(begin, self._answered_seconds if is_full else self._alive_seconds) > limit:
            raise RunEndedError(
                f"the server {self._url} {problem}, for {limit:g} s (data.prompts.rollouts.{name}); {remedy}: "
                f"{_RESUMES}"
            )

    def _parse(self, content: bytes, path: str) -> Any:
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):  # which vLLM answers with a sentence
            return None
        try:
            return load_json(content)
        except (ValueError, RecursionError):
            raise self._garbage(f"answers {path} with what is not JSON: {show(content)}") from None

    def _garbage(self, problem: str) -> RunEndedError:
        return RunEndedError(f"the server {self._url} {problem}; correct it: {_RESUMES}")

    def _read(self, content: Any, weights: Weights, most: int) -> Completion:
        """Returns the answer in a response.

        Raises:
            RunEndedError: There is no answer in it, or one of other weights.
        """
        try:
            name, (choice,) = content["model"], content["choices"]
            ids, log_probs = _find_tokens(choice)
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError):
            raise self._garbage(
                "gives no ids of tokens with log-probabilities; `genesis serve` gives them, vLLM since 0.10.2, and "
                f"llama.cpp: {show(json.dumps(content).encode())}"
            ) from None
        if name != weights.name and weights.digest is not None:
            raise self._garbage(f"answers by the model {show(name)}, and {weights.name} was asked")
        if not isinstance(ids, list) or not isinstance(log_probs, list) or len(ids) != len(log_probs):
            raise self._garbage("does not give one log-probability for each token")
        counted = _find_count(content)
        if counted is not None and counted != len(ids):
            raise self._garbage(
                f"has written {numbered(counted, 'tokens')} and gives {len(ids):,} of them; llama.cpp leaves out those "
                "that are a part of a character"
            )
        if not 0 < len(ids) <= most:
            raise self._garbage(f"gives {numbered(len(ids), 'tokens')}, and 1 to {most:,} were asked for")
        wrong = [one for one in ids if type(one) is not int or not 0 <= one < self._vocab_size]
        if wrong:
            raise self._garbage(f"gives the token {show(wrong[0])}, and ids are from 0 to {self._vocab_size - 1}")
        odd = [one for one in log_probs if not is_log_prob(one)]
        if odd:
            raise self._garbage(
                f"gives the log-probability {show(odd[0])}: its weights have diverged, or it is no model"
            )
        is_stop = [one in self._stop_ids for one in ids]
        if any(is_stop[:-1]) or (reason == "stop") != is_stop[-1] or (reason == "length" and len(ids) < most):
            stops = ", ".join(map(str, sorted(self._stop_ids)))
            raise self._garbage(
                f"ends an answer by {show(reason)} at the token {ids[-1]}, and the tokens that end one are {stops}: "
                "start it with the tokenizer and the template of the run"
            )
        return Completion(np.array(ids, np.int32), np.array(log_probs, np.float32))


class _LoadedError(_RefusedError):
    """The server has the weights already, from before a restart of the run."""


def _find_tokens(choice: Any) -> tuple[Any, Any]:
    """Returns the ids of a choice's tokens and their log-probabilities.

    Raises:
        KeyError, TypeError: There are none.
    """
    found = choice["logprobs"]
    if "token_ids" in choice:
        return choice["token_ids"], found["token_logprobs"]
    return [one["id"] for one in found["content"]], [one["logprob"] for one in found["content"]]


def _find_count(content: Any) -> int | None:
    """Returns the number of tokens that a server counts; None if it counts none."""
    usage = content.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else None


def _read_seconds(header: str) -> float:
    """Returns the seconds in `Retry-After`, up to a limit; 0 for none, or for a date."""
    return min(float(header), _MAX_WAIT_SECONDS) if header.isdecimal() else 0.0


def _find_message(content: bytes) -> str:
    """Returns the reason in an error of OpenAI's form, or the beginning of another text."""
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        found = load_json(content)
        return show(found["error"]["message"] if "error" in found else found["message"])
    return show(content)
