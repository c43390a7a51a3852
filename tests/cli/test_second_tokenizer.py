"""A tokenizer that is not SentencePiece and whose documents hold eos, through every command."""

import csv
import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.evaluate.complete import CompleteOptions, complete
from genesis.evaluate.heldout import measure_held_out, read_texts
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.generate.batch import Batch, Request
from genesis.generate.load import load_decoder
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import plan_seeds
from genesis.tokenizer.files import write_files
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import encode_prompt, frame_document
from tests.cli.conftest import Genesis
from tests.cli.tiny import build_recipe, write_recipe
from tests.commands import start_genesis
from tests.data.corpus_support import write_jsonl
from tests.serve.test_ids import ask_all
from tests.tiny_runs import build_decoder, save
from tests.tokenizer.byte_files import END_OF_TURN, EOS, installed, make_texts, write_tokenizer

DEADLINE_SECONDS = 120
POLL_SECONDS = 0.02
STEPS = 30
VOCAB_SIZE = 260
PROMPTS = ["alpha", "b\n", "\u00e9t", "one two", "x\ny\n", ""]


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with installed():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with a checkpoint of a model of bytes, and its tokenizer."""
    directory = write_tokenizer(tmp_path_factory.mktemp("bytes") / "run")
    decoder = build_decoder(3, vocab_size=VOCAB_SIZE)
    identity = {"tokenizer_hash": open_tokenizer(directory).hash}
    save(directory / "checkpoints", 1, decoder, identity, vocab_size=VOCAB_SIZE)
    return directory


def stopped(run: Path, prompts: list[str], num_tokens: int, sampling: SamplingOptions) -> list[list[int]]:
    """Returns the new ids of each prompt, cut after the first that stops, from a batch that nothing stops."""
    loaded = load_decoder(run)
    ids = [encode_prompt(loaded.text_tokenizer, prompt) for prompt in prompts]
    batch = Batch(loaded.decoder, len(ids), frozenset())
    for prompt, seed in zip(ids, plan_seeds(ids, 0), strict=True):
        batch.add(Request(prompt, num_tokens, sampling, seed))
    texts: list[list[int]] = [[] for _ in ids]
    while tokens := batch.step():
        for token in tokens:
            texts[token.request].append(token.id)
    ends = [next((at + 1 for at, token in enumerate(text) if token in (EOS, END_OF_TURN)), len(text)) for text in texts]
    return [text[:end] for text, end in zip(texts, ends, strict=True)]


def losses(run_dir: Path) -> list[tuple[str, str]]:
    """Returns the rows that have a loss. A kill between the log of a save and that of its step leaves a row without."""
    with (run_dir / "metrics.csv").open() as file:
        return [(row["step"], row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def digests(run_dir: Path) -> dict[str, Any]:
    manifest = json.loads((run_dir / f"checkpoints/step-{STEPS:08d}/manifest.json").read_text())
    return {name: tensor["digest"] for name, tensor in manifest["tensors"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["corpus", "stream"])
@pytest.mark.repeat  # a tokenizer has no part in a resume; `test_stream.py` kills
def test_a_run_that_is_killed_and_resumed_equals_one_that_was_not(genesis: Genesis, tmp_path: Path, kind: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "web.jsonl", make_texts(150, seed=4))
    sources = [{"name": "web", "paths": [str(tmp_path / "web.jsonl")]}]
    command = ("--name", "corpus", "--out", str(tmp_path), "--tokenizer", str(tokenizer), "--num_workers", "1")
    prepared = genesis("data", "prepare", *command, "--sources", json.dumps(sources), "--validation_fraction", "0.1")
    assert prepared.status == 0, prepared.err

    def write(name: str) -> Path:
        recipe = build_recipe(tmp_path / "corpus", tmp_path / name)
        recipe["model"]["decoder"]["vocab_size"] = VOCAB_SIZE
        recipe["trainer"] |= {"max_steps": STEPS, "val_check_interval": 10}
        recipe["checkpoint"] |= {"every_n_steps": 3, "keep_last": 3}
        if kind == "stream":
            recipe["data"]["stream"] = {"sources": sources, "block_tokens": 400, "num_workers": 1}
        return write_recipe(tmp_path / f"{name}.yaml", recipe)

    straight = genesis("fit", "--config", str(write("straight")))
    assert straight.status == 0, straight.err
    recipe = write("killed")
    process = start_genesis("fit", "--config", recipe)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not list((tmp_path / "killed").glob("checkpoints/step-*[69]/COMMITTED")):
            assert process.poll() is None
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    resumed = genesis("fit", "--config", str(recipe), "--ckpt_path", "latest")
    assert resumed.status == 0, resumed.err
    assert digests(tmp_path / "killed") == digests(tmp_path / "straight")
    assert set(losses(tmp_path / "killed")) <= set(losses(tmp_path / "straight"))
    shown = genesis("generate", str(tmp_path / "killed"), "--prompt", "alpha", "--max_new_tokens", "4")
    assert (shown.status, shown.out[:5]) == (0, "alpha"), shown.err


def test_generate_stops_at_each_of_its_stop_ids(run: Path, genesis: Genesis) -> None:
    tokenizer = open_tokenizer(run)
    prompts = [prompt for prompt in PROMPTS * 3 if prompt]
    wanted = stopped(run, prompts, 120, SamplingOptions())
    assert {EOS, END_OF_TURN} <= {text[-1] for text in wanted}
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    outcome = genesis("generate", str(run), *asked, "--max_new_tokens", "120", "--device", "cpu")
    assert outcome.status == 0, outcome.err
    texts = [prompt + tokenizer.decode(ids) for prompt, ids in zip(prompts, wanted, strict=True)]
    heads = [f"--- prompt {number} of {len(prompts)}\n" for number in range(1, len(prompts) + 1)]
    assert outcome.out == "".join(f"{head}{text}\n" for head, text in zip(heads, texts, strict=True))


def test_the_server_stops_there_too_and_says_so(run: Path) -> None:
    wanted = stopped(run, [PROMPTS[0]], 40, SamplingOptions(0.0))[0]
    body = {"model": "latest", "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0.0, "logprobs": 1}
    ((status, answer, _),) = ask_all(run, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["text"] == open_tokenizer(run).decode(wanted)
    assert choice["finish_reason"] == ("stop" if wanted[-1] in (EOS, END_OF_TURN) else "length")
    assert answer["usage"]["completion_tokens"] == len(wanted)


def test_evaluation_completes_up_to_a_stop_id_and_measures_whole_documents(run: Path, tmp_path: Path) -> None:
    loaded = load_decoder(run)
    tokenizer, decoder = loaded.text_tokenizer, loaded.decoder
    ids = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    options = CompleteOptions(60, (), SamplingOptions(0.0), 0, 4096, 4096)
    texts = stopped(run, PROMPTS, 60, SamplingOptions(0.0))
    assert complete(decoder, tokenizer, ids, options) == [tokenizer.decode(text) for text in texts]

    write_jsonl(tmp_path / "web.jsonl", make_texts(6, seed=7))
    measures = {
        one.metric: one for one in measure_held_out(decoder, read_texts(tmp_path / "web.jsonl", 128, tokenizer), 256)
    }
    documents = [frame_document(tokenizer, one) for one in tokenizer.encode_batch(make_texts(6, seed=7))]
    num_bytes = sum(int(tokenizer.token_num_bytes[document[1:]].sum()) for document in documents)
    assert measures["bits_per_byte"].num_items == num_bytes
    assert measures["loss"].num_items == sum(len(document) - 1 for document in documents)
    loss_sum, start = 0.0, 0
    with torch.no_grad():
        for document in documents:
            for first in range(0, len(document)):  # the pieces that a sequence's end cuts
                if first and (start + first) % 128:
                    continue
                piece = document[first : first + 128 - (start + first) % 128 + 1]
                if len(piece) > 1:
                    log_probs = decoder(torch.tensor(piece[None, :-1]))[0].log_softmax(dim=1)
                    loss_sum -= float(log_probs.gather(1, torch.tensor(piece[1:])[:, None].long()).sum())
            start += len(document)
    assert measures["bits_per_byte"].value == pytest.approx(loss_sum / num_bytes / math.log(2), rel=1e-5)


@pytest.mark.slow
def test_an_export_has_the_tokenizers_own_files_and_its_card_says_so(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    proof = export_checkpoints([run / "checkpoints/step-00000001"], out, ExportOptions())
    assert (proof["tokenizer"], proof["tokenizer_origin"], proof["tokenizer_form"]) == (None, "run", "own")
    assert {"alphabet.txt", "symbols.json"} <= proof["files"].keys()
    assert "tokenizer.json" not in proof["files"]
    assert "transformers cannot open this tokenizer" in (out / "README.md").read_text()
    assert "AutoTokenizer" not in (out / "README.md").read_text()
    exported = load_decoder(out)
    assert exported.text_tokenizer.hash == open_tokenizer(run).hash
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == EOS
    write_files({"tokenizer.model": b"another"}, out)
    with pytest.raises(ValueError, match=r"tokenizer\.model did not exist when the export was proved"):
        load_decoder(out)
