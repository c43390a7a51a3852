"""Directories of runs as `genesis fit` leaves them, written without training."""

from pathlib import Path

from genesis_callbacks.base.events import Event, EventKind, encode_event
from genesis_callbacks.base.run_directory import RunDirectory

KEYS = (
    *("step", "counters/tokens_seen", "counters/tokens_updated", "counters/skips", "optim/lr"),
    *("train/loss", "train/grad_norm", "gradient/spikes", "train/tokens_per_second", "train/mfu", "memory/peak_bytes"),
    *("time/step_ms", "time/data_wait_ms", "time/forward_ms", "time/backward_ms", "time/other_ms"),
    *("data/tokens_books", "data/epochs_books", "validation/loss"),
)
RECIPE = """
trainer: {max_steps: 30, accelerator: cpu, devices: 1}
model:
  decoder: {vocab_size: 320, dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 48, max_seq_len: 16}
data: {seq_len: 16, micro_batch_size: 2, global_batch_size: 4}
"""
BEGIN_SECONDS = 1_700_000_000.0


def row_of(step: int, **changed: str) -> str:
    skips = max(0, step - 20)
    values = [step, 64 * step, 64 * (step - skips), skips, 1e-3, 2 + 6 * 0.9**step, 1 + step % 3, step // 10]
    values += [5000 + step, 0.3, 1e9 + step, 100, 30, 20, 40, 10, 64 * step, step / 50]
    cells = [*map(str, values), str(2 + 6 * 0.9**step) if step % 10 == 0 else ""]
    return ",".join(changed.get(key, cell) for key, cell in zip(KEYS, cells, strict=True))


def write_log(run: Path, rows: list[str], end: str = "\n") -> Path:
    run.mkdir(parents=True, exist_ok=True)
    path = run / "metrics.csv"
    path.write_text("\n".join([",".join(KEYS), *rows]) + end)
    return path


def write_events(run: Path) -> None:
    def event(kind: EventKind, seconds: float, **more: object) -> bytes:
        return encode_event(Event(kind, BEGIN_SECONDS + seconds, seconds, 0, **more))  # type: ignore[arg-type]

    file = RunDirectory(run).event_file(0)
    file.parent.mkdir(parents=True)
    file.write_bytes(
        event("started", 0)
        + event("saved", 50, step=10, checkpoint="step-00000010")
        + event("verified", 51, step=10, checkpoint="step-00000010")
        + event("quarantined", 60, step=10, checkpoint="quarantined-step-00000010")
        + event("started", 100)
        + event("restored", 101, step=10, checkpoint="step-00000010")
        + event("ended", 200, step=30, text="finished")
    )


def write_run(run: Path, num_steps: int = 30) -> Path:
    write_log(run, [row_of(step) for step in range(1, num_steps + 1)])
    write_events(run)
    (run / "config.yaml").write_text(RECIPE)
    return run
