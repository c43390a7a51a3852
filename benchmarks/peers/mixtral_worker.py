"""transformers' Mixtral of the workload's shape, in the loop of all contenders of the benchmark `experts`.

The argument after the number of ranks is the implementation of the experts: `grouped_mm` or `eager`.
"""

import sys

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.workers.experts_loop import Trained, run
from benchmarks.workers.protocol import Workload
from genesis.data.window import MicroBatch


def build_mixtral(workload: Workload, arguments: list[str]) -> Trained:
    """Returns a model of the workload's shape, its weights random, with fused AdamW."""
    shape = workload.decoder
    mixture = shape["feed_forward"]["init_args"]
    config = MixtralConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["dim"],
        intermediate_size=mixture["ffn_dim"],
        num_local_experts=mixture["num_experts"],
        num_experts_per_tok=mixture["top_k"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        max_position_embeddings=shape["max_seq_len"],
        rms_norm_eps=shape["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=shape["has_tied_embeddings"],
        output_router_logits=False,
        attn_implementation="sdpa",
        experts_implementation=arguments[0],
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    options = workload.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options["lr"],
        betas=tuple(options["betas"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        fused=True,
    )

    def compute_loss(wrapped: nn.Module, micro_batch: MicroBatch) -> Tensor:
        # The rows are one token longer in our labels; its own shift leaves out the last one.
        num_tokens = micro_batch.labels.numel()
        loss: Tensor = wrapped(input_ids=micro_batch.input_ids, labels=micro_batch.input_ids).loss
        return loss * num_tokens

    return Trained(model, optimizer, compute_loss)


if __name__ == "__main__":
    run(build_mixtral, sys.argv[1:], ["torch", "transformers"])
