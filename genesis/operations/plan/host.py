"""Memory of the host for a rank: offloaded state, staging of saves, the loader's windows."""

from dataclasses import dataclass

from genesis.operations.plan.layout import Layout, Workload
from genesis.operations.plan.sections import IDS_BYTES
from genesis.operations.plan.timeline import Timeline


@dataclass(frozen=True)
class HostBytes:
    """Bytes of the host's memory for one rank.

    Args:
        offload: Parameters, gradients, optimizer states and inputs of blocks that are not on the device.
        staging: The copy of a save that the writer reads; `checkpoint.staging: reserved` or the first save makes it.
        windows: Pinned buffers of the windows that the loader prepares.
    """

    offload: int
    staging: int
    windows: int

    @property
    def total(self) -> int:
        """All of the memory."""
        return self.offload + self.staging + self.windows


def count_host(
    workload: Workload,
    layout: Layout,
    timeline: Timeline,
    *,
    has_optimizer: bool,
    prefetch_windows: int,
) -> HostBytes:
    """Returns the bytes of the host's memory for one rank.

    Args:
        workload: What is trained.
        layout: How it is spread.
        timeline: The rank's step.
        has_optimizer: Whether saves have the optimizer's states.
        prefetch_windows: Windows that are prepared ahead of the step.
    """
    state = timeline.state
    saved = state.weights + (state.optimizer if has_optimizer else 0)
    if not layout.is_sharded and layout.strategy != "zero1":
        saved //= layout.num_ranks  # replicas share the work of a save
    window = workload.tokens_per_step // layout.data_ranks * IDS_BYTES
    return HostBytes(
        offload=timeline.on_host.total + state.moved + timeline.moved_inputs_bytes,
        staging=saved,
        windows=(prefetch_windows + 1) * window,
    )
