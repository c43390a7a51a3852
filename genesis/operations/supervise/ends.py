"""The classes of ends of an attempt: signatures with their sources, remedy, policy and exit status, as one table.

`genesis.operations.supervise.classify` assigns a class to an end by this table; `decide` acts on the class.
[Ends of a run](reference/ends.md) is written from this table.
"""

from dataclasses import dataclass
from typing import Final, Literal

_OwnMistake = Literal["user_mistake", "recipe_drift"]
_Memory = Literal["out_of_memory_at_start", "out_of_memory_in_step", "out_of_memory_at_save", "host_out_of_memory"]
_Ranks = Literal["communication_timeout", "port_in_use", "lost_rank", "hang", "native_crash"]
_Storage = Literal["disk_full", "corrupt_data", "corrupt_checkpoint"]
_Other = Literal["preempted", "interrupted", "non_finite", "unknown"]
EndClass = Literal[_OwnMistake, _Memory, _Ranks, _Storage, _Other]

EXIT_COMPLETE: Final = 0
EXIT_REQUEUE: Final = 75
"""sysexits' EX_TEMPFAIL: the run is saved and has to be started again by whoever took its machine."""


@dataclass(frozen=True)
class Signature:
    """A text in the output or in the error of a rank that shows the class of its end.

    Args:
        pattern: A regular expression, searched without regard to case.
        source: Where the text comes from.
        example: The text as it appears there.
    """

    pattern: str
    source: str
    example: str


@dataclass(frozen=True)
class EndRule:
    """What is known about a class of ends.

    Args:
        meaning: What happened, for people.
        policy: What the supervisor does.
        remedy: What a person can do if the supervisor gives up.
        exit_status: Status of `genesis supervise` if it gives up because of this class.
        signatures: Texts that show it.
        statuses: Exit statuses of a rank that show it where no text does; negative for a signal.
        evidence: What else shows it, for people.
    """

    meaning: str
    policy: str
    remedy: str
    exit_status: int
    signatures: tuple[Signature, ...] = ()
    statuses: tuple[int, ...] = ()
    evidence: str = ""


_TORCH_CUDA = "torch 2.13, c10/cuda/CUDACachingAllocator.cpp"
_TORCH_NCCL = "torch 2.13, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_NCCL_UTILS = "torch 2.13, torch/csrc/distributed/c10d/NCCLUtils.hpp"
_GLOO = "gloo, gloo/transport/tcp/unbound_buffer.cc"
_OUT_OF_CUDA_MEMORY: Final = (
    Signature(
        r"(CUDA|HIP|XPU) out of memory\. Tried to allocate",
        _TORCH_CUDA,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.65 "
        "GiB of which 10.00 MiB is free. Process 4242 has 20.00 GiB memory in use.",
    ),
    Signature(
        r"CUDA error: out of memory",
        "torch 2.13, c10/cuda/CUDAException.cpp, with cudaErrorMemoryAllocation",
        "torch.AcceleratorError: CUDA error: out of memory",
    ),
)

