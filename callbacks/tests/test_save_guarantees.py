"""One contract of saves for all modes: the same is refused, in the same words, and the last good one stays."""

import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from file_faults import OperationFault
from plain_project import train

from genesis_callbacks import _fit_saves
from genesis_callbacks.base.local_shards import LocalShard, local_shards
from genesis_callbacks.checkpoint import Ranks, SaveFailedError, SaveTarget, Snapshot, find_latest, read_tensors, verify
from genesis_callbacks.checkpoint import stage as stager_module
from genesis_callbacks.checkpoint.job import Outcome
from genesis_callbacks.checkpoint.one_save import Progress
from genesis_callbacks.checkpoint.pipeline import SavePipeline
from genesis_callbacks.checkpoint.writer_process import WriterProcess
from genesis_callbacks.testing import run_ranks

MODES = ("sync", "thread", "process")
GOOD = "step-00000001"
pytestmark = pytest.mark.process
NUM_ELEMENTS = 3000
Told = dict[str, tuple[str, str]]


def build_pipeline(directory: Path, mode: str, limit_seconds: float = 60.0) -> SavePipeline:
    target = SaveTarget(directory, Ranks())
    writer = WriterProcess() if mode == "process" else None
    return SavePipeline(target, mode=mode, writer=writer, staging="blocking", time_limit_seconds=limit_seconds)


