"""Forged models for `genesis import`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.forged.operators import ALIEN, Case, Forge, forge_files, forge_json, rewrite, set_values

MODEL: Final = Path("model")
COMMAND: Final = ("import", "../in/model", "../out/run")
WEIGHTS, INDEX = MODEL / "model.safetensors", MODEL / "model.safetensors.index.json"
_JSON: Final = ("config", "tokenizer", "tokenizer_config", "generation_config", "special_tokens_map")
_FILES: Final = (*(f"model/{name}.json" for name in _JSON), "model/chat_template.jinja", "model/model.safetensors")
_CODE: Final = "import pathlib; pathlib.Path('{mark}').touch()\nclass Own: pass\n"
_SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_LARGE: Final = (0, -1, 10**6, 2**31, 2**63, 10**400, 1.5, "16", None, True, [16])
_TOKENIZERS: Final[dict[str, dict[str, Any]]] = {
    "an unparsable normaliser": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "an empty prefix": {"normalizer": {"type": "Prepend", "prepend": ""}},
    "an expression without end": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    },
    "an expression of cubic time": {
        "pre_tokenizer": {
            **{"type": "Split", "behavior": "Isolated", "invert": False},
            "pattern": {"Regex": r"\s*\s*\s*x|\s"},
        }
    },
    "a bad expression": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(((("}, "behavior": "Isolated", "invert": False}
    },
    "a text that doubles": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}] * 24,
        }
    },
    "a template of no symbol": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": ALIEN, "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "another model": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    "no vocabulary": {"model": {"type": "BPE", "vocab": {}, "merges": []}},
}
_LATER: Final[dict[str, dict[str, Any]]] = {
    "scores that are no numbers": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", "x"], ["b", None]]}},
    "a vocabulary of one letter": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]] * 50_000}},
    "words without limit": {
        "model": {
            **{"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}, "continuing_subword_prefix": "##"},
            **{"max_input_chars_per_word": 2**62},
        }
    },
    "padding to gigabytes": {
        "padding": {
            **{"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None},
            **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
        }
    },
    "a cut to nothing": {
        "truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 2**62}
    },
    "a decoder that doubles": {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}] * 40,
        }
    },
    "a hundred thousand symbols": {
        "added_tokens": [
            {
                **{"id": number, "content": f"<{number}>", "single_word": False, "lstrip": False, "rstrip": False},
                **{"normalized": False, "special": True},
            }
            for number in range(100_000)
        ]
    },
    "an alien symbol": {
        "added_tokens": [
            {
                **{"id": 0, "content": ALIEN, "single_word": True, "lstrip": True, "rstrip": True},
                **{"normalized": True, "special": True},
            }
        ]
    },
    "merges of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"], ["", ""], "a"]}},
    "no expression": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
}
_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "YaRN without end": {"rope_scaling": {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 1}},
    "a factor of nothing": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "a million factors": {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 10**6, "long_factor": [1e-300] * 10**6}
    },
    "a million kinds of layers": {"layer_types": ["full_attention"] * 10**6},
    "a window of minus one": {"model_type": "mistral", "sliding_window": -1},
    "quantised": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "a large head": {"head_dim": 2**31},
    "no heads of keys": {"num_key_value_heads": 0},
    "a million ends": {"eos_token_id": list(range(10**6))},
    "no epsilon": {"rms_norm_eps": float("nan")},
    "no type": {"dtype": ALIEN, "torch_dtype": ALIEN},
    "another family": {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
    "many experts": {"model_type": "qwen3_moe", "num_experts": 10**9, "num_experts_per_tok": 10**9},
    "a model in it": {"text_config": {"text_config": {"text_config": {"vocab_size": 10**9}}}},
}
_OTHER_TENSORS: Final[dict[str, dict[str, Any]]] = {
    "a name that leads out": {"../../out": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "a shape of many sizes": {"a": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}},
    "sizes that overflow": {"a": {"dtype": "U8", "shape": [2**32, 2**32], "data_offsets": [0, 0]}},
    "long metadata": {
        "__metadata__": {"a": "x" * (8 << 20)},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    },
    "metadata of no text": {"__metadata__": [1], "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "4 bits": {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}},
}
_NF4: Final = (*COMMAND, "--dtype", "nf4", "--proof", "weights")
_FOREIGN: Final = (*COMMAND, "--as", "transformers", "--no_tokenizer")
_GGUF: Final = ("export", "../in/run", "../out/model.gguf", "--gguf", "f16")
_IDS: Final = (20_000_000, 2**32 - 1, 2**32, -1, 10**400)
_HEADERS: Final[dict[str, Any]] = {
    "terabytes": {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
    "negative": {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [9, 1]}},
    "overlap": {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"},
    "alien": {ALIEN: {"dtype": ALIEN, "shape": ALIEN, "data_offsets": ALIEN}},
    "another type": {"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}},
    "long name": {"n" * 100_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "many": {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(50_000)},
    "no object": [[]],
    "a number": 7,
}
_PATHS: Final = ("../outside/secret", "/etc/passwd", "..", ".", "", "a/b", "x" * 3000, ALIEN, 5, None, ["a"])


def iterate_cases(seed: int, mark: Path) -> Iterator[Case]:
    """Yields the cases; code that runs creates the file `mark`."""
    for name, forge in (
        *forge_files(_FILES, seed),
        *forge_json([f"model/{name}.json" for name in _JSON], seed, num_changed=22),
        *_forge_shapes(),
        *_forge_tokenizers(),
        *_forge_weights(),
        *_forge_code(mark),
    ):
        yield Case("import", name, forge, COMMAND)
    for name, forge in (*_forge_shapes(), *_forge_weights()):
        yield Case("import", f"nf4: {name}", forge, _NF4)
    for name, forge in (*_forge_shapes(), *_forge_headers(_OTHER_TENSORS), *_forge_code(mark)):
        yield Case("import", f"as transformers: {name}", forge, _FOREIGN)
    files = [
        f"run/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "recipe.yaml")
    ]
    for name, forge in (*forge_files(files, seed), *forge_json(files[:2], seed, num_changed=8)):
        yield Case("import", f"gguf: {name}", forge, _GGUF, ("run",))


def _set_each(file: str, changes: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Forge]]:
    for name, values in changes.items():
        yield f"{file}: {name}", set_values(MODEL / file, **values)


def _forge_headers(headers: dict[str, Any]) -> Iterator[tuple[str, Forge]]:
    for name, header in headers.items():
        data = json.dumps(header).encode()
        yield f"weights: {name}", rewrite(WEIGHTS, lambda _, d=data: len(d).to_bytes(8, "little") + d + bytes(64))  # type: ignore[misc]


def _forge_shapes() -> Iterator[tuple[str, Forge]]:
    yield from _set_each("config.json", _CONFIGS)
    for key in _SIZES:
        for value in _LARGE:
            yield f"config.json: {key} {str(value)[:20]}", set_values(MODEL / "config.json", **{key: value})
    long = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for size in (10**6, 2 * 10**6):
        scaling = {**long, "original_max_position_embeddings": size, "rope_theta": 1e4}
        changes = {"rope_scaling": scaling, "rope_parameters": scaling, "max_position_embeddings": 8 * size}
        yield f"config.json: context of {size}", set_values(MODEL / "config.json", **changes)
        window = {"model_type": "mistral", "sliding_window": size, "max_position_embeddings": 8 * size}
        yield f"config.json: window of {size}", set_values(MODEL / "config.json", **window)


def _forge_tokenizers() -> Iterator[tuple[str, Forge]]:
    path = MODEL / "tokenizer.json"
    yield from _set_each("tokenizer.json", _TOKENIZERS | _LATER)
    for number in _IDS:

        def add(data: bytes, number: int = number) -> bytes:
            content = json.loads(data)
            content["model"]["vocab"]["zz"] = number
            return json.dumps(content).encode()

        yield f"tokenizer.json: id {str(number)[:20]}", rewrite(path, add)


def _forge_weights() -> Iterator[tuple[str, Forge]]:
    yield from _forge_headers(_HEADERS | _OTHER_TENSORS)
    for claimed in (1, 1 << 62, (1 << 64) - 1):
        yield f"weights: header of {claimed}", rewrite(WEIGHTS, lambda d, c=claimed: c.to_bytes(8, "little") + d[8:])  # type: ignore[misc]

    def grow(root: Path) -> None:
        header = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [3 * 10**9], "data_offsets": [0, 12 * 10**9]}}
        data = json.dumps(header).encode()
        (root / WEIGHTS).write_bytes(len(data).to_bytes(8, "little") + data)
        os.truncate(root / WEIGHTS, 8 + len(data) + 12 * 10**9)

    yield "weights: a hole of three thousand million values", grow
    for value in _PATHS:

        def index(root: Path, value: Any = value) -> None:
            content = json.loads((root / MODEL / "index.json").read_text())
            content["weight_map"][next(iter(content["weight_map"]))] = value
            (root / INDEX).write_text(json.dumps(content))
            (root / WEIGHTS).rename(root / MODEL / "a.safetensors")

        yield f"index: a file {str(value)[:20]!r}", index


def _forge_code(mark: Path) -> Iterator[tuple[str, Forge]]:
    maps = {
        "config.json": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
        "tokenizer_config.json": {"AutoTokenizer": ["own.Own", "own.Own"]},
    }
    for name, auto_map in maps.items():
        for kind in (None, "Own", "LlamaTokenizer", "Nowhere"):

            def plant(root: Path, name: str = name, kind: str | None = kind, auto_map: Any = auto_map) -> None:
                (root / MODEL / "own.py").write_text(_CODE.format(mark=mark))
                changes = {"auto_map": auto_map} | ({} if kind is None else {"tokenizer_class": kind})
                set_values(MODEL / name, **changes)(root)

            yield f"{name}: own code, class {kind}", plant
