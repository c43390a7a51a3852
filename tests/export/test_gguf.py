"""A GGUF file has every tensor, key and token of the checkpoint, and llama.cpp computes with it what we compute."""

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, TokenType, dequantize
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from genesis.base.errors import UserError
from genesis.export import gguf
from genesis.export.export import ExportOptions
from genesis.export.gguf import export_gguf
from genesis.export.gguf_layout import ARCHITECTURES, find_architecture
from genesis.export.gguf_tokenizer import PRE_TOKENIZERS
from genesis.export.importing import import_directory
from genesis.export.texts import SCRIPTS
from genesis.huggingface.shape import FAMILIES, find_family
from genesis.model.attention import AttentionConfig, RopeScaling
from genesis.model.decoder import DecoderConfig, Scales
from genesis.model.feed_forward import DenseConfig
from genesis.model.norm import NormConfig
from tests.export.test_families import LLAMA3, SCALED, SHAPE, YARN

EXPRESSIONS = {name: expressions[0] for (expressions, _), name in PRE_TOKENIZERS.items()}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320
WIDE = SHAPE | {
    **{"vocab_size": VOCAB_SIZE + 8, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"max_position_embeddings": 512, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHARED_EXPERTS = {
    **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
}
LATENTS = {
    **{"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6},
}
LINEAR = {
    **{"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
    **{"linear_value_head_dim": 32, "full_attention_interval": 2},
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
GEMMA3 = {
    **{"num_hidden_layers": 7, "sliding_window": 40, "head_dim": 32, "query_pre_attn_scalar": 32},
    "tie_word_embeddings": True,
}
GPT_OSS = {
    **{"num_hidden_layers": 3, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40},
    "rope_parameters": YARN | {"truncate": True},
}


def divide_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the positions of a model whose layers with a window have plain ones."""
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral, yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32, "norm_topk_prob": False}),
    "granite": ("granite", SCALED | {"logits_scaling": 0.5}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "ministral3": ("ministral3", {"head_dim": 32, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "gemma3_text, linear": ("gemma3_text", GEMMA3 | {"rope_parameters": divide_rope(LINEAR_ROPE)}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 40}),
    "olmo3, yarn": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 40, "rope_parameters": divide_rope(YARN)}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 32}),
    "olmo2": ("olmo2", {"tie_word_embeddings": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "dots1": ("dots1", SHARED_EXPERTS | {"num_key_value_heads": 4, "sliding_window": None}),
    "glm4_moe": ("glm4_moe", SHARED_EXPERTS | {"n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "deepseek_v3": (
        "deepseek_v3",
        SHARED_EXPERTS | LATENTS | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    ),
    "qwen3_5_text": ("qwen3_5_text", LINEAR),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32}),
}

SCALING = RopeScaling(8.0, original_seq_len=64, kind="yarn")
GEMMA_PARTS: dict[str, Any] = {
    "norm": NormConfig(1e-6, placement="both", has_offset=True),
    "feed_forward": DenseConfig(96, "gelu_tanh"),
    "scales": Scales(embedding=8.0),
}
GEMMA: dict[str, Any] = {
    **{"qk_norm": "head", "qk_norm_has_offset": True, "sliding_window": 8, "window_layers": (0, 1, 2, 3)},
    "window_rope_theta": 1e4,
}
REFUSED = {"deepseek_v2", "ministral", "phi3"}
"""The families of which no GGUF is written."""


def build_model(model_type: str, changes: Mapping[str, Any]) -> Any:
    """Returns a random model with weights that decide: no zeros and no ones, which would hide a mistake."""
    torch.manual_seed(0)
    shape: Any = AutoConfig.for_model(model_type, **(WIDE | changes))
    model = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model


def write_tokenizer(directory: Path, expression: str) -> None:
    """Writes a tokenizer over bytes as Qwen's, with a token that is text and with a chat template."""
    built = Tokenizer(models.BPE())
    built.normalizer = normalizers.NFC()
    pre = [pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    built.pre_tokenizer = pre_tokenizers.Sequence(pre)
    built.decoder = decoders.ByteLevel()
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1, special_tokens=ends, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(SCRIPTS.values(), trainer)
    built.add_tokens(["<tool_call>"])
    built.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[2], "pad_token": ends[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))


def import_model(
    directory: Path, model_type: str, changes: Mapping[str, Any], *, has_tokenizer: bool = True
) -> tuple[Any, Path]:
    model = build_model(model_type, changes)
    model.save_pretrained(directory / "theirs")
    if has_tokenizer:
        # transformers opens the tokenizer of some families as one of its own, which splits in this way.
        write_tokenizer(directory / "theirs", EXPRESSIONS["qwen35" if model_type.startswith("qwen3_5") else "qwen2"])
    import_directory(directory / "theirs", directory / "run", has_tokenizer=has_tokenizer, compares_models=False)
    return model, directory / "run/checkpoints/step-00000000"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return import_model(tmp_path_factory.mktemp("llama"), *MODELS["llama 3.1"])


def write(checkpoint: Path, out: Path, kind: str, *, asks_llama_cpp: bool = False, **options: Any) -> dict[str, Any]:
    return export_gguf([checkpoint], out, ExportOptions("gguf", kind, compares_models=asks_llama_cpp, **options))


def read(directory: Path) -> GGUFReader:
    (file,) = directory.glob("*.gguf")
    return GGUFReader(file)


def turn(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns rows as llama.cpp rotates them: neighbours where transformers has the halves of a head."""
    width = len(weight) // num_heads
    rows = []
    for head in range(num_heads):
        for pair in range(width // 2):
            rows += [weight[head * width + pair], weight[head * width + width // 2 + pair]]
    return torch.stack(rows)


@pytest.fixture(scope="session")
def whole_file(llama: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "tiny"
    write(llama[1], out, "f32")
    return out


def test_every_tensor_and_key_of_the_file_is_the_models(llama: tuple[Any, Path], whole_file: Path) -> None:
    model, checkpoint = llama
    proof = json.loads((whole_file / "proof.json").read_bytes())
    held = read(whole_file)
    assert [path.name for path in sorted(whole_file.iterdir())] == ["README.md", "proof.json", "tiny-F32.gguf"]
    state = model.state_dict()
    wanted = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    names = {
        **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
        **{"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"},
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(2):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            num_heads = {"attn_q": 4, "attn_k": 2}.get(ours)
            wanted[f"blk.{layer}.{ours}.weight"] = weight if num_heads is None else turn(weight, num_heads)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in held.tensors}
    frequencies = 1.0 / 500_000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = frequencies / model.model.rotary_emb.inv_freq
    torch.testing.assert_close(tensors.pop("rope_freqs.weight"), factors, rtol=1e-5, atol=0.0)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], weight) for name, weight in wanted.items())
    assert proof["weights"]["num_values"] == sum(weight.numel() for weight in wanted.values()) + 8
    keys = {key: field.contents() for key, field in held.fields.items()}
    for key, value in {
        **{"general.architecture": "llama", "general.name": "tiny", "general.file_type": 0},
        **{"llama.block_count": 2, "llama.context_length": 512, "llama.embedding_length": 64},
        **{"llama.feed_forward_length": 96, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2},
        **{"llama.attention.key_length": 16, "llama.rope.dimension_count": 16, "llama.rope.freq_base": 500_000.0},
        **{"llama.vocab_size": VOCAB_SIZE + 8, "tokenizer.ggml.add_bos_token": False},
    }.items():
        assert keys[key] == value, key
    assert keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert checkpoint.name in keys["general.version"]


def test_the_tokenizer_of_the_file_has_every_token_merge_and_the_template(
    llama: tuple[Any, Path], whole_file: Path
) -> None:
    keys = {key: field.contents() for key, field in read(whole_file).fields.items()}
    content = json.loads((llama[1].parents[1] / "tokenizer.json").read_bytes())
    pieces, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert {piece: token for token, piece in enumerate(pieces[:VOCAB_SIZE])} == {
        **content["model"]["vocab"],
        "<tool_call>": VOCAB_SIZE - 1,
    }
    assert [pieces[token] for token, kind in enumerate(kinds) if kind == TokenType.CONTROL] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert [pieces[token] for token, kind in enumerate(kinds) if kind == TokenType.USER_DEFINED] == ["<tool_call>"]
    assert [kind for kind in kinds if kind == TokenType.UNUSED] == [TokenType.UNUSED] * 8
    assert len(set(pieces)) == len(pieces) == VOCAB_SIZE + 8
    assert keys["tokenizer.ggml.merges"] == [" ".join(pair) for pair in content["model"]["merges"]]
    named = ("model", "pre", "eos_token_id", "padding_token_id")
    assert [keys[f"tokenizer.ggml.{name}"] for name in named] == ["gpt2", "qwen2", 2, 0]
    assert keys["tokenizer.chat_template"] == TEMPLATE


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        *(("q8_0", 0.01), ("q4_0", 0.12)),
        *(
            pytest.param(kind, most, marks=pytest.mark.slow)
            for kind, most in {"f16": 1e-3, "bf16": 4e-3, "q5_1": 0.04, "q5_0": 0.06, "q4_1": 0.09}.items()
        ),
    ],
)
def test_matrices_have_the_type_that_is_asked_for_and_vectors_do_not(
    kind: str, most: float, llama: tuple[Any, Path], whole_file: Path, tmp_path: Path
) -> None:
    write(llama[1], tmp_path / "tiny", kind)
    whole = {tensor.name: tensor for tensor in read(whole_file).tensors}
    wanted = GGMLQuantizationType[kind.upper()]
    of_output = GGMLQuantizationType.Q8_0 if kind[:2] in ("q4", "q5") else wanted
    for tensor in read(tmp_path / "tiny").tensors:
        is_matrix = len(tensor.shape) > 1
        expected = of_output if tensor.name == "token_embd.weight" else wanted  # it is the output, too
        assert tensor.tensor_type == (expected if is_matrix else GGMLQuantizationType.F32)
        values, exact = dequantize(tensor.data, tensor.tensor_type), whole[tensor.name].data
        error = np.linalg.norm(values - exact) / np.linalg.norm(exact)
        assert error < (most if is_matrix else 1e-12)
        assert error > 0 or not is_matrix


@pytest.mark.slow
def test_a_tokenizer_of_sentencepiece_has_its_scores_and_its_bytes(checkpoint: Path, tmp_path: Path) -> None:
    proof = write(checkpoint, tmp_path / "tiny", "f32", asks_llama_cpp=find_spec("xllamacpp") is not None)
    keys = {key: field.contents() for key, field in read(tmp_path / "tiny").fields.items()}
    kinds = keys["tokenizer.ggml.token_type"]
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_bos_token"]
    assert not keys["tokenizer.ggml.add_space_prefix"]
    assert kinds[:4] == [TokenType.CONTROL, TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    assert kinds.count(TokenType.BYTE) == 256
    ranks = sorted({-score for score in keys["tokenizer.ggml.scores"]})  # of merges, and one more for all others
    assert ranks == [float(rank) for rank in range(len(ranks))]
    assert len(ranks) > 10
    assert "tokenizer" not in proof or proof["tokenizer"]["num_different"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"attention": AttentionConfig(4, 2, sliding_window=8)},
            "llama.cpp's llama would compute something else, because attention.sliding_window is 8",
        ),
        ({"attention": AttentionConfig(4, 2, no_rope_every=3)}, "no_rope_layer_interval 4 only, and this one has 3"),
        (
            {
                "attention": AttentionConfig(
                    4, 2, qk_norm="head", head_dim=16, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)
                )
            },
            "attention.rope_scaling.kind is 'llama3'",
        ),
        (
            {"attention": AttentionConfig(4, 2, has_qkv_bias=True, head_dim=32)},
            "has attention_width and hidden_size of one size, and the model 128 and 64",
        ),
        *(
            ({"attention": AttentionConfig(4, 2, rope_scaling=scaling)}, f"rope_scaling.{words}")
            for words, scaling in {
                "beta_fast is 16.0": replace(SCALING, beta_fast=16.0),
                "has_whole_bounds is False": replace(SCALING, has_whole_bounds=False),
                "kind is 'dynamic'": replace(SCALING, kind="dynamic"),
            }.items()
        ),
        (
            {"attention": AttentionConfig(4, 2, rope_scaling=SCALING, query_growth=0.1, sliding_window=8)},
            "mistral3 would compute something else, because attention.sliding_window is 8",
        ),
        ({"attention": AttentionConfig(4, 2, rotary_dim=8)}, "no GGUF can be written of phi3"),
        (
            {"attention": AttentionConfig(4, 2, sliding_window=8, window_layers=(0,))},
            "no GGUF can be written of ministral",
        ),
        *(
            (GEMMA_PARTS | {"attention": AttentionConfig(4, 2, **options)}, words)
            for options, words in (
                (
                    GEMMA | {"window_layers": (0, 1)},
                    "attention.window_layers is .0, 1., and not all layers but each 6th",
                ),
                (GEMMA | {"window_rope_theta": 5e3}, "attention.window_rope_theta is 5000.0, and not 10000.0"),
                (GEMMA | {"window_rope_theta": None}, "attention.window_rope_theta is None, and not 10000.0"),
                (GEMMA | {"softmax_scale": 0.2}, r"attention.softmax_scale is 0.2, and not 1 / sqrt\(16\)"),
            )
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused_with_the_way_that_works(
    changes: dict[str, Any], words: str
) -> None:
    shape: dict[str, Any] = {"vocab_size": 90, "dim": 64, "num_layers": 4, "max_seq_len": 512}
    plain = {"norm": NormConfig(1e-6), "feed_forward": DenseConfig(96)}
    config = DecoderConfig(**(shape | plain | changes))
    with pytest.raises(UserError, match=words) as error:
        find_architecture(find_family(config), config)
    assert "leave out --gguf" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_a_family_as_we_do(
    name: str, llama: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prover = pytest.importorskip("genesis.export.prove_llama_cpp")
    # In this process; `test_a_tokenizer_of_sentencepiece_has_its_scores_and_its_bytes` starts one.
    monkeypatch.setattr(gguf, "run_proof_of", lambda request, _: prover._prove(request))
    if name not in ("llama 3.1", "qwen3_5_text"):  # the others have the tokenizer of one of these
        monkeypatch.setattr(prover, "compare_tokenizers", lambda *_, **options: {})
    has_tokenizer = name.startswith("qwen3_5")
    given = {} if has_tokenizer else {"tokenizer": llama[1].parents[1], "may_be_unproved": True}
    _, checkpoint = import_model(tmp_path, *MODELS[name], has_tokenizer=has_tokenizer)
    proof = write(checkpoint, tmp_path / "tiny", "f32", asks_llama_cpp=True, **given)
    scored = proof["llama_cpp"]
    assert scored["num_same_choice"] >= scored["num_places"] - 1
    assert scored["loss"] == pytest.approx(scored["loss_of_the_checkpoint"], abs=1e-3)
    assert proof["tokenizer"]["num_different"] == 0
    assert proof["chat"]["is_equal"]
    assert proof["generation"]["num_equal"] == proof["generation"]["num_tokens"] > 0


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q5_1", "q4_1", "q4_0"])
def test_rows_in_a_wrong_order_are_no_rounding_of_a_type(
    kind: str, llama: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    prover = pytest.importorskip("genesis.export.prove_llama_cpp")

    def prove_here(request: dict[str, Any], _: str) -> dict[str, Any]:
        """Proves in this process, which has the wrong table: the bytes are then those that it gives."""
        return {"status": prover.main([json.dumps(request)])}

    monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], turns_neighbours=False))
    monkeypatch.setattr(gguf, "run_proof_of", prove_here)
    write(llama[1], tmp_path / "tiny", kind, asks_llama_cpp=True)
    problem = json.loads(capsys.readouterr().out.splitlines()[-1])["problem"]
    assert f"more than rounding in {kind} explains" in problem


def test_every_family_has_an_architecture_or_is_known_to_have_none() -> None:
    written = {family.model_type for family in FAMILIES if family.is_written}
    assert written - ARCHITECTURES.keys() == REFUSED
    assert {model_type for model_type, _ in MODELS.values()} == written - REFUSED
