"""llama.cpp reads an export as we do, and quantises it; `benchmarks/peers/README.md` says how to install llama.cpp."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.bench.record import describe_hardware, write_record
from genesis.export.texts import SCRIPTS
from genesis.generate.load import load_decoder
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/records/llama-cpp"
QUANTISED_RECORD = ROOT / "benchmarks/records/llama-cpp-quantised"
WORKER = ROOT / "benchmarks/peers/llama_cpp_worker.py"
NUM_NEW_TOKENS = 64
NUM_SCORED = 129
SPACE_MARK = "U+2581 in the text"
TEXTS = SCRIPTS | {
    "empty": "",
    "one space": " ",
    "spaces around": "  alpha  ",
    "spaces inside": "a  b   c    d",
    "tabs and ends of lines": "\t\r\n  \n\n\tx",
    "ASCII": "".join(map(chr, range(32, 127))),
    "numbers": "0123456789 3.14159 1,000,000",
    "a run of one character": "x" + "=" * 41 + "y",
    "control symbols": "<s>a</s> <|user|><unk> <pad>b",
    "a byte's name": "<0x41> <0xE2>",
    "controls and private use": "\x01\x7f\x85\ufeff\ue000\U0010ffff",
    SPACE_MARK: "a\u2581b \u2581",
}


@pytest.fixture
def llama_cpp() -> Path:
    """The directory that `benchmarks/peers/README.md` says how to fill."""
    named = os.environ.get("GENESIS_LLAMA_CPP")
    if not named:
        pytest.skip(
            "GENESIS_LLAMA_CPP names no directory with llama.cpp; benchmarks/peers/README.md says how to make it"
        )
    for part in ("xllamacpp", "llama.cpp/convert_hf_to_gguf.py"):
        assert (Path(named) / part).exists(), f"GENESIS_LLAMA_CPP is {named}, which lacks {part}"
    return Path(named).resolve()


@pytest.fixture
def real_export() -> Path:
    """The export of SmolLM2-135M-Instruct: llama.cpp's server gives no probabilities of ids that are no whole text."""
    named = os.environ.get("GENESIS_LLAMA_CPP_EXPORT")
    if not named:
        pytest.skip("GENESIS_LLAMA_CPP_EXPORT names no export; benchmarks/peers/README.md says how to make it")
    return Path(named).resolve()


@pytest.mark.slow
@pytest.mark.process
def test_llama_cpp_has_our_ids_and_our_greedy_text(llama_cpp: Path, exported: Path, tmp_path: Path) -> None:
    decoder, tokenizer, *_ = load_decoder(exported)
    prompt = [tokenizer.bos_id, *tokenizer.encode("class alpha")]
    options = GenerateOptions(NUM_NEW_TOKENS, SamplingOptions(temperature=0.0))
    our_greedy = [token.id for token in generate(decoder, [prompt], options, frozenset())]
    answer = ask_llama_cpp(llama_cpp, exported, "f32", tmp_path, prompt=prompt, texts=[*TEXTS.values()])
    different = [
        (kind, tokenizer.encode(text), theirs)
        for (kind, text), theirs in zip(TEXTS.items(), answer["ids"], strict=True)
        if tokenizer.encode(text) != theirs
    ]
    num_equal = sum(a == b for a, b in zip(our_greedy, answer["greedy"], strict=True))
    if os.environ.get("GENESIS_UPDATE_RECORDS"):
        record(answer["version"], different, num_equal)
    # llama.cpp spells a space as U+2581 before it looks for pieces, so that it can't tell the two apart.
    assert [kind for kind, _, _ in different] == [SPACE_MARK]
    assert different[0][2] == tokenizer.encode(TEXTS[SPACE_MARK].replace("\u2581", " "))
    assert num_equal == NUM_NEW_TOKENS


