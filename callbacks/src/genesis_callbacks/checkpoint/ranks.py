"""The ranks of a run: the engine communicates over its own gloo group, never over the group of the training."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .._gloo import new_gloo_group
from ..base.checkpoint_errors import CheckpointError, SaveFailedError
from ..base.errors import describe_error

T = TypeVar("T")
S = TypeVar("S")
ErrorType = type[CheckpointError] | type[SaveFailedError]
_Failure = tuple[ErrorType | None, str]


class Ranks:
    """Communicates among the ranks of a run over its own gloo group.

    All ranks create the object together (`dist.new_group` is collective) and call its methods in the same order.
    Without a process group, the methods return immediately.

    Args:
        timeout_seconds: Maximum time that one exchange waits for the slowest rank.
    """

    def __init__(self, *, timeout_seconds: float = 1800.0) -> None:
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_distributed else 0
        self.world_size = dist.get_world_size() if is_distributed else 1
        self._group: Any = None
        if is_distributed:
            # Not nccl: its collectives need tensors on the device, and would queue there behind training's kernels.
            # A group of its own, because collectives of one group must come in the same order on all ranks.
            self._group = new_gloo_group(timeout=timedelta(seconds=timeout_seconds))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which plans, commits and cleans up."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value, in rank order, on every rank. Communicates."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_first(self, value: T) -> list[T] | None:
        """Returns every rank's value, in rank order, on rank 0, and None on the others. Communicates."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every rank. Communicates."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def start_maximum(self, values: list[int]) -> Callable[[], list[int]]:
        """Starts an element-wise maximum over ranks and returns a function that waits for the result and returns it.

        Communicates in the background.
        """
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._group is None:
            return tensor.tolist
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def finish() -> list[int]:
            assert work is not None
            work.wait()
            numbers: list[int] = tensor.tolist()
            return numbers

        return finish

    def attempt(self, act: str, function: Callable[[], T], *, error_type: ErrorType = SaveFailedError) -> T:
        """Returns the result of `function()` on this rank; if it raises on any rank, raises on all. Communicates once.

        Raises:
            CheckpointError, SaveFailedError: The function failed on a rank. The type is `error_type`, or the common
                type of all errors; the message has the operation, the ranks and their errors.
        """
        return self._attempt(act, function, error_type, keep_local=True)[self.rank]

    def attempt_and_gather(
        self, act: str, function: Callable[[], T], *, error_type: ErrorType = SaveFailedError
    ) -> list[T]:
        """Returns the results of `function()` on all ranks, in rank order; fails like `attempt`. Communicates once."""
        return self._attempt(act, function, error_type, keep_local=False)

    def attempt_and_divide(
        self,
        act: str,
        function: Callable[[], T],
        divide: Callable[[list[T]], Sequence[S]],
        *,
        error_type: ErrorType = SaveFailedError,
    ) -> S:
        """Returns this rank's item of `divide(results)`, which rank 0 calls with the results of `function()` of all.

        No other rank gets a result that is not its own: those of a thousand ranks take hundreds of megabytes. It fails
        like `attempt`, also if `divide` raises. Communicates twice.
        """
        value, failure, cause = _try(function)
        try:
            outcomes: list[Any] | None = self.gather_first((value, failure))
            if outcomes is not None:
                outcomes[self.rank] = (value, failure)
                failures = {rank: failed for rank, (_, failed) in enumerate(outcomes) if failed is not None}
                shares: Sequence[Any] = [None] * self.world_size
                if not failures:
                    divided, failed, divide_cause = _try(lambda: divide([answer for answer, _ in outcomes]))
                    shares, cause = divided or shares, cause or divide_cause
                    failures = {} if failed is None else {self.rank: failed}
                answers = [(share, failures) for share in shares]
            share, failures = self._scatter(answers if outcomes is not None else None)
        except RuntimeError as error:
            raise error_type(f"{act}: a rank did not answer: {error}") from error
        self._raise_failures(act, failures, error_type, cause)
        answer: S = share
        return answer

    def _scatter(self, values: Sequence[T] | None) -> T:
        """Returns this rank's item of rank 0's `values`. Communicates."""
        if self._group is None:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if values is None else list(values), src=0, group=self._group)
        answer: T = mine[0]
        return answer

    def _attempt(self, act: str, function: Callable[[], T], error_type: ErrorType, *, keep_local: bool) -> list[T]:
        value, failure, cause = _try(function)
        try:
            outcomes: list[Any] = self.gather((None if keep_local else value, failure))
        except RuntimeError as error:
            raise error_type(f"{act}: a rank did not answer: {error}") from error
        failures = {rank: failed for rank, (_, failed) in enumerate(outcomes) if failed is not None}
        self._raise_failures(act, failures, error_type, cause)
        answers: list[Any] = [value if rank == self.rank else answer for rank, (answer, _) in enumerate(outcomes)]
        return answers

    def _raise_failures(
        self, act: str, failures: Mapping[int, _Failure], error_type: ErrorType, cause: Exception | None
    ) -> None:
        if not failures:
            return
        texts = [
            text if self.world_size == 1 else f"rank {rank}: {text}" for rank, (_, text) in sorted(failures.items())
        ]
        kinds = {kind for kind, _ in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else None
        common = (kind or error_type)(f"{act}: " + "; ".join(texts))
        common.ends_all_ranks = True
        raise common from cause


def _try(function: Callable[[], T]) -> tuple[T | None, _Failure | None, Exception | None]:
    """Returns the result of `function()`, or what the other ranks must know of its error, and the error itself."""
    try:
        return function(), None, None
    except (CheckpointError, SaveFailedError) as error:
        return None, (type(error), str(error)), error
    except Exception as error:
        return None, (None, describe_error(error)), error


class WorldRanks:
    """The ranks of the current default process group, or this process alone without a process group.

    Every rank calls `join` at the same points of the program: it creates a group at the first call, and after the world
    has changed.
    """

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._world: Any = None

    def join(self) -> Ranks:
        """Returns the current ranks. Communicates if they have changed."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._ranks is None or self._world is not world:
            self._ranks, self._world = Ranks(), world
        return self._ranks
