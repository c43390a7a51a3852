"""Tiny models of every causal type that transformers has, each imported and trained, or refused in a line."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from genesis.base.errors import UserError
from genesis.export.foreign import import_foreign
from genesis.generate.load import load_decoder
from genesis.model.foreign.config import TransformersConfig
from genesis.model.foreign.decoder import read_config
from genesis.model.loss import sum_cross_entropy
from genesis.model.recipe import build_decoder_config
from genesis_callbacks.checkpoint import read_manifest

KINDS: Final = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_SIZES: Final[dict[int, tuple[str, ...]]] = {
    64: ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "conv_dim", "attention_hidden_size", "lru_width"),
    96: (
        *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "block_ff_dim"),
        "intermediate_size_mlp",
    ),
    4: (
        *("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"),
        *("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "conv_kernel"),
        *("linear_num_value_heads", "time_step_rank", "mamba_dt_rank"),
    ),
    2: (
        *("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
        *("linear_num_key_heads", "expand", "mamba_expand", "index_n_heads", "num_mem_blocks"),
    ),
    16: (
        *("head_dim", "kv_lora_rank", "v_head_dim", "qk_head_dim", "qk_nope_head_dim", "global_head_dim"),
        *("swa_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"),
        *("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size", "attention_chunk_size"),
        *("index_head_dim", "hidden_size_per_layer_input"),
    ),
    8: (
        *("sliding_window", "attention_window_size", "qk_rope_head_dim", "rotary_dim", "num_heads"),
        *("mamba_n_heads", "mamba_num_heads"),
    ),
    32: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        "expert_ffn_hidden_size",
    ),
    24: ("q_lora_rank",),
    128: ("vocab_size", "vocab_size_per_layer_input"),
    512: (
        *("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length"),
        "index_topk",
    ),
    1: (
        *("n_group", "topk_group", "n_groups", "mamba_n_groups", "n_shared_experts", "num_shared_experts"),
        *("first_k_dense_replace", "moe_layer_interval", "bos_token_id"),
    ),
    0: ("num_kv_shared_layers", "num_memory_tokens", "pad_token_id"),
}
_DROPOUTS: Final = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "layerdrop"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "activation_dropout"),
)
_OWN: Final[dict[str, dict[str, Any]]] = {
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8, "num_heads": 4},
    "jamba": {"mamba_d_state": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}
"""What the sizes of some types must be besides."""
_LENGTHS: Final = (13, 1, 20, 14)
_MAX_LAYERS: Final = 8
_LINE: Final = 150
_SECONDS: Final = 120


def shrink(kind: str) -> Any:
    """Returns a tiny configuration of a type, with every kind of layer that its default has."""
    default = CONFIG_MAPPING[kind]()
    if default.get_text_config(decoder=True) is not default or default.is_encoder_decoder:
        return default  # refused by what it is
    known = set(default.to_dict()) | set(type(default).attribute_map)
    sizes = {name: size for size, names in _SIZES.items() for name in names if name in known}
    layers = list(dict.fromkeys(default.to_dict().get("layer_types") or ()))
    if layers:
        sizes["layer_types"] = (layers * _MAX_LAYERS)[: max(4, len(layers))]
        sizes |= {name: len(sizes["layer_types"]) for name in ("num_hidden_layers", "n_layer") if name in sizes}
    drops = {name: 0.0 for name in _DROPOUTS if name in known}
    return type(default)(**(sizes | drops | _OWN.get(kind, {})))


def try_type(kind: str, directory: Path) -> str:
    """Returns `packed` or `rows` for a model that was imported and trained for a step, else the line of its refusal."""
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = shrink(kind)
            read_config(config.to_dict())
            if config.get_text_config(decoder=True) is not config:
                return "not tried: it also reads images, and these sizes are of one tower"
            torch.manual_seed(0)
            build: Any = AutoModelForCausalLM.from_config
            theirs = build(config, attn_implementation="eager", dtype=torch.float32)
            theirs.save_pretrained(directory / "theirs")
            proof = import_foreign(directory / "theirs", directory / "run", has_tokenizer=False)
            _train_one_step(theirs, directory / "run")
            return str(proof["documents"])
    except UserError as error:
        return f"refused: {str(error).replace(str(directory), '')[:_LINE]}"
    except Exception as error:  # of a configuration that is too small for the type
        return f"not tried: {type(error).__name__}: {' '.join(str(error).split())[:_LINE]}"


def _train_one_step(theirs: Any, run: Path) -> None:
    """Checks the loss and the gradients of a packed row beside those of each document alone, by transformers."""
    checkpoint = run / "checkpoints/step-00000000"
    shape = read_manifest(checkpoint).recipe["model"]["decoder"]
    body = build_decoder_config(shape, "the manifest").body
    assert isinstance(body, TransformersConfig)
    model = load_decoder(checkpoint, allows_body=True).model.requires_grad_(True)
    ids = torch.randint(3, 128, (1, sum(_LENGTHS)), generator=torch.Generator().manual_seed(1))
    documents = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))[None].int()
    labels = torch.cat([torch.cat((one[:, 1:], one.new_full((1, 1), -100)), 1) for one in ids.split(_LENGTHS, 1)], 1)
    head = partial(sum_cross_entropy, labels=labels, softcap=model.softcap)
    loss = model(ids, document_ids=documents, head=head)
    loss.backward()
    wanted = sum(
        cross_entropy(theirs.eval()(input_ids=one, use_cache=False).logits[0, :-1], one[0, 1:], reduction="sum")
        for one in ids.split(_LENGTHS, 1)
        if one.shape[1] > 1
    )
    assert isinstance(wanted, torch.Tensor)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0.0)
    norms = []
    for one in (model, theirs):
        gradients = [parameter.grad for parameter in one.parameters() if parameter.grad is not None]
        norms.append(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt())
    # The table's row of the padding token has a gradient here, and none in transformers.
    torch.testing.assert_close(norms[0], norms[1], rtol=2e-2, atol=0.0)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    with torch.no_grad():
        assert float(model(ids, document_ids=documents, head=head)) < float(loss)


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"{_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