@pytest.mark.slow
@pytest.mark.process
def test_an_export_that_llama_cpp_quantises_gives_a_text_almost_our_probability(
    llama_cpp: Path, real_export: Path, tmp_path: Path
) -> None:
    decoder, tokenizer, *_ = load_decoder(real_export)
    assert tokenizer is not None
    ids = tokenizer.encode((ROOT / "docs/explanation/guarantees.md").read_text(encoding="utf-8"))[:NUM_SCORED]
    with torch.no_grad():
        logits = decoder(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    ours = logits.gather(1, torch.tensor(ids[1:])[:, None]).mean().neg().item()
    found = {}
    for kind in ("f32", "q8_0"):
        options = {"scored": ids, "vocab_size": decoder.config.vocab_size}
        answer = ask_llama_cpp(llama_cpp, real_export, kind, tmp_path, **options)
        loss = -sum(answer["log_probabilities"]) / (NUM_SCORED - 1)
        found[kind] = {"loss": loss, "bytes": (tmp_path / f"{kind}.gguf").stat().st_size}
    if os.environ.get("GENESIS_UPDATE_RECORDS"):
        record_quantised(answer["version"], ours, found)
    assert found["f32"]["loss"] == pytest.approx(ours, abs=1e-3)
    assert found["q8_0"]["loss"] == pytest.approx(ours, rel=0.01)
    assert found["q8_0"]["bytes"] < 0.5 * found["f32"]["bytes"]


def ask_llama_cpp(
    llama_cpp: Path,
    exported: Path,
    kind: str,
    directory: Path,
    *,
    prompt: Sequence[int] = (0,),
    texts: Sequence[str] = (),
    scored: Sequence[int] = (),
    vocab_size: int = 0,
) -> dict[str, Any]:
    """Returns the worker's answer about the export, whose weights the converter writes in a type."""
    model = directory / f"{kind}.gguf"
    converter = [str(llama_cpp / "llama.cpp/convert_hf_to_gguf.py"), str(exported)]
    call([*converter, "--outfile", str(model), "--outtype", kind], "")
    request = {
        "model": str(model),
        "texts": texts,
        "prompt": prompt,
        "num_new_tokens": NUM_NEW_TOKENS,
        "scored": scored,
        "vocab_size": vocab_size,
    }
    call([str(WORKER), str(directory / "answer.json")], json.dumps(request), PYTHONPATH=str(llama_cpp))
    answer: dict[str, Any] = json.loads((directory / "answer.json").read_bytes())
    return answer


def record_quantised(version: str, ours: float, found: dict[str, dict[str, float]]) -> None:
    content = {
        "what": "the export of a real model, quantised by llama.cpp's converter: the loss of a text beside ours",
        "command": "GENESIS_LLAMA_CPP=PEER GENESIS_LLAMA_CPP_EXPORT=EXPORT GENESIS_UPDATE_RECORDS=1 "
        "pytest tests/export/test_llama_cpp.py -k quantises",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": describe_hardware("cpu"),
        "python": platform.python_version(),
        "xllamacpp": version,
        "num_tokens": NUM_SCORED - 1,
        "loss": ours,
        "types": found,
    }
    rows = "\n".join(f"| {kind} | {one['bytes'] / 1e6:,.0f} MB | {one['loss']:.4f} |" for kind, one in found.items())
    page = f"""# A quantised export in llama.cpp

- command: `{content["command"]}`
- date: {content["date"]}
- hardware: {content["hardware"]}
- llama.cpp of xllamacpp {version}, its own `convert_hf_to_gguf.py`; SmolLM2-135M-Instruct, imported and exported

The mean loss of {NUM_SCORED - 1} tokens of the page on guarantees, in nats. Genesis, float32: {ours:.4f}.

| type | file | loss in llama.cpp |
|---|---|---|
{rows}
"""
    write_record(content, page, QUANTISED_RECORD)


def call(script: list[str], text: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *script],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def record(version: str, different: list[tuple[str, list[int], list[int]]], num_equal: int) -> None:
    content = {
        "what": "an export read by llama.cpp: ids of texts, and greedy text, beside ours",
        "command": "GENESIS_LLAMA_CPP=PEER GENESIS_UPDATE_RECORDS=1 pytest tests/export/test_llama_cpp.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": describe_hardware("cpu"),
        "python": platform.python_version(),
        "xllamacpp": version,
        "num_texts": len(TEXTS),
        "num_texts_with_equal_ids": len(TEXTS) - len(different),
        "different": [{"text": kind, "ours": ours, "llama.cpp": theirs} for kind, ours, theirs in different],
        "num_greedy_tokens": NUM_NEW_TOKENS,
        "num_equal_greedy_tokens": num_equal,
    }
    lines = "\n".join(f"- {kind}: {ours} here, {theirs} in llama.cpp" for kind, ours, theirs in different)
    page = f"""# An export in llama.cpp

- command: `{content["command"]}`
- date: {content["date"]}
- hardware: {content["hardware"]}
- llama.cpp of xllamacpp {version}, its own `convert_hf_to_gguf.py`, float32; a tiny model with a tokenizer of 700 ids

{len(TEXTS) - len(different)} of {len(TEXTS)} texts have the same ids; they are real text in {len(SCRIPTS)} scripts,
spaces, control symbols and bytes. Different:

{lines}

llama.cpp spells a space as U+2581 before it looks for pieces, so that it can't tell a U+2581 of the text from a space.
Genesis spells that character in its three bytes. Without `"add_prefix_space": false` in `tokenizer_config.json`, which
the export writes, llama.cpp puts a space before every text.

Greedy text: {num_equal} of {NUM_NEW_TOKENS} tokens equal.
"""
    write_record(content, page, RECORD)
