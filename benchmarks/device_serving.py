"""Measures `genesis serve` under load: clients that ask over HTTP, at the same time, a model of random weights."""

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp

import genesis
from genesis.base.errors import UserError
from genesis.base.processes import start_program
from genesis.export.importing import save_weights
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.train import TokenizerOptions, train_tokenizer

_MODULES_OF_TEXT: Final = 40
_NUM_LAST_LINES: Final = 5
_STOP_SECONDS: Final = 20.0

SIZES: Final[dict[str, dict[str, int]]] = {
    "tiny": {"clients": 4, "pieces": 512, "dim": 32, "layers": 2, "tokens": 128, "new": 8, "heads": 4},
    "full": {"clients": 32, "pieces": 4096, "dim": 1536, "layers": 16, "tokens": 1024, "new": 128, "heads": 12},
}


def measure_serving(kind: str, size_name: str) -> dict[str, Any]:
    """Measures generated tokens per second and the time of a request, for one client and for many.

    Args:
        kind: Kind of device.
        size_name: A name in `SIZES`.

    Raises:
        UserError: The server ended before it answered; the message has its last lines.
    """
    size = SIZES[size_name]
    results: dict[str, Any] = {"unit": "tokens per second", "new tokens": size["new"]}
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        _write_run(run, size)
        with _serving(run, kind, size["clients"], Path(directory) / "log") as url:
            asyncio.run(_ask_together(url, 1, size["new"]))  # the first request allocates and compiles
            for num_clients in (1, size["clients"]):
                found = asyncio.run(_ask_together(url, num_clients, size["new"]))
                results[f"{num_clients} clients"] = found
    results["findings"] = [
        f"{name}: {found['tokens_per_second']:,.0f} tokens/s, a request takes {found['request_seconds']:.2f} s"
        for name, found in results.items()
        if isinstance(found, dict)
    ]
    return results


def _write_run(run: Path, size: dict[str, int]) -> None:
    """Writes random weights and a tokenizer trained on the sources of this package."""
    run.mkdir()
    sources = sorted((Path(genesis.__file__).parent / "model").rglob("*.py"))[:_MODULES_OF_TEXT]
    train_tokenizer((path.read_text(encoding="utf-8") for path in sources), TokenizerOptions(size["pieces"]), run)
    config = DecoderConfig(
        vocab_size=size["pieces"],
        dim=size["dim"],
        num_layers=size["layers"],
        num_heads=size["heads"],
        num_kv_heads=size["heads"] // 2,
        ffn_dim=size["dim"] * 3,
        max_seq_len=size["tokens"],
    )
    decoder = Decoder(config)
    decoder.init_weights(seed=0)
    save_weights(decoder.state_dict(), config, open_tokenizer(run), run / "checkpoints")


@contextmanager
def _serving(run: Path, kind: str, num_clients: int, log: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "genesis", "serve", str(run), "--port", "0", "--device", kind]
    with log.open("wb") as output:
        server = start_program(
            [*command, "--max_concurrent", str(num_clients)],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, "GENESIS_TOKEN": ""},
        )
    with server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line.startswith("http://"):
                last = log.read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:]
                raise UserError(f"the server ended at its start: {' / '.join(last)}")
            yield "/".join(line.split("/")[:3]).split(";")[0].strip()
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_STOP_SECONDS)
            server.kill()


async def _ask_together(url: str, num_clients: int, num_tokens: int) -> dict[str, float]:
    """Returns the figures of one request of each client, all sent at once."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]

        async def ask(number: int) -> tuple[int, float]:
            body = {"model": model, "prompt": f"def f{number}(", "max_tokens": num_tokens, "seed": number}
            begin = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                content = await answer.json()
                if answer.status != HTTPStatus.OK:
                    raise UserError(f"the server answered with status {answer.status}: {content}")
            return int(content["usage"]["completion_tokens"]), time.perf_counter() - begin

        begin = time.perf_counter()
        answers = await asyncio.gather(*map(ask, range(num_clients)))
        seconds = time.perf_counter() - begin
    return {
        "tokens_per_second": sum(count for count, _ in answers) / seconds,
        "request_seconds": statistics.median(taken for _, taken in answers),
        "tokens": sum(count for count, _ in answers),
    }
