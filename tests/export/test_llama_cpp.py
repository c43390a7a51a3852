"""llama.cpp reads an export as we do, and quantises it; `benchmarks/peers/README.md` says how to install llama.cpp."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from benchmarks.harness import describe_hardware, write_record
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.texts import SCRIPTS
from genesis.generate.load import load_decoder
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.model.attention import AttentionConfig
from genesis.model.delta import GatedDeltaConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.norm import NormConfig
from genesis.model.recipe import dump_decoder_config
from genesis.tokenizer.open import open_tokenizer
from tests.mixtures import build_sharp
from tests.tiny_runs import SHAPE, build_decoder, save

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/records/llama-cpp"
QUANTISED_RECORD = ROOT / "benchmarks/records/llama-cpp-quantised"
WORKER = ROOT / "benchmarks/peers/llama_cpp_worker.py"
NUM_NEW_TOKENS = 64
NUM_SCORED = 129
QUANTISED = ("q8_0", "Q4_K_M", "Q4_0", "Q4_1")
"""Types of weights: those in small letters are written by the converter, the others by `llama-quantize`."""
QUESTION = "What is the capital of France?"
EXPERTS = MixtureConfig(num_experts=4, top_k=2, ffn_dim=256)
HEADS = AttentionConfig(num_heads=4, num_kv_heads=2)
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"feed_forward": EXPERTS, "attention": HEADS},
    "qwen3_moe": {"feed_forward": EXPERTS, "attention": replace(HEADS, qk_norm="head", qk_norm_eps=1e-5)},
    # llama.cpp's OLMoE and dots.llm1 have as many heads of keys as of queries, and its OLMoE does not normalize the
    # weights of chosen experts.
    "olmoe": {
        "feed_forward": replace(EXPERTS, has_normalized_weights=False),
        "attention": AttentionConfig(num_heads=4, num_kv_heads=4, qk_norm="projection", qk_norm_eps=1e-5),
    },
    "dots1": {
        "feed_forward": replace(
            EXPERTS,
            shared_ffn_dim=256,
            scores="sigmoid",
            routed_scale=2.5,
            has_balance_bias=True,
            num_dense_layers=1,
            dense_ffn_dim=256,
        ),
        "attention": AttentionConfig(num_heads=4, num_kv_heads=4, qk_norm="head", qk_norm_eps=1e-5),
    },
    "qwen3_5_moe_text": {
        "feed_forward": replace(EXPERTS, shared_ffn_dim=256, has_shared_gate=True),
        "attention": replace(
            HEADS, qk_norm="head", qk_norm_eps=1e-5, qk_norm_has_offset=True, rotary_dim=16, has_output_gate=True
        ),
        "norm": NormConfig(1e-5, has_offset=True),
        "linear_attention": GatedDeltaConfig(2, 4, attention_every=2, norm_eps=1e-5),
    },
}
"""Parts of a decoder whose widths are multiples of the 256 values that Q4_K_M takes together."""
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


@pytest.fixture
def quantizer(llama_cpp: Path) -> Path:
    """The program that writes 4 bits, which must be built."""
    program = llama_cpp / "llama.cpp/build/bin/llama-quantize"
    if not program.exists():
        pytest.skip(f"{program} does not exist; benchmarks/peers/README.md says how to build it")
    return program


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


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.process
def test_an_export_that_llama_cpp_quantises_gives_a_text_almost_our_probability(
    llama_cpp: Path, quantizer: Path, real_export: Path, tmp_path: Path
) -> None:
    loaded = load_decoder(real_export)
    decoder, tokenizer = loaded.decoder, loaded.text_tokenizer
    ids = tokenizer.encode((ROOT / "docs/explanation/guarantees.md").read_text(encoding="utf-8"))[:NUM_SCORED]
    with torch.no_grad():
        logits = decoder(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    ours = logits.gather(1, torch.tensor(ids[1:])[:, None]).mean().neg().item()
    conversation = [{"role": "user", "content": QUESTION}]
    prompt = open_renderer(tokenizer, ChatOptions(), is_training=False).render_prompt(conversation)
    asked = {"prompt": prompt, "scored": ids, "vocab_size": decoder.config.vocab_size}
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    with torch.no_grad():
        firsts = decoder(torch.tensor([prompt]))[0, -1].softmax(-1).topk(2)
    likely = {tokenizer.decode([token]): value for value, token in zip(*(one.tolist() for one in firsts), strict=True)}
    found: dict[str, dict[str, Any]] = {}
    for kind in ("f32", *QUANTISED):
        answer = ask_llama_cpp(llama_cpp, real_export, kind, tmp_path, quantizer=quantizer, **asked)
        num_bytes = (tmp_path / f"{kind}.gguf").stat().st_size
        found[kind] = {
            "loss": -sum(answer["log_probabilities"]) / (NUM_SCORED - 1),
            "bytes": num_bytes,
            "bits_per_weight": 8 * num_bytes / num_parameters,
            "answer": tokenizer.decode([*takewhile(lambda token: token not in tokenizer.stop_ids, answer["greedy"])]),
        }
    if os.environ.get("GENESIS_UPDATE_RECORDS"):
        record_quantised(answer["version"], ours, likely, found)
    assert found["f32"]["loss"] == pytest.approx(ours, abs=1e-3)
    assert found["q8_0"]["loss"] == pytest.approx(ours, rel=0.01)
    assert found["q8_0"]["bits_per_weight"] < 9
    for kind in QUANTISED[1:]:
        assert found[kind]["loss"] == pytest.approx(ours, rel=0.1)
        assert found[kind]["bits_per_weight"] < 7


@pytest.fixture
def qwen_tokenizer(tmp_path: Path) -> Path:
    """Qwen3's tokenizer, which splits text as transformers does for every model of Qwen3.5."""
    named = os.environ.get("GENESIS_LLAMA_CPP_QWEN")
    if not named:
        pytest.skip("GENESIS_LLAMA_CPP_QWEN names no tokenizer of Qwen3; benchmarks/peers/README.md says how to get it")
    directory = tmp_path / "qwen"
    directory.mkdir()
    content = json.loads((Path(named) / "tokenizer.json").read_bytes())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": PRETOKENIZE_REGEX}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((Path(named) / "tokenizer_config.json").read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen3_5Tokenizer"}))
    return directory


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", MIXTURES)
def test_llama_cpp_reads_a_mixture_and_quantises_it_to_4_bits(
    name: str, llama_cpp: Path, quantizer: Path, tokenizer_file: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # The converter takes a tokenizer of `genesis tokenizer train` for Mixtral, but for none of the others here.
    given = {"mixtral": None, "qwen3_5_moe_text": "qwen_tokenizer"}.get(name, "real_export")
    for file in [tokenizer_file] if given is None else request.getfixturevalue(given).glob("tokenizer*"):
        shutil.copy(file, run)
    tokenizer = open_tokenizer(run)
    dense = build_decoder(0, dim=256, vocab_size=tokenizer.vocab_size, has_tied_embeddings=False).config
    config = replace(dense, num_heads=None, num_kv_heads=None, ffn_dim=None, **MIXTURES[name])
    shape = {**dict.fromkeys(SHAPE), **dump_decoder_config(config)}
    save(run / "checkpoints", 1, build_sharp(config), {"tokenizer_hash": tokenizer.hash}, **shape)
    export = tmp_path / "export"
    export_checkpoints([run / "checkpoints/step-00000001"], export, ExportOptions())
    assert json.loads((export / "config.json").read_bytes())["model_type"] == name
    prompt = tokenizer.encode("class alpha")
    options = GenerateOptions(NUM_NEW_TOKENS, SamplingOptions(temperature=0.0))
    ours = [token.id for token in generate(load_decoder(export).decoder, [prompt], options, frozenset())]
    # An export has no tensors for the prediction of several tokens, which the converter expects of Qwen3.5.
    asked: dict[str, Any] = {"prompt": prompt, "converter_options": ["--no-mtp"] * (name == "qwen3_5_moe_text")}
    assert ask_llama_cpp(llama_cpp, export, "f32", tmp_path, **asked)["greedy"] == ours
    answer = ask_llama_cpp(llama_cpp, export, "Q4_K_M", tmp_path, quantizer=quantizer, **asked)
    assert len(answer["greedy"]) == NUM_NEW_TOKENS
    whole, quantised = ((tmp_path / f"{kind}.gguf").stat().st_size for kind in ("bf16", "Q4_K_M"))
    assert quantised < 0.5 * whole


def ask_llama_cpp(
    llama_cpp: Path,
    exported: Path,
    kind: str,
    directory: Path,
    *,
    quantizer: Path | None = None,
    prompt: Sequence[int] = (0,),
    texts: Sequence[str] = (),
    scored: Sequence[int] = (),
    vocab_size: int = 0,
    converter_options: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the worker's answer about the export, whose weights the converter or the quantizer writes in a type."""
    model = directory / f"{kind}.gguf"
    script = llama_cpp / "llama.cpp/convert_hf_to_gguf.py"
    converter = [sys.executable, str(script), str(exported), *converter_options]
    if quantizer is None or kind.islower():
        call([*converter, "--outfile", str(model), "--outtype", kind], "")
    else:
        whole = directory / "bf16.gguf"
        if not whole.exists():
            call([*converter, "--outfile", str(whole), "--outtype", "bf16"], "")
        call([str(quantizer), str(whole), str(model), kind], "")
    request = {
        "model": str(model),
        "texts": texts,
        "prompt": prompt,
        "num_new_tokens": NUM_NEW_TOKENS,
        "scored": scored,
        "vocab_size": vocab_size,
    }
    call([sys.executable, str(WORKER), str(directory / "answer.json")], json.dumps(request), PYTHONPATH=str(llama_cpp))
    answer: dict[str, Any] = json.loads((directory / "answer.json").read_bytes())
    return answer


def record_quantised(version: str, ours: float, likely: dict[str, float], found: dict[str, dict[str, Any]]) -> None:
    content = {
        "what": "the export of a real model, quantised by llama.cpp: the loss of a text beside ours, and an answer",
        "command": "GENESIS_LLAMA_CPP=PEER GENESIS_LLAMA_CPP_EXPORT=EXPORT GENESIS_UPDATE_RECORDS=1 "
        "pytest tests/export/test_llama_cpp.py -k quantises",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": describe_hardware("cpu"),
        "python": platform.python_version(),
        "xllamacpp": version,
        "num_tokens": NUM_SCORED - 1,
        "loss": ours,
        "question": QUESTION,
        "likely_first_tokens": likely,
        "types": found,
    }
    rows = "\n".join(
        f"| {kind} | {one['bytes'] / 1e6:,.0f} MB | {one['bits_per_weight']:.2f} | {one['loss']:.4f} "
        f"| {one['loss'] - ours:+.4f} |"
        for kind, one in found.items()
    )
    ties = ", ".join(f'"{text}" {value:.3f}' for text, value in likely.items())
    answers = "\n".join(f"- {kind}: {' '.join(one['answer'].split())}" for kind, one in found.items())
    page = f"""# A quantised export in llama.cpp

- command: `{content["command"]}`
- date: {content["date"]}
- hardware: {content["hardware"]}
- llama.cpp of xllamacpp {version}, its own `convert_hf_to_gguf.py`, and `llama-quantize` of the source package of
  llama-cpp-python for the types of 4 bits, from a file in bf16; SmolLM2-135M-Instruct, imported and exported

The mean loss of {NUM_SCORED - 1} tokens of the page on guarantees, in nats. Genesis, float32: {ours:.4f}. The bits are
those of the whole file, with its tokenizer.

| type | file | bits per weight | loss in llama.cpp | beside Genesis |
|---|---|---|---|---|
{rows}

What limits these numbers:

- The rows of this model have 576 values, no multiple of the 256 that Q4_K takes together. llama.cpp takes 5 and 8 bits
  for most of its weights instead, so that `Q4_K_M` is no file of 4 bits here.
- The model's weights were computed from a file in Q4_1, which favours Q4_1. What the types of 4 bits lose of weights
  that were never quantised was not measured.
- It is one text of {NUM_SCORED - 1} tokens.

## Greedy answers

To "{QUESTION}", at most {NUM_NEW_TOKENS} tokens. In Genesis the first token is almost a tie
({ties}), so that a small error of any type decides the whole answer: these texts show that the files
generate, and not how good they are.

{answers}
"""
    write_record(content, page, QUANTISED_RECORD)


def call(command: list[str], text: str, **environment: str) -> None:
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
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
