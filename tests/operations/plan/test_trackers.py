"""The bill against torch's own tracker of memory, on fake tensors: models of real size, of which nothing exists."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from genesis.model.decoder import Decoder
from genesis.model.loss import sum_cross_entropy
from genesis.model.recipe import read_decoder_config
from genesis.model.recomputation import ActivationCheckpointing
from genesis.operations.plan.layout import Layout, Workload
from genesis.operations.plan.timeline import play_step
from genesis.optim import OptimizerOptions, build_optimizer
from genesis.strategies.wrap import apply_wrappers

TOLERANCE: Final = 0.1
MODELS: Final = Path(__file__).parents[3] / "configs" / "model"


def track(workload: Workload, checkpointing: ActivationCheckpointing) -> int:
    """Returns the most bytes of two steps of one micro-batch each."""
    with FakeTensorMode():
        decoder = Decoder(workload.decoder)
        apply_wrappers(decoder, checkpointing)
        optimizer = build_optimizer(decoder, OptimizerOptions())
        ids = torch.zeros((workload.micro_batch_size, workload.seq_len), dtype=torch.int64)
        tracker: Any = MemTracker()
        tracker.track_external(decoder, optimizer)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                optimizer.zero_grad()
                decoder(ids, head=lambda hidden, weight: sum_cross_entropy(hidden, weight, ids)).backward()
                optimizer.step()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        return int(peak["Total"])


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("genesis-10m", "none"),
        ("genesis-10m", "block"),
        ("genesis-1b", "none"),
    ],
)
@pytest.mark.slow
def test_the_bill_is_that_of_torchs_tracker(name: str, checkpointing: ActivationCheckpointing) -> None:
    decoder = read_decoder_config(MODELS / f"{name}.yaml")
    workload = Workload(decoder, seq_len=decoder.max_seq_len, precision="32-true", is_cpu=True, has_documents=False)
    predicted = play_step(workload, Layout(activation_checkpointing=checkpointing)).peak_bytes
    assert predicted == pytest.approx(track(workload, checkpointing), rel=TOLERANCE)
