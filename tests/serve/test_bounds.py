"""Many at once, more than there is room for, those who leave and those who do not read."""

import asyncio
import contextlib
import json
import shutil
import socket
import time

import openai
import pytest
import torch

from genesis.generate.load import load_decoder
from genesis.serve.catalogue import Catalogue
from genesis.serve.pool import Limits, ModelPool
from tests.serve.support import (
    DEADLINE_SECONDS,
    ENDLESS_CONTEXT,
    alone,
    elsewhere,
    save_endless,
    start_here,
    wait_here_until,
)
from tests.tiny_runs import build_decoder, save

NUM_STREAMS = 100
LONG = {"model": "latest", "prompt": "alpha", "max_tokens": ENDLESS_CONTEXT - 100, "temperature": 0.0}
"""Of the endless model: a text that lasts until somebody ends it."""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, tokenizer_file):
    directory = tmp_path_factory.mktemp("long")
    shutil.copy(tokenizer_file, directory)
    save_endless(directory)
    return directory


opened = []


class Stream:
    """A completion over a socket of its own."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, running, **asked):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps({**LONG, "stream": True, **asked}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        opened.append(cls(reader, writer))
        return opened[-1]

    async def head(self):
        """Returns the status and, in small letters, the headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        return int(lines[0].split()[1]), lines[1:]

    async def event(self):
        """Returns the next event, or None at the end of the answer."""
        while line := await self.reader.readline():
            if line == b"0\r\n":
                return None
            if line.startswith(b"data: "):
                return line[6:].strip().decode()
        return None

    async def leave(self):
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def run_with(paths, scenario, **limits):
    """Runs `scenario` on a server with `limits`, in this process."""

    async def run():
        try:
            async with asyncio.timeout(DEADLINE_SECONDS), start_here(paths, Limits(**limits)) as running:
                return await scenario(running)
        finally:
            while opened:
                await opened.pop().leave()

    return asyncio.run(run())


@pytest.mark.slow
def test_a_hundred_streams_at_once_each_give_what_they_give_alone(server, served_run):
    loaded = load_decoder(served_run / "checkpoints/step-00000003")
    wanted = {}
    for number in range(10 * NUM_STREAMS):
        if len(wanted) == NUM_STREAMS:
            break
        prompt, num_tokens = f"alpha{number} def ", 8 + number % 24
        tokens = alone(loaded, prompt, num_tokens)
        if all(token.top_logprobs[0][1] - token.top_logprobs[1][1] > 1e-3 for token in tokens):  # no choice by rounding
            wanted[prompt, num_tokens] = loaded.tokenizer.decode([token.id for token in tokens])
    assert len(wanted) == NUM_STREAMS
    assert len(set(wanted.values())) > NUM_STREAMS / 2

    async def stream(client, prompt, num_tokens):
        asked = {"model": "step-00000003", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0}
        chunks = await client.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await asyncio.gather(*(stream(client, *asked) for asked in wanted))

    assert asyncio.run(run()) == list(wanted.values())
    assert server.num_busy() == 0


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_goes_away_frees_its_row_at_once(long_run, how):
    async def scenario(running):
        leaving, staying = await Stream.open(running), await Stream.open(running)
        for stream in (leaving, staying):
            assert (await stream.head())[0] == 200
            await stream.event()
        assert (await elsewhere(running.num_busy)) == 2
        connection = leaving.writer.get_extra_info("socket")
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how == "half":
            leaving.writer.write_eof()
        else:
            leaving.writer.transport.abort() if how == "reset" else leaving.writer.close()
        await wait_here_until(lambda: running.num_busy() == 1)
        assert json.loads(await staying.event())["choices"]
        await leaving.leave()
        await staying.leave()
        await wait_here_until(lambda: running.num_busy() == 0)

    run_with([long_run], scenario, max_concurrent=2)


def test_one_that_waits_for_its_whole_answer_or_for_its_turn_is_forgotten_when_it_goes(long_run):
    async def scenario(running):
        first, second = await Stream.open(running, stream=False), None
        await wait_here_until(lambda: running.num_busy() == 1)
        second = await Stream.open(running)
        await wait_here_until(lambda: running.ask("/api/status")[1]["num_waiting"] == 1)
        await second.leave()
        await wait_here_until(lambda: running.ask("/api/status")[1]["num_waiting"] == 0)
        assert (await elsewhere(running.num_busy)) == 1
        await first.leave()
        await wait_here_until(lambda: running.num_busy() == 0)
        assert running.process is None
        status = (await elsewhere(running.ask, "/api/status"))[1]
        assert status["num_texts"] == 0

    run_with([long_run], scenario, max_concurrent=1)


