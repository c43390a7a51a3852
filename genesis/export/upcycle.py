"""Makes a mixture of experts from a dense model: each expert begins as a copy of the dense feed-forward part.

The weights of a token's experts add up to 1, so that the mixture computes what the dense model computes, whatever the
router chooses. This is proved with the mixture's own forward before it is committed. The result is a run's directory,
like that of an import, and its manifest names the checkpoint that it comes from.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from genesis.base.available_memory import available_memory
from genesis.base.errors import RunEndedError, UserError
from genesis.base.progress import stage
from genesis.base.run_directory import RunDirectory
from genesis.export.importing import save_weights
from genesis.export.proof import write_proof
from genesis.export.recipe import write_recipe
from genesis.export.staging import check_is_new, staged
from genesis.generate.checkpoint_reference import verify_shown
from genesis.generate.load import build_empty_decoder, load_tokenizer
from genesis.huggingface.stored import list_nf4_tensors
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.feed_forward import DenseConfig
from genesis.model.initial import INIT_STD, draw_block, fill_normal
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config, read_adapter_config
from genesis.tokenizer.files import write_files
from genesis_callbacks.base.manifest import Ancestor, read_committed_hash
from genesis_callbacks.checkpoint import Manifest
from genesis_callbacks.checkpoint.restore import read_recorded_tensors

TOLERANCE: Final = 1e-4
"""The largest difference of a logit between the mixture and the dense model, relative to the largest logit."""
_STATE_NAME: Final = "weights"
_PROOF_SHAPE: Final = (2, 64)
_MIN_TOP_K: Final = 2
_MAX_SEED: Final = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class UpcycleOptions:
    """Options of the mixture.

    Args:
        num_experts: Number of experts.
        top_k: Number of experts that see a token.
        scores: `softmax` or `sigmoid`.
        num_dense_layers: Number of first layers that stay dense.
        mixture_every: Of the other layers, those whose number is a multiple of this become mixtures.
        has_balance_bias: Whether a bias balances the experts. Mixtral, the export of a Llama's mixture, has none.
        balance_loss: The factor of the balance loss.
        z_loss: The factor of the z-loss.
        noise: The deviation of the noise on each expert's weights, as a share of each weight's deviation.
        seed: The seed of routers and noise.

    Raises:
        UserError: A value is invalid.
    """

    num_experts: int
    top_k: int
    scores: str = "softmax"
    num_dense_layers: int = 0
    mixture_every: int = 1
    has_balance_bias: bool = False
    balance_loss: float = 0.01
    z_loss: float = 0.0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise < 1.0:
            raise UserError(f"noise is {self.noise}: it must be at least 0 and below 1")
        if not 0 <= self.seed <= _MAX_SEED:
            raise UserError(f"seed is {self.seed}: it must be from 0 to {_MAX_SEED}")
        self.build_config(1)
        if self.top_k < _MIN_TOP_K:
            raise UserError(
                f"top_k is {self.top_k}, so that a token's only expert always has the weight 1 and the router learns "
                f"nothing: give {_MIN_TOP_K} or more"
            )

    def build_config(self, ffn_dim: int) -> MixtureConfig:
        """Returns the configuration of the mixture with experts of this width."""
        return MixtureConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            ffn_dim=ffn_dim,
            scores=self.scores,
            num_dense_layers=self.num_dense_layers,
            mixture_every=self.mixture_every,
            dense_ffn_dim=ffn_dim,
            has_balance_bias=self.has_balance_bias,
            balance_loss=self.balance_loss,
            z_loss=self.z_loss,
        )


def upcycle(checkpoint: Path, out: Path, options: UpcycleOptions) -> dict[str, Any]:
    """Creates the run's directory `out` with a mixture made from a dense checkpoint, and returns the report of it.

    The weights are written to mapped files, so that the system may write them back to disk to free memory.

    Args:
        checkpoint: A committed checkpoint of a dense model without adapters.
        out: The run's directory to create; it must not exist.
        options: The options of the mixture.

    Raises:
        UserError: The checkpoint is no dense model, memory or disk have too little space, or `out` exists.
        RunEndedError: The mixture does not give the logits of the dense model. No partial result is left.
    """
    check_is_new(out)
    manifest = verify_shown(checkpoint)
    dense = _read_config(checkpoint, manifest)
    assert isinstance(dense.parts.feed_forward, DenseConfig)
    mixed = replace(dense, ffn_dim=None, feed_forward=options.build_config(dense.parts.feed_forward.ffn_dim))
    tokenizer = load_tokenizer(None, manifest, checkpoint)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(mixed).state_dict().items()}
    num_bytes = sum(shape.numel() for shape in shapes.values()) * torch.float32.itemsize
    _check_memory(num_bytes)
    with staged(out, 2 * num_bytes + num_bytes // 10) as staging:
        held = {name.removeprefix(DECODER_PREFIX): name for name in manifest.tensors if name.startswith(DECODER_PREFIX)}
        found = read_recorded_tensors(checkpoint, manifest, held.values())
        source = {name: found[path] for name, path in held.items()}
        with stage("making the mixture", len(shapes), "tensors") as shown:
            state = {
                name: _build_tensor(source, name, shape, staging / f"{_STATE_NAME}.{number}", options.seed)
                for number, (name, shape) in enumerate(shown.each(shapes.items()))
            }
        with stage("comparing the logits"):
            proof = _prove(checkpoint, _fill(dense, source), _fill(mixed, state), options.seed)
        if options.noise:
            for name, tensor in state.items():
                if _find_dense(name) is not None:
                    _add_noise(tensor, options.noise, f"{options.seed} noise {name}")
            proof["largest_difference_with_noise"] = _compare(_fill(dense, source), _fill(mixed, state), options.seed)
        if tokenizer is not None:
            write_files(tokenizer.files, staging)
        ancestor = Ancestor(
            checkpoint.name,
            read_committed_hash(checkpoint),
            os.path.relpath(checkpoint.absolute().parent, RunDirectory(out.absolute()).checkpoints),
        )
        made = save_weights(state, mixed, tokenizer, RunDirectory(staging).checkpoints, ancestor)
        del state
        for path in staging.glob(f"{_STATE_NAME}.*"):
            path.unlink()
        tokenizer_hash = None if tokenizer is None else tokenizer.hash
        write_recipe(out, staging, str(made.relative_to(staging)), mixed, tokenizer_hash)
        report = {
            "source": {"checkpoint": str(checkpoint.absolute()), "manifest_hash": ancestor.manifest_hash},
            "experts": options.num_experts,
            "top_k": options.top_k,
            "noise": options.noise,
            "seed": options.seed,
            "logits": proof,
        }
        write_proof(staging, report)
    return report


def _read_config(checkpoint: Path, manifest: Manifest) -> DecoderConfig:
    where = f"the recipe in {checkpoint}"
    if read_adapter_config(manifest.recipe, where) is not None:
        raise UserError(
            f"{checkpoint} holds adapters beside a base, which is no dense model: export it with --merge, import the "
            "export, and upcycle that"
        )
    model = manifest.recipe.get("model")
    config = build_decoder_config(model.get("decoder") if isinstance(model, dict) else None, where)
    feed_forward = config.parts.feed_forward
    if type(feed_forward) is not DenseConfig:
        raise UserError(
            f"{checkpoint} is no dense model: its feed-forward part is {type(feed_forward).__name__}; give a dense "
            "checkpoint"
        )
    if feed_forward.activation != "silu":
        raise UserError(
            f"{checkpoint} has feed-forward parts with the activation {feed_forward.activation}, and experts compute "
            "silu alone: give a model with silu, such as a Llama or Qwen3"
        )
    if list_nf4_tensors(manifest):
        raise UserError(f"{checkpoint} is a base in NF4: import the model with --dtype float32, and upcycle that")
    num_tensors = sum(name.startswith(DECODER_PREFIX) for name in manifest.tensors)
    build_empty_decoder(config, num_tensors, checkpoint)
    return config


def _check_memory(num_bytes: int) -> None:
    available = available_memory()
    if available is not None and available < num_bytes:
        raise UserError(
            f"the proof of the logits takes {num_bytes / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are "
            "available: use a larger machine, or fewer experts"
        )


def _find_dense(name: str) -> str | None:
    """Returns the name of the dense tensor that the experts' tensor `name` is made of; None for other tensors.

    >>> _find_dense("blocks.3.feed_forward.experts.gate")
    'blocks.3.feed_forward.gate.weight'
    """
    part, _, last = name.rpartition(".experts.")
    return f"{part}.{last}.weight" if part else None


def _build_tensor(source: Mapping[str, Tensor], name: str, shape: torch.Size, path: Path, seed: int) -> Tensor:
    """Returns a tensor of the mixture: a dense tensor, copies of one in the mapped file `path`, or a router's."""
    if name in source:
        return source[name]
    dense = _find_dense(name)
    if dense is None:
        values = torch.zeros(shape)
        if name.endswith(".weight"):
            fill_normal(values, INIT_STD, f"{seed} {name}")
        return values
    weight = source[dense]
    mapped = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=weight.dtype).view(shape)
    return mapped.copy_(weight.expand(shape))


