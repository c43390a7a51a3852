"""Fine-tuning on conversations, from records to checkpoints: the loss, and a run that is killed and goes on."""

import csv
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from genesis.model.decoder import Decoder, DecoderConfig
from tests.chat.support import write_tokenizer
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import start_genesis

DEADLINE_SECONDS, POLL_SECONDS = 120, 0.05
SEQ_LEN = 96
WORDS = ("one", "two", "\u00e9t\u00e9", "tell me", "why?\n", "12", "assistant")


def make_chats(num_chats: int, seed: int) -> list[list[dict[str, Any]]]:
    draw = random.Random(seed)

    def say() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randrange(1, 5)))

    return [
        [
            {"role": role, "content": f"{number} {say()}"}
            for _ in range(draw.randrange(1, 3))
            for role in ("user", "assistant")
        ]
        for number in range(num_chats)
    ]


def prepare(genesis: Genesis, directory: Path, chats: list[list[dict[str, Any]]], packing: str, text: int = 0) -> Path:
    write_tokenizer(directory / "tokenizer")
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (directory / "chat.jsonl").write_text("\n".join(lines))
    (directory / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{n} plain text " * 9}) for n in range(text)))
    sources = [{"name": "chat", "paths": [str(directory / "chat.jsonl")], "chat": "auto"}]
    if text:
        sources.append({"name": "text", "paths": [str(directory / "text.jsonl")]})
    recipe = {
        "name": "corpus",
        "out": str(directory),
        "tokenizer": str(directory / "tokenizer"),
        "num_workers": 1,
        "validation_fraction": 0.1 if text else 0.0,
        "packing": packing,
        "seq_len": SEQ_LEN,
        "chat": {"max_tokens": SEQ_LEN, "on_long": "drop"},
        "sources": sources,
    }
    (directory / "corpus.yaml").write_text(json.dumps(recipe))
    prepared = genesis("data", "prepare", "--config", str(directory / "corpus.yaml"))
    assert prepared.status == 0, prepared.err
    return directory / "corpus"


def build_chat_recipe(corpus: Path, run_dir: Path, packing: str, batch: int) -> dict[str, Any]:
    recipe = build_recipe(corpus, run_dir)
    recipe["model"]["decoder"] |= {"vocab_size": 500, "max_seq_len": SEQ_LEN}
    recipe["data"] |= {"seq_len": SEQ_LEN, "packing": packing, "global_batch_size": batch, "num_epochs": 1}
    del recipe["trainer"]["max_steps"], recipe["schedule"]["total_updates"]
    return recipe


def read_losses(run_dir: Path) -> list[tuple[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return [(row["step"], row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def reference_loss(tokenizer: Path, chats: list[list[dict[str, Any]]], decoder: DecoderConfig) -> float:
    """The mean over all answers' tokens, one conversation at a time, with the ids of transformers."""
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    model = Decoder(decoder)
    model.init_weights(0)
    total, count = 0.0, 0
    for chat in chats:
        ids = theirs.apply_chat_template(chat, return_dict=False)
        logits = model(torch.tensor([ids]))[0].double()
        for turn, message in enumerate(chat):
            if message["role"] == "assistant":
                start = len(theirs.apply_chat_template(chat[:turn], add_generation_prompt=True, return_dict=False))
                end = len(theirs.apply_chat_template(chat[: turn + 1], return_dict=False)) - 1  # without the newline
                wanted = torch.tensor(ids[start:end])
                total += float(cross_entropy(logits[start - 1 : end - 1], wanted, reduction="sum"))
                count += end - start
    return total / count


@pytest.mark.parametrize("packing", ["best_fit", pytest.param("pad", marks=pytest.mark.slow)])
def test_the_loss_is_the_mean_over_the_tokens_of_all_answers(genesis: Genesis, tmp_path: Path, packing: str) -> None:
    chats = make_chats(16, seed=1)
    corpus = prepare(genesis, tmp_path, chats, packing)
    plan = json.loads((corpus / f"packing/{packing}-{SEQ_LEN}/plan.json").read_text())
    num_sequences = plan["sources"]["chat"]["figures"]["num_sequences"]
    assert plan["sources"]["chat"]["figures"]["num_documents"] == len(chats)
    assert plan["sources"]["chat"]["figures"]["num_documents_cut"] == 0
    recipe = build_chat_recipe(corpus, tmp_path / "run", packing, num_sequences)
    recipe["data"]["micro_batch_size"] = 1
    run = genesis("fit", "--config", str(write_recipe(tmp_path / "fit.yaml", recipe)))
    assert run.status == 0, run.err
    ((step, loss),) = read_losses(tmp_path / "run")
    with torch.no_grad():
        wanted = reference_loss(tmp_path / "tokenizer", chats, DecoderConfig(**recipe["model"]["decoder"]))
    assert step == "1"
    assert float(loss) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.repeat  # `test_data.py` resumes a packed run at each save
def test_a_run_on_chat_and_text_that_is_killed_and_resumed_equals_one_that_was_not(
    genesis: Genesis, tmp_path: Path
) -> None:
    corpus = prepare(genesis, tmp_path, make_chats(300, seed=2), "best_fit", text=120)
    recipes = {}
    for name in ("straight", "killed"):
        recipe = build_chat_recipe(corpus, tmp_path / name, "best_fit", 8)
        recipe["data"] |= {"mix": {"chat": 3, "text": 1}, "max_epochs": {"text": 1}, "num_epochs": 2}
        recipe["checkpoint"] |= {"every_n_steps": 3, "keep_last": 2}
        recipe["trainer"]["val_check_interval"] = 10
        recipes[name] = str(write_recipe(tmp_path / f"{name}.yaml", recipe))
    straight = genesis("fit", "--config", recipes["straight"])
    assert straight.status == 0, straight.err
    process = start_genesis("fit", "--config", recipes["killed"])
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not list((tmp_path / "killed").glob("checkpoints/step-*[69]/COMMITTED")):
            assert process.poll() is None
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    resumed = genesis("fit", "--config", recipes["killed"], "--ckpt_path", "latest")
    assert resumed.status == 0, resumed.err
    last = {name: sorted((tmp_path / name / "checkpoints").glob("step-*"))[-1] for name in recipes}
    assert last["killed"].name == last["straight"].name > "step-00000010"
    manifests = [json.loads((path / "manifest.json").read_text())["tensors"] for path in last.values()]
    digests = [{name: tensor["digest"] for name, tensor in tensors.items()} for tensors in manifests]
    assert digests[0] == digests[1]
    assert set(read_losses(tmp_path / "killed")) <= set(read_losses(tmp_path / "straight"))
    validated = genesis("validate", "--config", recipes["straight"], "--ckpt_path", "latest")
    assert validated.status == 0, validated.err