class Run:
    """A run of a few tensors on every rank, replicated, and its saves."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.directory = directory
        self.pipeline = build_pipeline(directory, mode)
        self.ranks = Ranks()
        self.is_last_rank = self.ranks.rank == self.ranks.world_size - 1
        self.live = {
            "model.a": torch.zeros(NUM_ELEMENTS),
            "model.b": torch.zeros(NUM_ELEMENTS),
            "optimizer.0.a.exp_avg": torch.zeros(5),
            "optimizer.0.a.step": torch.tensor(0.0),
        }
        self.told: Told = {}

    def train(self, *names: str) -> None:
        for name in names or self.live:
            self.live[name] += 1

    def parts(self) -> list[LocalShard]:
        kinds = {name: "optimizer" if name.startswith("optimizer") else "parameter" for name in self.live}
        return [part for name, tensor in self.live.items() for part in local_shards(name, tensor, kinds[name])]

    def save(
        self, name: str, step: int = 2, *, take: Callable[[], Snapshot] | None = None, progress: Progress | None = None
    ) -> None:
        """Saves, and notes what this rank is told; then all of the directory is as it was, or is the new one."""
        take = take or (lambda: Snapshot(step, {}, self.parts(), {}))
        moved = Progress(lambda: 0, num_updates=3, moved=lambda: frozenset({"model.a"}))
        try:
            self.pipeline.begin(step, take, progress or moved)
            outcome = self.pipeline.finish()
        except SaveFailedError as error:  # it could not begin
            outcome = Outcome("failed", str(error))
        self.told[name] = (outcome.kind, outcome.text)
        self.ranks.gather(None)
        left = {path.name for path in self.directory.iterdir()} - {".trash"}
        assert left == ({GOOD} if outcome.kind == "failed" else {GOOD, f"step-{step:08d}"}), (name, left)
        self.ranks.gather(None)


@contextlib.contextmanager
def changed_while_copied(tensor: torch.Tensor) -> Iterator[None]:
    """Somebody else writes into a tensor between what a save does first with it, digest or copy, and the other."""
    originals = {name: getattr(stager_module, name) for name in ("digest_chunk", "copy_into")}
    is_done = []

    def write_after(function):
        def wrapped(*arguments):
            result = function(*arguments)
            if not is_done and any(
                one is not None and one.data_ptr() == tensor.data_ptr()
                for one in arguments[:2]
                if isinstance(one, torch.Tensor)
            ):
                is_done.append(True)
                tensor.numpy()[7] += 1  # past torch, which does not count it
            return result

        return wrapped

    for name, original in originals.items():
        setattr(stager_module, name, write_after(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(stager_module, name, original)


@contextlib.contextmanager
def small_files(pipeline: SavePipeline) -> Iterator[None]:
    """Whoever writes for this rank can write no file of more than 2,000 bytes, as on a disk that is full."""
    process_id = os.getpid() if pipeline._writer is None else pipeline._writer._process.pid
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(process_id, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def refuse_all(directory: Path, mode: str) -> Told:
    """Returns what this rank is told of a good save, of one for each kind of fault, and of a good one after them."""
    run = Run(directory, mode)
    run.save("good", 1)
    run.save("stale")
    run.train("model.b")
    run.save("stale parameter")
    run.train()
    state = {name: run.live.pop(name) for name in list(run.live) if name.startswith("optimizer")}
    run.save("emptied optimizer")
    run.live.update(state)
    steps = itertools.count()
    run.save("step while staging", progress=Progress(lambda: next(steps) if run.is_last_rank else 0))
    with changed_while_copied(run.live["model.a" if run.ranks.world_size == 1 else "model.b"]):
        run.save("torn copy")
    with small_files(run.pipeline) if run.is_last_rank else contextlib.nullcontext():
        run.save("full disk")
    run.save("written over", 1)
    run.save("no snapshot", take=lambda: fail() if run.is_last_rank else Snapshot(2, {}, run.parts(), {}))
    with OperationFault(1, "EIO") if run.ranks.is_first else contextlib.nullcontext():
        run.save("no directory")
    if run.is_last_rank:
        run.live["model.b"] += 1
    run.save("drifted replica") if run.ranks.world_size > 1 else None
    if not run.is_last_rank:
        run.live["model.b"] += 1
    run.train()
    run.save("good again", 3)
    run.pipeline.close(0.0)
    if run.ranks.is_first:
        assert verify(find_latest(directory), "deep").step == 3
        tensors = read_tensors(find_latest(directory))
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in run.live.items())
    return run.told


def fail() -> Snapshot:
    raise OSError("no snapshot here")


SLOW = ((1, "process"), (2, "sync"), (2, "thread"))  # the others go the same ways


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (mode, world_size), id=f"{mode}-{world_size}", marks=[pytest.mark.slow] * ((world_size, mode) in SLOW)
        )
        for mode in MODES
        for world_size in (1, 2)
    ],
)
def told(request, tmp_path_factory) -> tuple[int, list[Told]]:
    """The number of ranks, and what each was told."""
    mode, world_size = request.param
    directory = tmp_path_factory.mktemp("saves")
    return world_size, run_ranks(refuse_all, world_size, directory, mode)


REFUSED = {
    "stale": f"a stale snapshot: no parameter and no optimizer state has changed since {GOOD}, although 3 updates "
    "happened",
    "stale parameter": f"a stale snapshot: model.a and its optimizer state have not changed since {GOOD}, although the "
    "last update moved them",
    "emptied optimizer": f"optimizer 0 has been emptied: {GOOD} has its state, but this save would have none",
    "step while staging": "training changed tensors during staging: an optimizer step came too early",
    "torn copy": "staged and live digests differ: it changed while being copied",
    "full disk": "OSError: [Errno 27] File too large",
    "written over": f"{GOOD} exists already, and a checkpoint is never overwritten",
    "no snapshot": "OSError: no snapshot here",
    "no directory": "OSError: [Errno 5] Input/output error",
    "drifted replica": "model.b: rank 1 holds other values than rank 0: the replicas have drifted apart",
}


def test_good_saves_are_committed_before_and_after_refused_ones(told):
    for by_name in told[1]:
        assert by_name["good"] == by_name["good again"] == ("committed", "")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_checkpoint_is_refused_on_every_rank_in_the_same_words(told, name):
    world_size, by_rank = told
    if name == "drifted replica" and world_size == 1:
        assert name not in by_rank[0]
        return
    kinds = {by_name[name] for by_name in by_rank}
    assert len(kinds) == 1
    kind, text = kinds.pop()
    assert kind == "failed"
    assert REFUSED[name] in text


# ---- a rank that is gone


def lose_a_rank(directory: Path, mode: str) -> None:
    """Rank 1 is killed in the middle of a save; rank 0 writes down what it is told."""
    ranks = Ranks()
    live = torch.zeros(NUM_ELEMENTS)
    for step in (1, 2):
        # The first is a save like any other; the second has to give up.
        pipeline = build_pipeline(directory, mode, limit_seconds=60.0 if step == 1 else 5.0)
        live += 1
        parts = local_shards("model.a", live, "parameter") + local_shards("model.b", live, "parameter")
        is_struck = step == 2 and not ranks.is_first
        with OperationFault(2, "kill") if is_struck and mode != "process" else contextlib.nullcontext():
            try:
                pipeline.begin(step, lambda step=step, parts=parts: Snapshot(step, {}, parts, {}), Progress(lambda: 0))
                if is_struck:
                    os.kill(os.getpid(), signal.SIGKILL) if mode == "process" else signal.pause()
                outcome = pipeline.finish()
                assert outcome.kind == "committed"
            except SaveFailedError as error:
                (directory / "told").write_text(str(error))
        pipeline.close(0.0)


@pytest.mark.parametrize(
    "mode", ["process", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync", "thread"))]
)
def test_a_rank_that_is_killed_in_a_save_leaves_a_good_checkpoint_and_the_others_are_told(tmp_path, mode):
    with pytest.raises(AssertionError, match="rank 1: died without a word"):
        run_ranks(lose_a_rank, 2, tmp_path, mode)
    assert "a rank did not answer" in (tmp_path / "told").read_text()
    step = verify(find_latest(tmp_path), "deep").step
    assert step == 1 or mode == "process"  # the writers, which outlive it, may go on to the end
    assert all(bool((tensor == step).all()) for tensor in read_tensors(find_latest(tmp_path)).values())


# ---- through the callback


def train_with_stale_snapshots(arguments: tuple, keywords: dict) -> dict[str, object]:
    """Trains with snapshots that hold, from the second on, what the first held."""
    original, kept = _fit_saves.take_snapshot, []

    def take(*arguments, **keywords):
        snapshot = original(*arguments, **keywords)
        kept.append([LocalShard(local.part, local.data.clone()) for local in snapshot.parts])
        return Snapshot(snapshot.step, snapshot.counters, kept[0], snapshot.section)

    _fit_saves.take_snapshot = take
    return train(*arguments, **keywords)


@pytest.mark.parametrize(
    "mode", ["process", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync", "thread"))]
)
def test_the_callback_refuses_stale_snapshots(tmp_path, mode):
    keywords = {"mode": mode, "every_n_steps": 2, "save_at_end": False}
    with pytest.raises(AssertionError, match=r"SaveFailedError: a stale snapshot: .* since step-00000002, although 2"):
        run_ranks(train_with_stale_snapshots, 1, (tmp_path, "single", 8), keywords)
    assert find_latest(tmp_path).name == "step-00000002"
