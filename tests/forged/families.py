"""Forged models of families with latents, experts or linear layers, beside images, and tokenizers of other kinds."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file

from tests.forged.operators import Case, Forge, forge_files, forge_json, rewrite, set_values
from tests.forged.sound import FAMILIES

_LARGE: Final = (0, -1, 2**31, 10**400, 1.5, None)
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "deepseek v3": (
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_attention_heads", "n_shared_experts"),
        *("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace"),
    ),
    "gpt-oss": ("num_local_experts", "num_experts_per_tok", "swiglu_limit", "sliding_window"),
    "gemma 3": ("query_pre_attn_scalar", "sliding_window", "head_dim"),
    "qwen3.5 with experts": (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"),
        *("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "full_attention_interval"),
    ),
}
_FP8: Final = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_QUANTISED: Final[dict[str, Any]] = {
    "blocks": _FP8,
    "no blocks": {"quant_method": "fp8", "weight_block_size": [0, 0]},
    "large blocks": {**_FP8, "weight_block_size": [2**62, 1]},
    "blocks of text": {**_FP8, "weight_block_size": "a"},
    "mxfp4": {"quant_method": "mxfp4"},
    "a list": [{"quant_method": "mxfp4"}],
    "no method": {"quant_method": None},
}
_INNER: Final[dict[str, dict[str, Any]]] = {
    "many labels": {"num_labels": 10**9},
    "many layers": {"num_hidden_layers": 10**9},
    "many heads": {"num_attention_heads": 10**9},
    "many words": {"vocab_size": 10**9},
    "code": {"auto_map": {"AutoConfig": "own.Own"}, "attn_implementation": "kernels-community/own"},
}
_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "a layer too many": {"num_hidden_layers": 3},
    "a thousand layers": {"num_hidden_layers": 1000},
    "a hundred thousand layers": {"num_hidden_layers": 100_000},
    "wide experts": {"moe_intermediate_size": 10**7, "intermediate_size": 10**8},
    "a model of another type": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    "the defaults of another type": {"model_type": "qwen3_moe"},
    "a table of positions": {"model_type": "gptj", "n_positions": 10**8, "n_embd": 32, "n_layer": 1, "n_head": 4},
    "a mask of positions": {"model_type": "gpt_neo", "max_position_embeddings": 10**6},
    "a model that remembers": {"model_type": "mamba2", "state_size": 10**7},
    "a model with an encoder": {"model_type": "t5"},
    "no model": {"model_type": None},
    "an unhashable type": {"model_type": ["llama"]},
}
_TOKENS: Final = ("data", "prepare")


def iterate_cases(seed: int, mark: Path) -> Iterator[Case]:
    """Yields the cases; none of them has code."""
    for family in FAMILIES:
        path, command = f"families/{family}/config.json", _build_import(family)
        for name, forge in (
            *forge_json([path], seed, num_changed=10),
            *_set_each(path, {f"{key} {str(value)[:20]}": {key: value} for key in _KEYS[family] for value in _LARGE}),
            *_set_each(path, {f"in {what}": {"quantization_config": how} for what, how in _QUANTISED.items()}),
            *_forge_tensors(f"families/{family}/model.safetensors"),
        ):
            yield Case("family", name, forge, command)
    path, command = "families/deepseek v3/config.json", _build_import("deepseek v3", "--as", "transformers")
    for name, forge in (*_set_each(path, _SHAPES), *forge_json([path], seed, num_changed=20)):
        yield Case("family", f"as transformers: {name}", forge, command)
    for inner in ("text_config", "vision_config"):
        for options in ((), ("--as", "transformers")):
            command = _build_import("with images", *options)
            for what, values in _INNER.items():
                forge = _set_inner(Path("families/with images/config.json"), inner, values)
                yield Case("family", f"{' '.join(options)} with images: {inner}: {what}", forge, command)
    for kind in ("pieces", "unigram"):
        yield from _iterate_tokenizers(kind, seed)


def _build_import(family: str, *options: str) -> tuple[str, ...]:
    proof = () if "--as" in options else ("--proof", "weights")  # that of a foreign model takes no choice
    return ("import", f"../in/families/{family}", "../out/run", "--no_tokenizer", *proof, *options)


def _set_each(path: str, changes: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Forge]]:
    for name, values in changes.items():
        yield f"{path}: {name}", set_values(Path(path), **values)


def _set_inner(path: Path, inner: str, values: dict[str, Any]) -> Forge:
    def change(data: bytes) -> bytes:
        content = json.loads(data)
        return json.dumps({**content, inner: {**content[inner], **values}}).encode()

    return rewrite(path, change)


def _forge_tensors(path: str) -> Iterator[tuple[str, Forge]]:
    """Yields models whose largest tensor has another form."""

    def change(act: Callable[[Any], Any]) -> Forge:
        def write(root: Path) -> None:
            tensors = load_file(root / path)
            name = max(tensors, key=lambda name: tensors[name].numel())
            tensors[name] = act(tensors[name]).contiguous()
            save_file(tensors, root / path, {"format": "pt"})

        return write

    for name, act in {
        "no number": lambda tensor: tensor.log(),
        "bytes": lambda tensor: tensor.byte(),
        "another shape": lambda tensor: tensor.mT,
        "one dimension": lambda tensor: tensor.flatten(),
        "no rows": lambda tensor: tensor[:0],
    }.items():
        yield f"{path}: {name}", change(act)


def _iterate_tokenizers(kind: str, seed: int) -> Iterator[Case]:
    """Yields corpora prepared by a forged `tokenizer.model`."""
    source = "[{name: a, paths: [../in/data/a.jsonl]}]"
    command = (*_TOKENS, "--name", "corpus", "--out", "../out", "--num_workers", "1", "--sources", source)
    path = f"tokenizers/{kind}/tokenizer.model"
    for name, forge in forge_files([path], seed):
        yield Case("family", name, forge, (*command, "--tokenizer", f"../in/tokenizers/{kind}"))
    for number in range(40):
        change = _change_pieces(random.Random(f"{seed} {kind} {number}"))
        yield Case(
            "family",
            f"{path}: change {number}",
            rewrite(Path(path), change),
            (*command, "--tokenizer", f"../in/tokenizers/{kind}"),
        )


def _change_pieces(chooser: random.Random) -> Callable[[bytes], bytes]:
    """Returns an act that puts odd values at places of a SentencePiece model that are drawn."""

    def change(data: bytes) -> bytes:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # noqa: PLC0415 - imported by few cases

        model = ModelProto()
        model.ParseFromString(data)
        for _ in range(chooser.choice((1, 3))):
            piece = chooser.choice(model.pieces)
            match chooser.randrange(7):
                case 0:
                    piece.piece = chooser.choice(("", "a", "\u2581" * 50, "<0xZZ>", "<0x", "x" * 20_000, "\0"))
                case 1:
                    piece.score = chooser.choice((float("nan"), float("inf"), -1e30, 1e30))
                case 2:
                    piece.type = chooser.choice((1, 2, 3, 4, 5, 6))
                case 3:
                    del model.pieces[chooser.randrange(len(model.pieces)) :]
                case 4:
                    spec, name = model.trainer_spec, chooser.choice(("bos_id", "eos_id", "unk_id", "pad_id"))
                    setattr(spec, name, chooser.choice((-1, 0, 2**31 - 1, -(2**31))))
                case 5:
                    model.trainer_spec.model_type = chooser.choice((1, 2, 3, 4))
                case _:
                    charsmap = chooser.choice(
                        (b"", b"\xff" * 8, (2**32 - 1).to_bytes(4, "little"), chooser.randbytes(4096))
                    )
                    model.normalizer_spec.precompiled_charsmap = charsmap
        return bytes(model.SerializeToString())

    return change
