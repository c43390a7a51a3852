"""Large requests: the turns of their clients, limits of their number and memory, and the process that reads them."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from genesis.serve.errors import ApiError
from genesis.serve.preparer import SMALL_BYTES, Preparer, TurnLine
from genesis.serve.prompt import Facts
from genesis.tokenizer.limits import LINEAR
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import write_tokenizer
from tests.serve.support import DEADLINE_SECONDS


def test_clients_take_turns_however_many_requests_each_has():
    async def scenario():
        line, order = TurnLine(100), []

        async def hold(client):
            await line.enter(client)
            order.append(client)
            await asyncio.sleep(0)
            line.leave()

        tasks = [asyncio.create_task(hold(client)) for client in "aaaaaabbc"]
        await asyncio.sleep(0)
        tasks[2].cancel()  # one that waits
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not line.is_taken
        return "".join(order)

    assert asyncio.run(scenario()) == "aabcabaa"  # the second came before all others


def test_one_client_may_have_half_of_those_that_wait():
    async def scenario():
        line = TurnLine(4)
        await line.enter("a")
        waiting = [asyncio.create_task(line.enter("a")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="retry") as error:
            await line.enter("a")
        assert error.value.status == 429
        waiting.append(asyncio.create_task(line.enter("b")))
        await asyncio.sleep(0)
        line.leave()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())


def test_large_bodies_together_have_a_limit_and_small_ones_have_none():
    preparer = Preparer(16)
    with preparer.holding() as hold, preparer.holding() as other:
        hold(2**26)
        other(SMALL_BYTES)
        with pytest.raises(ApiError, match="retry") as error:
            other(1)
        assert error.value.status == 429
    with preparer.holding() as hold:
        hold(2**26)


@pytest.mark.slow
def test_a_large_request_waits_for_no_thread_of_the_server_and_needs_no_process_that_lives(monkeypatch):
    monkeypatch.setattr("genesis.serve.preparer._IDLE_SECONDS", 0.0)

    async def scenario():
        preparer, release = Preparer(16), threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        blocked = loop.run_in_executor(None, release.wait)
        body = json.dumps({"model": "latest", "prompt": "a" * 2 * SMALL_BYTES}).encode()
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                workers = preparer._find_lane(len(body)).workers
                for _ in range(2):
                    assert (await preparer.read(body, is_chat=False, client="a")).model == "latest"
                    while workers._free:  # one without work ends
                        await asyncio.sleep(0.01)
        finally:
            release.set()
            await blocked
            preparer.close()

    asyncio.run(scenario())


def test_an_expression_without_end_costs_its_request_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("genesis.serve.preparer._SMALL_SECONDS", 0.05)
    slow, sound = (tmp_path / name for name in ("slow", "sound"))
    for directory in (slow, sound):
        directory.mkdir()
        write_tokenizer(directory)
    content = json.loads((slow / "tokenizer.json").read_text())
    expression = {"type": "Split", "pattern": {"Regex": "\\s*x|\\s"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [expression, content["pre_tokenizer"]]}
    (slow / "tokenizer.json").write_text(json.dumps(content))

    async def scenario():
        preparer = Preparer(16)

        async def encode(directory, prompt):
            body = json.dumps({"model": "latest", "prompt": prompt}).encode()
            asked = await preparer.read(body, is_chat=False, client="a")
            facts = Facts(open_tokenizer(directory), 100_000, 100_000, 0, 0)
            return await preparer.encode(asked, body, facts, client="a")

        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                before = await encode(sound, "a  b")
                with pytest.raises(ApiError, match=r"takes more than 0.05 s of processor time: shorten it"):
                    await encode(slow, " " * 8000)
                assert await encode(sound, "a  b") == before
        finally:
            preparer.close()

    asyncio.run(scenario())


def test_a_small_prompt_is_encoded_within_the_server_if_all_expressions_are_known(tmp_path, monkeypatch):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LINEAR[1]}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    path.write_text(json.dumps(content))
    monkeypatch.setattr("genesis.serve.preparer._Lane.run", lambda *_: pytest.fail("a process encodes it"))

    async def scenario():
        preparer, tokenizer = Preparer(16), open_tokenizer(tmp_path)
        body = json.dumps({"model": "latest", "prompt": "a  b 123"}).encode()
        asked = await preparer.read(body, is_chat=False, client="a")
        (prompt,) = await preparer.encode(asked, body, Facts(tokenizer, 100, 100, 0, 0), client="a")
        preparer.close()
        assert prompt.ids[-len(tokenizer.encode("a  b 123")) :] == tuple(tokenizer.encode("a  b 123"))

    asyncio.run(scenario())


def test_a_client_that_goes_in_the_moment_of_its_turn_does_not_stop_the_line():
    async def take_turns():
        line = TurnLine(100)
        await line.enter("first")
        gone, next_one = (asyncio.create_task(line.enter(client)) for client in ("gone", "next"))
        await asyncio.sleep(0)  # both wait
        gone.cancel()
        line.leave()  # before the client that is gone has left the line
        await asyncio.wait_for(next_one, DEADLINE_SECONDS)
        line.leave()
        assert gone.cancelled()
        assert not line.is_taken

    asyncio.run(take_turns())