def test_who_comes_beyond_the_queue_is_told_to_come_again_and_others_get_their_turn(long_run):
    async def scenario(running):
        first = await Stream.open(running)
        await first.head()  # it has the row, whichever thread is the faster
        second = await Stream.open(running, max_tokens=3)
        await wait_here_until(lambda: running.ask("/api/status")[1]["num_waiting"] == 1)
        status, content, headers = await elsewhere(running.ask, "/v1/completions", LONG)
        assert (status, content["error"]["code"]) == (429, "server_busy")
        assert headers["Retry-After"] == "1"
        await first.leave()
        assert (await second.head())[0] == 200
        *texts, last = [event async for event in iterate(second)]
        assert last == "[DONE]"
        assert json.loads(texts[-1])["choices"][0]["finish_reason"] == "length"
        await second.leave()
        assert (await elsewhere(running.ask, "/v1/completions", {**LONG, "max_tokens": 1}))[0] == 200

    run_with([long_run], scenario, max_concurrent=1, max_queue=1)


def test_connections_at_work_never_give_way_and_one_too_many_is_told_to_come_again(long_run, monkeypatch):
    monkeypatch.setattr("genesis.serve.server.count_connections", lambda: 8)  # 4 for one address

    async def scenario(running):
        streams = [await Stream.open(running) for _ in range(4)]
        for stream in streams:
            assert (await stream.head())[0] == 200
        refused = await Stream.open(running)
        status, headers = await refused.head()
        assert (status, "retry-after: 1" in headers) == (503, True)
        for stream in streams:
            assert json.loads(await stream.event())["choices"]
        await streams[0].leave()
        await asyncio.sleep(0.1)
        assert (await (await Stream.open(running)).head())[0] == 200

    run_with([long_run], scenario, max_concurrent=5)