def _add_noise(stack: Tensor, noise: float, key: str) -> None:
    """Adds noise to each expert's matrix, in place."""
    std = float(stack[0].float().std()) * noise
    for number, matrix in enumerate(stack):
        for start, rows in enumerate(matrix.split(1024)):
            rows.add_(draw_block(tuple(rows.shape), std, f"{key} {number} {start}", 0).to(rows.dtype))


def _fill(config: DecoderConfig, state: Mapping[str, Tensor]) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    # In float32, in which the difference of the sums is small; tensors that are in float32 are not copied.
    decoder.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    return decoder.eval()


@torch.no_grad()
def _compare(dense: Decoder, mixed: Decoder, seed: int) -> float:
    """Returns the largest difference of a logit, relative to the largest logit, on random tokens."""
    config = dense.config
    length = min(_PROOF_SHAPE[1], config.max_seq_len)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (_PROOF_SHAPE[0], length), generator=generator)
    expected = dense(ids)
    return float((mixed(ids) - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _prove(checkpoint: Path, dense: Decoder, mixed: Decoder, seed: int) -> dict[str, float]:
    difference = _compare(dense, mixed, seed)
    if not difference <= TOLERANCE:
        raise RunEndedError(
            f"the mixture made from {checkpoint} gives other logits: the largest difference is {difference:.1e} of the "
            f"largest logit, and at most {TOLERANCE:.0e} is allowed; nothing was written"
        )
    return {"largest_difference": difference, "tolerance": TOLERANCE}
