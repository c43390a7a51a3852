"""Clients that harm a server: `python attackers.py PORT SECONDS TOKEN KIND ...`.

The module needs nothing but Python, so that it starts fast in a process of its own.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import time

MANY = 600
BODY_BYTES = 4 * 2**20 - 2000
HEAD = b"%s /v1/%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"


class Attack:
    """Connections that each repeat an act until the time is over."""

    def __init__(self, port, seconds, token):
        self.port, self.token = port, token.encode()
        self.end = time.monotonic() + seconds
        self.numbers = itertools.count(time.time_ns() // 1_000_000 % 2**30)

    async def connect(self, buffer=None, address="127.0.0.1"):
        sock = socket.socket()
        sock.bind((address, 0))
        sock.setblocking(False)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=sock, limit=2**12 if buffer else 2**16)

    def head(self, path, size, method=b"POST"):
        return HEAD % (method, path, self.token) + b"Content-Length: %d\r\n\r\n" % size

    async def repeat(self, act):
        while time.monotonic() < self.end:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await act()
            await asyncio.sleep(0.01)

    async def hold(self, reader):
        """Waits until the server closes the connection."""
        while await reader.read(2**16):
            pass

    async def nothing(self):
        await asyncio.sleep(1.0)

    async def idle(self):
        reader, writer = await self.connect()
        await self.hold(reader)
        writer.close()

    async def slow_head(self):
        await self._slowly(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")

    async def slow_body(self):
        await self._slowly(self.head(b"completions", BODY_BYTES))

    async def _slowly(self, begin):
        reader, writer = await self.connect()
        writer.write(begin)
        while not reader.at_eof() and time.monotonic() < self.end:
            writer.write(b"a")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.hold(reader), 0.5)
                break
        writer.close()

    async def unread_stream(self):
        body = json.dumps({"model": "latest", "prompt": "a", "max_tokens": 20, "stream": True, "logprobs": 5}).encode()
        _, writer = await self.connect(buffer=2**12)
        writer.write((self.head(b"completions", len(body)) + body) * 200)
        await asyncio.sleep(5.0)
        writer.close()

    async def slow_reader(self):
        body = json.dumps({"model": "latest", "prompt": "a", "max_tokens": 200, "stream": True, "logprobs": 5}).encode()
        reader, writer = await self.connect(buffer=2**12)
        writer.write(self.head(b"completions", len(body)) + body)
        while await reader.read(64):
            await asyncio.sleep(0.1)
        writer.close()

    async def hard_grammar(self):
        number = next(self.numbers)  # none is one that was asked for before
        hard = (
            {"regex": f"(a|aa)+(a{{1,{900 + number % 99}}}){{1,900}}"},
            {"json": {"type": "integer", "multipleOf": 10**9 + number}},
            {
                "json": {
                    "allOf": [
                        {"properties": {f"a{j}": {"pattern": f"x{number}{i}"} for j in range(28)}} for i in range(45)
                    ]
                }
            },
            {"grammar": f'start: x{{1,{number % 5000 + 1}}}\nx: "a" | x x | "b" x'},
            {"choice": [f"{number}{i}" for i in range(4000)]},
            {"regex": f"({'|'.join(f'.*{i}{number}.*' for i in range(60))})" * 3},
        )[number % 6]
        await self._post(
            {"model": "latest", "prompt": "a", "max_tokens": 50, "structured_outputs": hard}, b"completions"
        )

    async def new_prefix(self):
        number = next(self.numbers)
        prompt = [1 + (number >> 8 * place) % 256 for place in range(4)] + [5] * 1500
        # From another address: clients of one address share their turns.
        asked = {"model": "latest", "prompt": prompt, "max_tokens": 1}
        await self._post(asked, b"completions", address="127.0.0.2")

    async def wrong_token(self):
        reader, writer = await self.connect()
        writer.write((HEAD % (b"GET", b"models", b"wrong") + b"\r\n") * 100)
        await asyncio.wait_for(reader.read(2**16), 5.0)
        writer.close()

    async def large_chat(self):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word " * (BODY_BYTES // 5)}]
        await self._post({"model": "latest", "messages": turns})

    async def large_tools(self):
        tool = {"type": "function", "function": {"name": "f", "description": "word " * (BODY_BYTES // 50)}}
        await self._post(
            {
                "model": "latest",
                "messages": [{"role": "user", "content": "a"}],
                "tools": [tool] * 10,
                "chat_template_kwargs": {"indent": 1},
            }
        )

    async def many_turns(self):
        turns = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(80_000)]
        await self._post({"model": "latest", "messages": turns})

    async def hostile_json(self):
        await self._post({"model": "latest", "prompt": [1] * (BODY_BYTES // 4)}, b"completions")
        await self._post({"model": "latest", "prompt": "a", "user": [{}] * (BODY_BYTES // 5)}, b"completions")

    async def _post(self, content, path=b"chat/completions", address="127.0.0.1"):
        body = json.dumps(content).encode()
        reader, writer = await self.connect(address=address)
        writer.write(self.head(path, len(body)) + body)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        writer.close()


NUMBERS = {
    "nothing": 1,
    "idle": 2000,
    "slow_head": MANY,
    "slow_body": 200,
    "unread_stream": 30,
    "slow_reader": 30,
    "hard_grammar": 10,
    "new_prefix": 10,
    "wrong_token": 30,
    "large_chat": 30,
    "large_tools": 10,
    "many_turns": 10,
    "hostile_json": 10,
}


async def attack(port, seconds, token, kinds):
    one = Attack(port, seconds, token)
    tasks = [
        asyncio.create_task(one.repeat(getattr(one, kind)), name=kind) for kind in kinds for _ in range(NUMBERS[kind])
    ]
    print("attacking", flush=True)
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(attack(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
