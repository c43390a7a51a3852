"""The recipe of a tiny mixture, trained by the command, continued, and used for text."""

import csv
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from genesis.tokenizer.open import open_tokenizer
from tests.commands import REPOSITORY, run_genesis
from tests.data.corpora import BOS, EOS, write_corpus
from tests.evaluate.support import write_generation
from tests.serve.support import start

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def text_corpus(tiny_corpus: Path, tmp_path: Path) -> Path:
    """Returns a corpus of text, whose documents are longer than an answer, so that a model answers."""
    tokenizer = tiny_corpus / "tokenizer.model"
    lines = [f"line {n}: the quick brown fox jumps over {n * n} lazy dogs\n" * 3 for n in range(200)]
    documents = [[BOS, *open_tokenizer(tokenizer).encode(text), EOS] for text in lines]
    splits = {"train": {"web": documents[:190]}, "validation": {"web": documents[190:]}}
    return write_corpus(tmp_path / "corpus", **splits, tokenizer=tokenizer.read_bytes())


@pytest.mark.slow
def test_the_tiny_mixture_learns_with_balanced_experts_is_continued_and_chats(
    text_corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = (
        *("fit", "--config", REPOSITORY / "configs/mixture-tiny.yaml", "--data.corpus", text_corpus),
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
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    greedy = ("--temperature", "0", "--max_new_tokens", "8")
    turns = ("--chat", "--chat_template", template, "--prompt", "line 7", "--prompt", "and the brown?")
    chat = run_genesis("generate", run, *turns, *greedy, cwd=tmp_path)
    assert chat.returncode == 0, chat.stderr
    with start(run, "--chat_template", template) as server:
        answers = [_stream(server.url, "line 7")]
        answers.append(_stream(server.url, "line 7", answers[0], "and the brown?"))
    assert chat.stdout == f"> line 7\n{answers[0]}\n> and the brown?\n{answers[1]}\n"
    assert all(answers)
    task = write_generation(tmp_path / "task", until=["\n\n"], max_gen_toks=8)
    asked = ("--tasks", task, "--apply_chat_template", template)
    scored = run_genesis("evaluate", run, *asked, cwd=tmp_path)
    assert scored.returncode == 0, scored.stderr
    assert "exact_match" in scored.stdout


def _stream(url: str, *turns: str) -> str:
    """Returns the answer to a conversation, put together from the server's events."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
    asked: dict[str, Any] = {"model": "latest", "messages": messages, "temperature": 0, "max_tokens": 8, "stream": True}
    content, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", content, kind)
    with urllib.request.urlopen(request) as answer:
        events = [line[len(b"data: ") :].strip() for line in answer if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
