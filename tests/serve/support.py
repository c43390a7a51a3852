"""Servers for tests: the command in a process of its own, or its application within the test's."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from genesis.generate.batch import Batch, NewToken, Request
from genesis.generate.load import Loaded, load_decoder
from genesis.generate.sampling_options import SamplingOptions
from genesis.serve.catalogue import Catalogue
from genesis.serve.guard import Guard
from genesis.serve.pool import Limits
from genesis.serve.server import Server, answering, bind
from genesis.tokenizer.open import open_tokenizer
from tests.commands import PIPE, ForkedCommand, start_genesis
from tests.tiny_runs import build_decoder, save

START_SECONDS = 120.0
DEADLINE_SECONDS = 60.0
ENDLESS_CONTEXT = 200_000


@dataclass
class Running:
    """A server that answers at `port` of 127.0.0.1; `process` is its own, if it has one."""

    port: int
    process: ForkedCommand | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, *, client: str = "127.0.0.1"
    ) -> tuple[int, Any, dict[str, str]]:
        """Returns status, JSON and headers of the answer to a client at an address of this machine."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=DEADLINE_SECONDS, source_address=(client, 0)
        )
        with contextlib.closing(connection):
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, content, {**kind, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), dict(answer.headers)

    def num_busy(self) -> int:
        return sum(model["num_busy"] for model in self.ask("/api/status")[1]["models"])


@contextmanager
def start(*arguments: str | Path, told: str | None = None, **environment: str) -> Iterator[Running]:
    """Runs `genesis serve` on a free port; on its error output it tells what is expected, or nothing."""
    process = start_genesis(
        *("serve", *arguments, "--port", "0", "--device", "cpu"),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "GENESIS_TOKEN": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http://"), process.communicate(timeout=START_SECONDS)
        yield Running(int(line.split("/")[2].rpartition(":")[2]), process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=START_SECONDS)
    assert process.returncode in (0, 130)
    assert err == "" if told is None else told in err, err


@asynccontextmanager
async def start_here(paths: Sequence[Path], limits: Limits, token: str | None = None) -> AsyncIterator[Running]:
    """Answers in the running event loop."""
    server = Server(Catalogue(paths), lambda entry: load_decoder(entry.path), Guard(token), limits)
    with bind("127.0.0.1", 0) as sock:
        async with answering(server, sock):
            yield Running(sock.getsockname()[1])


def save_endless(run: Path) -> Path:
    """Saves a model whose greedy text never ends: of the tokens, eos alone has a logit of zero whatever comes."""
    shape = {"max_seq_len": ENDLESS_CONTEXT, "has_tied_embeddings": False}
    decoder = build_decoder(3, **shape)
    with torch.no_grad():
        decoder.output.weight[open_tokenizer(run).eos_id] = 0.0
    return save(run / "checkpoints", 1, decoder, {}, **shape)


def alone(
    loaded: Loaded, prompt: str, num_tokens: int, sampling: SamplingOptions | None = None, seed: int = 0
) -> list[NewToken]:
    """Returns the tokens that a text gets when there is no other, with their log-probabilities; greedy if not said."""
    ids = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(prompt)]
    batch = Batch(loaded.decoder, 1, loaded.tokenizer.stop_ids, num_slots=len(ids) + num_tokens)
    batch.add(Request(ids, num_tokens, sampling or SamplingOptions(temperature=0.0), seed, num_top_logprobs=2))
    tokens: list[NewToken] = []
    while not (tokens and tokens[-1].is_last):
        tokens += batch.step()
    return tokens


def send_bytes(port: int, data: bytes, patience_seconds: float) -> bytes:
    """Returns what comes back; where the server waits for more, the connection is closed for writing."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=patience_seconds) as connection:
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except TimeoutError:
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(DEADLINE_SECONDS)
            with contextlib.suppress(TimeoutError, ConnectionError):
                answer += b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            pass
    return answer


def wait_until(check: Callable[[], bool]) -> None:
    """Looks again and again, and fails after a while."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not check():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


async def elsewhere(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `call`, which may ask a server in the running event loop, in a thread that this server has no part in."""
    with ThreadPoolExecutor(1) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, partial(call, *arguments))


async def wait_here_until(check: Callable[[], bool]) -> None:
    """As `wait_until`, beside a server in the running event loop."""
    await elsewhere(wait_until, check)
