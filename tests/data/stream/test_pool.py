"""Workers: the same blocks as without them, through kills, and no process left behind."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.data.stream.block import Cursor
from genesis.data.stream.pool import InlineSupply, WorkerPool
from genesis.data.stream.worker import Job, Setup
from tests.data.stream.streams import make_stream, make_texts, write_files

DEADLINE_SECONDS = 60
POLL_SECONDS = 0.02


@pytest.fixture
def stream(tmp_path, tokenizer):
    return make_stream({"web": write_files(tmp_path / "web", make_texts(60, 1), ".jsonl.gz")}, tokenizer, num_lanes=4)


def make_setup(stream, keys):
    return Setup(stream.tokenizer.files, stream.recipe, {key: stream.parts[key] for key in keys})


def make_pool(stream, num_workers, max_restarts=3):
    keys = list(stream.parts)
    return WorkerPool([make_setup(stream, keys[number::num_workers]) for number in range(num_workers)], max_restarts)


def read_blocks(supply, stream, count, before=lambda number: None):
    """Returns the rows of `count` blocks of every lane, in turns, one asked for ahead."""
    cursors = dict.fromkeys(stream.parts, Cursor())
    for key, cursor in cursors.items():
        supply.request(Job(key, cursor))
    rows = []
    for number in range(count):
        before(number)
        for key, cursor in cursors.items():
            block = supply.take(Job(key, cursor))
            rows.append((key, block.rows.tolist(), block.lengths.tolist(), block.next))
            supply.request(Job(key, block.next))
            cursors[key] = block.next
    return rows


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(POLL_SECONDS)


def is_alive(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_killed_again_and_again_lose_and_double_nothing(stream, caplog):
    expected = read_blocks(InlineSupply(make_setup(stream, stream.parts)), stream, 12)
    pool = make_pool(stream, 2, max_restarts=6)

    def kill(number):
        if number in (0, 1, 4, 7):
            os.kill(pool.process_ids[number % 2], signal.SIGKILL)

    with caplog.at_level(logging.WARNING):
        assert read_blocks(pool, stream, 12, kill) == expected
    assert pool.num_restarts == 4
    assert caplog.text.count("ended by signal 9 (out of memory?); a new worker takes over its jobs") == 4
    pool.close()


def test_too_many_dead_workers_end_the_run_with_a_named_error(stream):
    pool = make_pool(stream, 1, max_restarts=1)
    with pytest.raises(UserError, match=r"ended by signal 9 .*after 1 other .*max_worker_restarts"):
        read_blocks(pool, stream, 100, lambda number: os.kill(pool.process_ids[0], signal.SIGKILL))
    pool.close()


def test_closing_ends_all_processes_even_in_mid_work(stream):
    pool = make_pool(stream, 2)
    read_blocks(pool, stream, 1)
    processes = pool.process_ids
    assert all(map(is_alive, processes))
    pool.close()
    assert not any(map(is_alive, processes))


def test_what_was_forgotten_can_be_asked_for_again(stream):
    pool = make_pool(stream, 1)
    expected = read_blocks(pool, stream, 2)
    pool.forget()
    assert read_blocks(pool, stream, 2) == expected
    wait_until(lambda: pool.queue_depths == (0,))
    pool.close()


_OPTIMIZED = """
import sys
from pathlib import Path
from tests.data.stream.streams import make_stream
from tests.data.stream.test_pool import make_pool, read_blocks

assert False, "python -O leaves this out"
stream = make_stream({"web": Path(sys.argv[1])}, Path(sys.argv[2]), num_lanes=4)
pool = make_pool(stream, 2)
print(len(read_blocks(pool, stream, 6)))
pool.close()
"""


@pytest.mark.repeat  # `tests/test_asserts.py`
@pytest.mark.slow
def test_blocks_come_from_workers_under_python_that_leaves_asserts_out(stream, tmp_path, tokenizer):
    outcome = subprocess.run(
        [sys.executable, "-O", "-c", _OPTIMIZED, str(tmp_path / "web"), str(tokenizer)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=240,
    )
    assert outcome.stdout == f"{6 * 4}\n", outcome.stderr


_RANK = """
import sys, time
from pathlib import Path
from tests.data.stream.streams import make_stream
from tests.data.stream.test_pool import make_pool, read_blocks

stream = make_stream({"web": Path(sys.argv[1])}, Path(sys.argv[2]), num_lanes=4)
pool = make_pool(stream, 2)
read_blocks(pool, stream, 1)
print(*pool.process_ids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_of_a_killed_rank_end_too(stream, tmp_path, tokenizer):
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(tmp_path / "web"), str(tokenizer)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert rank.stdout is not None
    with rank.stdout:
        processes = [int(word) for word in rank.stdout.readline().split()]
        assert len(processes) == 2
        rank.kill()
        rank.wait()
    wait_until(lambda: not any(map(is_alive, processes)))


def test_a_worker_imports_neither_torch_nor_lightning():
    program = "import sys, genesis.data.stream.worker; print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert outcome.stdout.strip() == "[]"
