"""The predicted peak against the bytes that the fake GPU counts for a whole fit."""

from dataclasses import replace
from typing import Any, Final

import pytest

from genesis.model.decoder import DecoderConfig
from genesis.operations.plan.layout import Layout, Workload
from genesis.operations.plan.timeline import play_step
from tests.fakecuda.combinations import NUM_MICRO_BATCHES
from tests.fakecuda.test_memory import GOLDEN, read_numbers
from tests.golden.files import GOLDEN as DIRECTORY

TOLERANCE: Final = 0.1
# Of `tests.fakecuda.fits`, which only the fake device's process can import.
BATCH, SEQ_LEN = 2, 128
SHAPE: Final = DecoderConfig(
    dim=256, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=512, max_seq_len=SEQ_LEN, vocab_size=1024
)
SHARDED: Final = Layout("full", 2, 2)
LAYOUTS: Final[dict[str, Layout]] = {"replicated": Layout(), "sharded": SHARDED}


def read_cases() -> dict[str, tuple[int, Workload, Layout]]:
    """Returns the golden bytes of each case, and what is predicted for it."""
    cases = {}
    for name, num_bytes in read_numbers((DIRECTORY / GOLDEN).read_text(encoding="utf-8")).items():
        strategy, precision, *_ = name.split(", ")
        layout = LAYOUTS[strategy]
        changes: dict[str, Any] = {"activation_checkpointing": "block"} if "checkpointing" in name else {}
        workload = Workload(
            SHAPE,
            seq_len=SEQ_LEN,
            micro_batch_size=BATCH,
            global_batch_size=BATCH * NUM_MICRO_BATCHES * layout.num_ranks,
            precision=precision,
        )
        cases[name] = (num_bytes, workload, replace(layout, **changes))
    return cases


@pytest.mark.parametrize("name", read_cases())
def test_the_predicted_peak_is_near_that_of_the_fake_device(name: str) -> None:
    num_bytes, workload, layout = read_cases()[name]
    peaks = play_step(workload, layout).peaks  # the fit on the fake device has no save
    predicted = max(sum(terms.values()) for phase, terms in peaks.items() if phase != "save")
    assert predicted == pytest.approx(num_bytes, rel=TOLERANCE)
