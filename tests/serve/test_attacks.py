"""Clients that take connections, memory, time or the log of a server, beside one that asks it now and then."""

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.base.run_directory import RunDirectory
from genesis.generate.load import load_decoder
from genesis.serve import connections
from genesis.serve.catalogue import Catalogue
from genesis.serve.connections import Connections, count_connections
from genesis.serve.guard import Guard
from genesis.serve.pool import Limits
from genesis.serve.repeats import RepeatFilter
from genesis.serve.server import Server, answering, bind
from tests.forged.runner import cpu_seconds
from tests.serve import attackers
from tests.serve.conftest import CHAT_TEMPLATE
from tests.serve.support import DEADLINE_SECONDS, Running, elsewhere, start_here
from tests.tiny_runs import build_decoder, save

TOKEN = "a-token-of-some-length"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
ASKED = {"model": "latest", "prompt": "a", "max_tokens": 2}
ASKED_CHAT = {"model": "latest", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
ATTACKS = [kind for kind in attackers.NUMBERS if kind != "nothing"]


def run_with(run, scenario):
    """Runs `scenario` on a server in this process."""

    async def answer():
        async with asyncio.timeout(DEADLINE_SECONDS), start_here([run], Limits(), token=TOKEN) as running:
            return await scenario(running)

    return asyncio.run(answer())


async def connect(running, content=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(content)
    await writer.drain()
    return reader, writer


async def connect_all(running, content, number):
    """Returns connections whose content the server, in this event loop, has seen."""
    opened = [await connect(running, content) for _ in range(number)]
    for _ in range(50 + number):
        await asyncio.sleep(0)
    return opened


async def is_open(reader):
    with contextlib.suppress(TimeoutError, ConnectionError):
        while await asyncio.wait_for(reader.read(2**16), 0.05):
            pass
        return False
    return reader.exception() is None


async def ask(running, path="/v1/completions", body=ASKED):
    return (await elsewhere(running.ask, path, body, RIGHT))[0]


HALVES = {
    "nothing": b"",
    "half a head": b"GET /api/status HTTP/1.1\r\nHost: lo",
    "a wrong token": b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a body": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n"
        b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{" % TOKEN.encode()
    ),
}


@pytest.mark.parametrize("half", HALVES)
def test_the_oldest_idle_connection_gives_way_and_a_client_is_always_answered(run, monkeypatch, half):
    monkeypatch.setattr("genesis.serve.server.count_connections", lambda: 8)

    async def scenario(running):
        opened = await connect_all(running, HALVES[half], 4)
        assert await ask(running) == 200
        assert not await is_open(opened[0][0])
        opened += await connect_all(running, HALVES[half], 40)
        assert await ask(running) == 200
        are_open = [await is_open(reader) for reader, _ in opened]
        assert sum(are_open) <= 4
        assert not any(are_open[:40])
        for _, writer in opened:
            writer.close()

    run_with(run, scenario)


@pytest.mark.parametrize("half", HALVES)
def test_a_client_that_sends_no_more_is_let_go_after_a_time(run, monkeypatch, half):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr("genesis.serve.server._BODY_SECONDS", 0.1)

    async def scenario(running):
        reader, writer = await connect(running, HALVES[half])
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1") == (0 if half in ("nothing", "half a head") else 1)
        assert (b" 408 " in answer) == (half == "half a body")
        writer.close()

    if half == "half a body":
        monkeypatch.setattr(connections, "KEEPALIVE_SECONDS", 0.1)
    run_with(run, scenario)


def test_a_connection_with_a_permitted_request_may_wait_longer_but_not_with_half_a_head(run, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    request = b"GET /api/status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n" % TOKEN.encode()

    async def scenario(running):
        reader, writer = await connect(running, request)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.6)
        assert await is_open(reader)
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(request[:20])
        await reader.read()
        assert not await is_open(reader)
        writer.close()

    run_with(run, scenario)


@pytest.mark.parametrize("begin", [b"", b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_head_without_end_is_not_kept(run, begin):
    async def scenario(running):
        reader, writer = await connect(running, begin + b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(200):
                writer.write(b"X-%d: " % number + b"a" * 4000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        assert not await is_open(reader)
        writer.close()
        assert await ask(running) == 200

    run_with(run, scenario)


@pytest.mark.parametrize(
    ("headers", "status"),
    [(RIGHT, 413), ({}, 401), ({**RIGHT, "Content-Type": "text/plain"}, 415)],
)
def test_a_client_that_sends_its_whole_body_first_reads_why_it_was_refused(run, headers, status):
    async def scenario(running):
        body = b"a" * 5_000_000
        assert (await elsewhere(running.ask, "/v1/completions", body, headers))[0] == status
        assert await ask(running) == 200

    run_with(run, scenario)


def test_a_connection_that_gives_way_before_the_loop_has_it_ends():
    async def scenario():
        with bind("127.0.0.1", 0) as sock:
            open_connections = Connections(sock, asyncio.Protocol, 8, lambda: 1.0)
            client, ours = socket.socketpair()
            ours.setblocking(False)
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            open_connections._open(ours, "10.0.0.1")
            (connection,) = open_connections._all()
            assert connection.has_head
            open_connections.forget(connection)
            connection.abort()
            client.setblocking(False)
            found = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), DEADLINE_SECONDS)
            client.close()
            open_connections.close()
            return found

    assert asyncio.run(scenario()) == b""


def test_an_address_has_half_of_the_connections():
    async def scenario():
        with bind("127.0.0.1", 0) as sock:
            open_connections = Connections(sock, asyncio.Protocol, 8, lambda: 1.0)
            clients = []
            for number in range(12):
                other, ours = socket.socketpair()
                ours.setblocking(False)
                clients.append(other)
                assert open_connections._has_room("10.0.0.1" if number < 8 else f"10.0.0.{number}")
                open_connections._open(ours, "10.0.0.1" if number < 8 else f"10.0.0.{number}")
            found = {client: len(of_client) for client, of_client in open_connections._clients.items()}
            open_connections.close()
            await asyncio.sleep(0)
            for client in clients:
                client.close()
            return found

    assert asyncio.run(scenario()) == {"10.0.0.1": 4, **{f"10.0.0.{number}": 1 for number in range(8, 12)}}


def test_without_a_free_descriptor_the_log_has_one_line_and_the_next_client_is_answered(run, monkeypatch, caplog):
    number = 0

    class Exhausted(socket.socket):
        def accept(self):
            nonlocal number
            number += 1
            if number < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(connections, "_RETRY_SECONDS", 0.01)

    async def scenario():
        server = Server(Catalogue([run]), lambda entry: load_decoder(entry.path), Guard(TOKEN), Limits())
        with bind("127.0.0.1", 0) as sock, Exhausted(fileno=sock.detach()) as exhausted:
            async with answering(server, exhausted):
                return await ask(Running(exhausted.getsockname()[1]))

    assert asyncio.run(scenario()) == 200
    assert number >= 4
    assert [record.message for record in caplog.records if "descriptor" in record.message] == [
        "a connection waits, because no file descriptor is free (Too many open files)"
    ]


@pytest.mark.parametrize(("limit", "wanted"), [(48, 20), (1024, 512), (resource.RLIM_INFINITY, 512)])
def test_the_number_of_connections_follows_the_limit_of_descriptors(monkeypatch, limit, wanted):
    monkeypatch.setattr(connections, "_count_open", lambda: 12)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert count_connections() == wanted


def test_a_limit_that_leaves_room_for_no_connection_is_refused_with_a_sufficient_one(monkeypatch):
    monkeypatch.setattr(connections, "_count_open", lambda: 12)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))
    with pytest.raises(UserError, match=r"limit of open files is 32.*for 4 connections: raise it to at least 36"):
        count_connections()


def test_equal_log_lines_are_counted_and_others_are_not_lost(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    repeats, logger = RepeatFilter(), logging.getLogger("a")

    def log(line, message, *arguments, error=None):
        info = None if error is None else (type(error), error, None)
        record = logger.makeRecord("a", logging.ERROR, "f.py", line, message, arguments, info)
        return record.getMessage() if repeats.filter(record) else None

    assert [log(1, "one %d", 0) for _ in range(5)] == ["one 0", None, None, None, None]
    assert log(2, "one 0") == "one 0"
    assert log(1, "one %d", 1) == "one 1"
    errors = [OSError("a"), OSError("b"), OSError("a"), ValueError("a")]
    assert [log(1, "one 0", error=error) for error in errors] == ["one 0", "one 0", None, "one 0"]
    # Lines that all differ cannot fill the log.
    assert [log(1, "one %d", number) for number in range(2, 99)] == [f"one {number}" for number in range(2, 8)] + [
        None
    ] * 91
    now = 61.0
    assert log(1, "one %d", 9) == "one 9 (95 more since the last such line)"
    assert log(1, "one %d", 9) is None


def of_size(num_bytes, role="user"):
    return {"role": role, "content": "a " * (num_bytes // 2)}


LARGE = {
    "a user's turn": {"messages": [of_size(300_000)]},
    "an assistant's turn": {"messages": [of_size(10), of_size(4_000_000, "assistant"), of_size(10)]},
    "many turns": {"messages": [of_size(4, role) for role in ("user", "assistant")] * 5000},
    "tools": {
        "messages": [of_size(10)],
        "tools": [
            {"type": "function", "function": {"name": f"f{number}", "description": "a " * 100_000}}
            for number in range(10)
        ],
        "chat_template_kwargs": {"indent": 1},
    },
    "variables": {"messages": [of_size(10)], "chat_template_kwargs": {"last": "a " * 300_000}},
    "a text": {"prompt": "a " * 300_000},
    "tokens": {"prompt": [1] * 100_000},
}


@pytest.fixture(scope="module")
def chat_run(run, tmp_path_factory):
    directory = shutil.copytree(run, tmp_path_factory.mktemp("attacked") / "run")
    template = RunDirectory(directory).chat_template
    template.parent.mkdir(exist_ok=True)
    template.write_text(CHAT_TEMPLATE)
    return directory


@pytest.mark.slow
def test_what_exceeds_the_context_is_refused_beside_the_server_before_it_is_encoded(chat_run, monkeypatch):
    monkeypatch.setattr("genesis.serve.preparer._read", lambda job: pytest.fail("it is read within the server"))
    monkeypatch.setattr("genesis.serve.preparer.SMALL_BYTES", 0)

    async def scenario(running):
        for body in LARGE.values():
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            status, content, _ = await elsewhere(running.ask, path, {"model": "latest", **body}, RIGHT)
            assert (status, content["error"]["code"]) == (400, "context_length_exceeded"), content
        assert await ask(running) == 200
        assert await ask(running, "/v1/chat/completions", {**ASKED_CHAT, "n": 2}) == 200
        assert await ask(running, body={**ASKED, "prompt": [[1], "a"], "echo": True}) == 200
        assert await ask(running, body={**ASKED, "prompt": 3}) == 400

    run_with(chat_run, scenario)


# ---- real servers, and attackers in processes of their own


class Attacked:
    """A server in a process of its own, under an attack of another process."""

    def __init__(self, run, directory, num_descriptors, options):
        self.log = directory / "log"
        command = [sys.executable, "-m", "genesis", "serve", str(run), "--port", "0", "--device", "cpu", *options]
        shell = f"ulimit -n {num_descriptors}; exec {shlex.join(command)}"
        environment = {**os.environ, "GENESIS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", shell], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        assert self.process.stdout is not None
        self.running = Running(int(re.findall(rb":([0-9]+)/", self.process.stdout.readline())[0]))

    def attack(self, seconds, *kinds):
        script = [sys.executable, attackers.__file__, str(self.running.port), str(seconds), TOKEN, *kinds]
        process = subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"attacking\n", process.stderr.read()
        return process

    def ask(self, number):
        """Returns the status of a text or a chat, the seconds that it took, and those of the server's processor."""
        path, body = (("completions", ASKED), ("chat/completions", ASKED_CHAT))[number % 2]
        began, before = time.monotonic(), self.cpu_seconds()
        status, _, _ = self.running.ask(f"/v1/{path}", body, RIGHT)
        waited = time.monotonic() - began
        return status, waited, sum(now - before.get(pid, 0.0) for pid, now in self.cpu_seconds().items())

    def cpu_seconds(self):
        return {pid: cpu_seconds(int(pid)) for pid in self.pids()}

    def pids(self, *, of_processes=True):
        pids = [str(self.process.pid)]
        for one in Path(f"/proc/{self.process.pid}/task").iterdir() if of_processes else ():
            with contextlib.suppress(OSError):  # a thread that has just ended
                pids += (one / "children").read_text().split()
        return pids

    def memory_bytes(self, *, of_processes=True):
        """Returns what the server, and its processes, hold in memory."""
        num_pages = 0
        for pid in self.pids(of_processes=of_processes):
            with contextlib.suppress(OSError):  # a process that has just ended
                num_pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return num_pages * resource.getpagesize()

    def wait_for_idle(self):
        """Waits until the processes without work have ended, but that of small requests, which stays."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(self.pids()) > 2:
            assert time.monotonic() < deadline, self.pids()
            time.sleep(0.5)

    def end(self, number):
        self.process.send_signal(number)
        assert self.process.wait(DEADLINE_SECONDS) == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]
        self.process.stdout.close()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def attacked(run, directory, num_descriptors=1024, *options):
    server = Attacked(run, directory, num_descriptors, options)
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "num_descriptors"), [(signal.SIGINT, 1024), (signal.SIGTERM, 48)])
def test_a_client_is_answered_and_a_signal_ends_the_server_under_all_attacks(
    chat_run, tmp_path, number, num_descriptors
):
    with attacked(chat_run, tmp_path, num_descriptors) as server:
        process = server.attack(20.0, *ATTACKS)
        statuses = [server.ask(index)[0] for index in range(8)]
        server.end(number)
        process.kill()
        process.communicate()
        assert statuses == [200] * 8
        assert server.log.stat().st_size < 4096, server.log.read_text()


@pytest.mark.slow
def test_what_reads_large_chats_gives_way_to_the_server_whatever_its_priority_is(chat_run, tmp_path):
    with attacked(chat_run, tmp_path) as server:
        pid = server.process.pid
        own = max(12, os.getpriority(os.PRIO_PROCESS, 0))
        for thread in Path(f"/proc/{pid}/task").iterdir():  # on Linux each has its own
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), own)
        body = {"model": "latest", **LARGE["an assistant's turn"]}
        assert server.running.ask("/v1/chat/completions", body, RIGHT)[0] == 400
        assert server.ask(1)[0] == 200
        found = {os.getpriority(os.PRIO_PROCESS, int(one)) for one in server.pids()}
        assert found == {own, min(19, own + 5)}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_under_each_attack_a_client_is_answered_within_a_second_and_memory_stays(chat_run, tmp_path):
    """The result of the last run is in benchmarks/records/serve-attacks.md.

    A second server, which nobody attacks, has the same requests: its answers are late by what the machine takes. What
    counts is the processor time of the server and its processes while a request waits: that of a quiet core.
    """
    seconds = float(os.environ.get("GENESIS_ATTACK_SECONDS", "60"))
    save(chat_run / "checkpoints", 4, build_decoder(5, max_seq_len=2048), {}, max_seq_len=2048)
    options = (4096, "--prefix_cache_gb", "0.02")
    (tmp_path / "spared").mkdir()
    with attacked(chat_run, tmp_path, *options) as server, attacked(chat_run, tmp_path / "spared", *options) as spared:
        for kind in ("large_chat", "many_turns", "new_prefix", "hard_grammar"):  # what loads, starts and is kept
            process = server.attack(max(5.0, seconds / 4), kind)
            process.communicate()
            process.wait()
        assert [server.ask(number)[0] for number in range(4)] == [200] * 4
        assert [spared.ask(number)[0] for number in range(4)] == [200] * 4
        server.wait_for_idle()
        waited, begun = {}, server.memory_bytes()
        for kind in ("nothing", *ATTACKS, "all"):
            kinds = ATTACKS if kind == "all" else [kind]
            size = server.log.stat().st_size
            process = server.attack(seconds, *kinds)
            answers, of_spared = [], []
            while process.poll() is None:
                begin = time.monotonic()
                for one, found in ((server, answers), (spared, of_spared)):
                    found.append(one.ask(len(found)))
                time.sleep(max(0.0, begin + 1.0 - time.monotonic()))
            process.communicate()
            took, without = (sorted(one for _, one, _ in found) for found in (answers, of_spared))
            used = sorted(one for _, _, one in answers)
            p99, p99_without, waited[kind] = (one[math.ceil(0.99 * len(one)) - 1] for one in (took, without, used))
            whole, alone = server.memory_bytes() / 1e6, server.memory_bytes(of_processes=False) / 1e6
            print(
                f"| {kind} | {len(took)} | {took[len(took) // 2]:.3f} | {without[len(without) // 2]:.3f} | {p99:.3f} | "
                f"{p99_without:.3f} | {waited[kind]:.2f} | {alone:.0f} | {whole:.0f} | "
                f"{server.log.stat().st_size - size} |",
                flush=True,
            )
            assert {status for status, _, _ in answers} == {200}
        server.wait_for_idle()
        print(f"memory: {begun / 1e6:.0f} MB before, {server.memory_bytes() / 1e6:.0f} MB after", flush=True)
        assert server.memory_bytes() < 1.05 * begun
        # Under all together, a request waits for dozens of its own client, whatever the order is.
        assert max(used for kind, used in waited.items() if kind != "all") < 1.0
        for one in (server, spared):
            one.end(signal.SIGTERM)
