"""The recipe of a tiny mixture, trained by the command, continued, and used for text."""

import csv
from pathlib import Path

import pytest

from tests.commands import REPOSITORY, run_genesis


@pytest.mark.slow
def test_the_tiny_mixture_learns_with_balanced_experts_and_is_continued(tiny_corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (
        *("fit", "--config", REPOSITORY / "configs/mixture-tiny.yaml", "--data.corpus", tiny_corpus),
        *("--data.seq_len", "32", "--model.decoder.vocab_size", "320", "--run_dir", run),
        *("--schedule.total_updates", "60", "--checkpoint.every_n_steps", "20", "--trainer.val_check_interval", "20"),
    )
    done = run_genesis(*command, "--trainer.max_steps", "40", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    longer = ("--trainer.max_steps", "60", "--checkpoint.allow_changed", '["trainer.max_steps"]')
    done = run_genesis(*command, *longer, "--ckpt_path", "latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/loss")]
    losses = [float(row["train/loss"]) for row in rows]
    assert losses[-1] < losses[0] - 1.0
    assert 1.0 <= float(rows[-1]["train/expert_imbalance"]) < 3.0
    last = rows[-1]
    loads = [float(last[f"parts/blocks.3.feed_forward.load_tokens.{expert}"]) for expert in range(8)]
    assert sum(loads) == 2 * float(last["train/valid_tokens"])
    assert "parts/blocks.0.feed_forward.imbalance" not in last
    described = run_genesis("model", "describe", "--config", REPOSITORY / "configs/mixture-tiny.yaml", cwd=tmp_path)
    assert "active" in described.stdout
    text = run_genesis("generate", run, "--prompt", "the", "--max_new_tokens", "8", cwd=tmp_path)
    assert text.returncode == 0, text.stderr