# In the order in which `classify` searches: a specific text comes before one that may follow from it.
ENDS: Final[dict[EndClass, EndRule]] = {
    "recipe_drift": EndRule(
        meaning="the recipe is not that of the newest checkpoint",
        policy="stops and prints the difference; --on_drift allow continues, --on_drift fresh starts from scratch",
        remedy="give the recipe of the run, allow the change, or start another run",
        exit_status=2,
        signatures=(
            Signature(
                r"the checkpoint of step \d+ is of another run",
                "genesis_callbacks/checkpoint/drift.py",
                "genesis: error: the checkpoint of step 40 is of another run: model.optimizer.lr changed",
            ),
        ),
    ),
    "port_in_use": EndRule(
        meaning="another process listens on the port at which the ranks meet",
        policy="restarts on a free port",
        remedy="leave out --port, so that each attempt takes a free one",
        exit_status=80,
        signatures=(
            Signature(
                r"EADDRINUSE|address already in use",
                "torch 2.13, torch/csrc/distributed/c10d/socket.cpp",
                "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
                "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            ),
        ),
    ),
    "disk_full": EndRule(
        meaning="a disk or a quota is full",
        policy="waits until there is space again, up to --wait_seconds, and restarts",
        remedy="free disk space, or lower checkpoint.keep_last",
        exit_status=81,
        signatures=(
            Signature(
                r"No space left on device|Disk quota exceeded",
                "the C library: ENOSPC and EDQUOT",
                "genesis: error: runs/a/metrics.csv: No space left on device",
            ),
        ),
    ),
    "out_of_memory_at_start": EndRule(
        meaning="a device has no memory for the model, before the first step",
        policy="names the processes that hold the device's memory, ends those that this run started, and restarts with "
        "a growing delay",
        remedy="end the named process, or use smaller micro-batches or more sharding",
        exit_status=82,
        signatures=_OUT_OF_CUDA_MEMORY,
        evidence="no rank of the attempt had trained a step, or begun the first step after a restore",
    ),
    "out_of_memory_at_save": EndRule(
        meaning="a device has no memory for a save",
        policy="restarts from the newest checkpoint",
        remedy="set checkpoint.staging to blocking, or use smaller micro-batches",
        exit_status=83,
        signatures=_OUT_OF_CUDA_MEMORY,
        evidence="the error is that of a save",
    ),
    "out_of_memory_in_step": EndRule(
        meaning="a device has no memory for a step",
        policy="replays the step; if that fails again, in micro-batches of half the size, and then of a quarter; "
        "then skips the data of this step, as far as --may_skip_data allows",
        remedy="lower data.micro_batch_size; the global batch stays the same",
        exit_status=84,
        signatures=_OUT_OF_CUDA_MEMORY,
        evidence="a rank of the attempt had trained a step, or begun the first step after a restore",
    ),
    "host_out_of_memory": EndRule(
        meaning="the host has no memory",
        policy="restarts from the newest checkpoint",
        remedy="use fewer data workers, a smaller prefetch, or a host with more memory",
        exit_status=85,
        signatures=(
            Signature(
                r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|\bMemoryError\b|std::bad_alloc",
                "torch 2.13, c10/core/impl/alloc_cpu.cpp; the C library: ENOMEM; Python; libstdc++",
                "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 8000000000000 bytes. Error code 12 (Cannot allocate memory)",
            ),
        ),
        statuses=(137,),
        evidence="SIGKILL, and the kernel counted an end by its out-of-memory killer meanwhile (memory.events)",
    ),
    "corrupt_data": EndRule(
        meaning="a shard of the corpus is damaged, truncated or missing",
        policy="restarts once, in case that a read failed; then stops",
        remedy="restore the shard that the message names; `genesis data verify` checks all of them",
        exit_status=86,
        signatures=(
            Signature(
                r"the shard is damaged or has changed|bytes, but the manifest lists|has changed since it was adopted",
                "genesis/data/corpus.py, genesis/data/shards.py",
                "genesis: error: corpora/a/train/web/00000.ds has hash 12ab, the manifest lists 34cd: the shard is "
                "damaged or has changed; restore it",
            ),
        ),
    ),
    "corrupt_checkpoint": EndRule(
        meaning="a checkpoint does not verify",
        policy="the next start quarantines it and falls back to the one before",
        remedy="`genesis checkpoint verify RUN` names what is damaged; a copy of the checkpoint may be whole",
        exit_status=87,
        signatures=(
            Signature(
                r"CorruptCheckpointError|BadCheckpointError|does not verify|is damaged: ",
                "genesis_callbacks/checkpoint/verify.py",
                "genesis: error: the checkpoint step-00000040 does not verify: model.norm.weight has another digest",
            ),
        ),
    ),
    "non_finite": EndRule(
        meaning="too many windows in a row were skipped: gradients are not finite",
        policy="rolls back to the checkpoint before the newest that is older than these windows, and once more to the "
        "one before that; then stops. With --may_skip_data it skips the data of these windows at once",
        remedy="lower the learning rate, look at the data of these windows, or allow them to be skipped by "
        "--may_skip_data",
        exit_status=88,
        signatures=(
            Signature(
                r"TooManySkipsError|windows in a row were skipped",
                "genesis_callbacks/token_counters.py",
                "genesis: error: 100 windows in a row were skipped, the last one at step 140 for 'nonfinite_gradient'",
            ),
        ),
    ),
    "communication_timeout": EndRule(
        meaning="a collective did not end in time, or its communicator is stale",
        policy="ends all ranks, waits until their devices are free, and restarts",
        remedy="look at the network, and at the stacks in the crash's folder",
        exit_status=89,
        signatures=(
            Signature(
                r"Watchdog caught collective operation timeout",
                _TORCH_NCCL,
                "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1203, OpType=ALLREDUCE, "
                "NumelIn=8388608, NumelOut=8388608, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.",
            ),
            Signature(
                r"NCCL communicator was aborted|nccl(Remote|System|UnhandledCuda|Internal)Error",
                _NCCL_UTILS,
                "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
                "prematurely.",
            ),
            Signature(
                r"Timed out waiting \d+ms for (recv|send) operation to complete",
                _GLOO,
                "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
                "operation to complete",
            ),
        ),
    ),
    "native_crash": EndRule(
        meaning="native code crashed: a segmentation fault, a bus error, an abort",
        policy="restarts from the newest checkpoint",
        remedy="the stacks in the crash's folder name the library; test the machine's memory if they differ",
        exit_status=90,
        statuses=(-11, -7, -6, -4, -8, 139, 135, 134, 132, 136),
    ),
    "lost_rank": EndRule(
        meaning="a rank was killed, or ended without an error",
        policy="restarts from the newest checkpoint",
        remedy="look for what sends SIGKILL: an out-of-memory killer, an operator, a job's limit",
        exit_status=91,
        statuses=(-9,),
    ),
    "hang": EndRule(
        meaning="no rank made progress, or one has stopped",
        policy="ends all ranks and restarts from the newest checkpoint",
        remedy="read the stacks in the crash's folder, or in RUN/hangs; raise --hang_seconds if steps are that slow",
        exit_status=92,
        signatures=(
            Signature(
                r"error: \[rank \d+\] hang: ",
                "genesis_callbacks/hang_watch.py",
                "genesis-callbacks: error: [rank 0] hang: rank 1 is missing: it has written no report, so its process "
                "is stopped, gone, or stuck in native code (stacks of all ranks: runs/a/hangs/20260131T120000-42)",
            ),
        ),
        statuses=(92,),
        evidence="no heartbeat in training for --hang_seconds, in other phases for --phase_seconds, or a start "
        "without a first step for --start_seconds",
    ),
    "preempted": EndRule(
        meaning="the machine is about to be taken",
        policy="saves, and exits so that the queue starts the run again",
        remedy="start `genesis supervise` again with the same arguments",
        exit_status=EXIT_REQUEUE,
        evidence="SIGTERM or SIGUSR1 to the supervisor, or the file of --preempt_file",
    ),
    "interrupted": EndRule(
        meaning="a rank was stopped by a signal that did not come from the supervisor",
        policy="restarts from the checkpoint that the ranks have saved",
        remedy="send the signal to the supervisor to end the run",
        exit_status=93,
        statuses=(143, 130, -15, -2),
    ),
    "user_mistake": EndRule(
        meaning="a mistake in the recipe or the arguments",
        policy="stops: the same start would fail again",
        remedy="correct what the message names",
        exit_status=2,
        statuses=(2,),
    ),
    "unknown": EndRule(
        meaning="an end without a known signature",
        policy="restarts from the newest checkpoint",
        remedy="read the output in the crash's folder",
        exit_status=94,
    ),
}

CONSEQUENCE_STATUSES: Final = (70,)
"""Statuses of ranks that end because of another rank (`genesis.strategies.start`, `genesis_callbacks._rank_watch`)."""
CONSEQUENCES: Final = (
    Signature(
        r"Connection closed by peer|Connection reset by peer|Broken pipe",
        "gloo, gloo/transport/tcp/pair.cc",
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
    ),
    Signature(
        r"(is|are) gone(, and the other ranks cannot continue|; this rank ends as well|: no rank can continue)",
        "genesis/cli/fit.py, genesis_callbacks/_rank_watch.py",
        "genesis: error: rank 1 (process 42) is gone, and the other ranks cannot continue",
    ),
)
"""Texts of ranks that end because of another rank: never a first cause."""