async def open_unread(running):
    """Returns a connection whose endless stream nobody reads, once it has a row."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", running.port))
    body = json.dumps({**LONG, "stream": True, "logprobs": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    await asyncio.get_running_loop().sock_sendall(connection, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await wait_here_until(lambda: running.num_busy() == 1)
    return connection


@pytest.mark.slow
def test_a_reader_that_takes_nothing_gives_its_row_to_a_text_that_waits(long_run):
    async def scenario(running):
        with await open_unread(running):
            assert (await elsewhere(running.ask, "/v1/completions", {**LONG, "max_tokens": 1}))[0] == 200

    run_with([long_run], scenario, max_concurrent=1, max_write_seconds=600.0)


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_dropped_and_holds_nobody_up(long_run):
    async def scenario(running):
        with await open_unread(running):
            reading = await Stream.open(running)
            await reading.head()
            await wait_here_until(lambda: running.num_busy() == 2)
            while await elsewhere(running.num_busy) == 2:
                assert json.loads(await reading.event())["choices"]
            assert json.loads(await reading.event())["choices"]
        await reading.leave()
        await wait_here_until(lambda: running.num_busy() == 0)

    run_with([long_run], scenario, max_concurrent=2, max_write_seconds=0.5)


@pytest.mark.slow
def test_a_request_that_takes_too_long_ends_with_the_reason_and_frees_its_row(long_run):
    async def scenario(running):
        stream = await Stream.open(running)
        assert (await stream.head())[0] == 200
        *_, last = [event async for event in iterate(stream)]
        assert json.loads(last)["error"]["code"] == "request_timeout"
        await stream.leave()
        status, content, _ = await elsewhere(running.ask, "/v1/completions", LONG)
        assert (status, content["error"]["code"]) == (503, "request_timeout")
        await wait_here_until(lambda: running.num_busy() == 0)

    run_with([long_run], scenario, max_concurrent=1, max_request_seconds=1.0)


async def iterate(stream):
    while (event := await stream.event()) is not None:
        yield event


def test_one_model_at_a_time_gives_way_to_the_next_and_every_request_its_own_answer(run):
    ids = [f"step-{step:08d}" for step in (1, 2, 3)]
    wanted = {}
    for name in ids:
        loaded = load_decoder(run / "checkpoints" / name)
        wanted[name] = loaded.tokenizer.decode([token.id for token in alone(loaded, "alpha", 10)])
    assert len(set(wanted.values())) == 3

    async def scenario(running):
        asked = [{**LONG, "max_tokens": 10, "model": name} for name in ids * 4]
        answers = await asyncio.gather(*(elsewhere(running.ask, "/v1/completions", one) for one in asked))
        status = (await elsewhere(running.ask, "/api/status"))[1]
        assert len(status["models"]) == 1
        return [(answer[1]["model"], answer[1]["choices"][0]["text"]) for answer in answers]

    assert run_with([run], scenario, max_models=1, max_concurrent=2, max_queue=20) == list(wanted.items()) * 4


def test_requests_for_other_models_are_served_in_the_order_of_their_arrival(run):
    entries = Catalogue([run]).entries()

    async def scenario() -> str:
        pool = ModelPool(lambda entry: load_decoder(entry.path), Limits(max_models=1, max_queue=20))
        served, first_may_go = "", asyncio.Event()

        async def ask(name: str, client: str) -> None:
            nonlocal served
            async with pool.lend(entries["abc".index(name)], 1, client):
                served += name
                if served == "a":
                    await first_may_go.wait()

        tasks = []
        for name, client in zip("abacbca", "1112122", strict=True):
            tasks.append(asyncio.create_task(ask(name, client)))
            await asyncio.sleep(0)
            while not served:
                await asyncio.sleep(0.01)
        tasks.pop(3).cancel()  # a client that goes leaves no gap
        first_may_go.set()
        await asyncio.gather(*tasks)
        pool.close()
        await asyncio.to_thread(pool.join)
        return served

    assert asyncio.run(scenario()) == "ababca"


@pytest.mark.slow
def test_a_model_in_use_is_waited_for(long_run, run):
    async def scenario(running):
        stream = await Stream.open(running, model=f"{long_run.name}/latest")
        await stream.head()
        other = asyncio.create_task(
            elsewhere(running.ask, "/v1/completions", {**LONG, "model": f"{run.name}/latest", "max_tokens": 1})
        )
        await wait_here_until(lambda: running.ask("/api/status")[1]["num_waiting"] == 1)
        assert json.loads(await stream.event())["choices"]
        assert not other.done()
        await stream.leave()
        assert (await other)[0] == 200

    run_with([long_run, run], scenario, max_models=1)


@pytest.mark.slow
def test_of_two_models_the_idle_one_gives_way_though_it_was_used_last(long_run, run):
    async def scenario(running):
        stream = await Stream.open(running, model=f"{long_run.name}/latest")
        await stream.head()
        for step in (1, 2):
            asked = {**LONG, "model": f"{run.name}/step-{step:08d}", "max_tokens": 1}
            assert (await elsewhere(running.ask, "/v1/completions", asked))[0] == 200
        for _ in range(100):
            assert json.loads(await stream.event())["choices"]

    run_with([long_run, run], scenario, max_models=2)


@pytest.mark.parametrize(("value", "code"), [(float("nan"), "model_diverged"), (3e38, "model_")])
def test_a_model_that_has_diverged_is_an_error_and_the_next_one_answers(long_run, run, tmp_path, value, code):
    decoder = build_decoder(1)
    with torch.no_grad():
        decoder.norm.weight.fill_(value)  # the large ones give logits that are none
    shutil.copytree(run, tmp_path / "run")
    save(tmp_path / "run/checkpoints", 9, decoder, {})

    async def scenario(running):
        for temperature in (0.0, 1.0):
            asked = {**LONG, "max_tokens": 3, "temperature": temperature}
            status, content, _ = await elsewhere(running.ask, "/v1/completions", asked)
            assert status == 500
            assert content["error"]["code"].startswith(code)
        assert (await elsewhere(running.ask, "/v1/completions", {**asked, "model": "step-00000001"}))[0] == 200

    run_with([tmp_path / "run"], scenario)


def test_a_server_that_ends_ends_its_streams_with_the_reason(long_run):
    async def scenario():
        async with start_here([long_run], Limits()) as running:
            stream = await Stream.open(running)
            await stream.head()
            await stream.event()
            began = time.monotonic()
        *_, last = [event async for event in iterate(stream)]
        assert json.loads(last)["error"]["code"] == "server_ending"
        assert time.monotonic() - began < DEADLINE_SECONDS
        await stream.leave()

    asyncio.run(scenario())
