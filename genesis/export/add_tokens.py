"""Adds special tokens to a model: to its tokenizer, and as rows to its embedding and its output weight.

The result is a run's directory, like that of an import: one committed checkpoint of the weights, whose manifest names
the checkpoint that they come from. All other tensors, and the rows of all other tokens, stay bit for bit.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.base.run_directory import RunDirectory
from genesis.export.importing import save_weights
from genesis.export.proof import write_proof
from genesis.export.recipe import write_recipe
from genesis.export.staging import check_is_new, staged
from genesis.export.texts import SCRIPTS
from genesis.generate.checkpoint_reference import verify_shown
from genesis.generate.load import build_empty_decoder, load_tokenizer
from genesis.huggingface.family import OUTPUT_WEIGHT
from genesis.model.decoder import DecoderConfig, refuse_body
from genesis.model.initial import draw_block
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config, read_adapter_config
from genesis.model.scores import refuse_scores
from genesis.tokenizer.addition import TokenAddition
from genesis.tokenizer.files import write_files
from genesis.tokenizer.open import extend_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.manifest import Ancestor, read_committed_hash
from genesis_callbacks.checkpoint import Manifest, read_manifest
from genesis_callbacks.checkpoint.restore import read_recorded_tensors

EMBEDDING: Final = "embedding.weight"
NOISE: Final = 0.01
"""The deviation of a new row from the mean, as a share of the deviation of the existing rows."""
_STATE_NAME: Final = "weights"
_BLOCK_ROWS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class AddTokensOptions:
    """Options of the new rows.

    Args:
        multiple_of: The number of rows is rounded up to a multiple of this.
        seed: The seed of the new rows.
        tokenizer: The model's tokenizer, as a file or a directory; None for the checkpoint's own.

    Raises:
        UserError: A value is invalid.
    """

    multiple_of: int = 1
    seed: int = 0
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise UserError(f"multiple_of is {self.multiple_of}: it must be at least 1")


def add_tokens(checkpoint: Path, out: Path, addition: TokenAddition, options: AddTokensOptions) -> dict[str, Any]:
    """Creates the run's directory `out` with a checkpoint that has more tokens, and returns the report of it.

    The weights are read one tensor at a time into a mapped file, so that the command takes little memory.

    Args:
        checkpoint: A committed checkpoint without adapters.
        out: The run's directory to create; it must not exist.
        addition: The tokens, and what changes with them in the tokenizer.
        options: The options of the new rows.

    Raises:
        UserError: The checkpoint has adapters or no tokenizer, the tokenizer cannot have the tokens, the disk has too
            little space, or `out` exists. No partial result is left.
    """
    check_is_new(out)
    manifest = verify_shown(checkpoint)
    config = _read_config(checkpoint, manifest)
    tokenizer = load_tokenizer(options.tokenizer, manifest, checkpoint)
    if tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer to which tokens could be added; give one by --tokenizer")
    extended = extend_tokenizer(tokenizer, addition)
    _check_same_ids(tokenizer, extended)
    num_rows = max(config.vocab_size, -(-extended.vocab_size // options.multiple_of) * options.multiple_of)
    wider = replace(config, vocab_size=num_rows)
    new_rows = _name_new_rows(tokenizer, extended, config, num_rows)
    records = {
        name.removeprefix(DECODER_PREFIX): record
        for name, record in manifest.tensors.items()
        if name.startswith(DECODER_PREFIX)
    }
    num_bytes = sum(torch.Size(record.shape).numel() * record.torch_dtype.itemsize for record in records.values())
    num_bytes += (num_rows - config.vocab_size) * config.dim * 2 * torch.float32.itemsize
    with staged(out, 2 * num_bytes + num_bytes // 10) as staging:
        with stage("copying the weights", len(records), "tensors") as shown:
            state = {
                name: _map_tensor(
                    read_recorded_tensors(checkpoint, manifest, [DECODER_PREFIX + name])[DECODER_PREFIX + name],
                    staging / f"{_STATE_NAME}.{number}",
                    num_rows=num_rows if name in (EMBEDDING, OUTPUT_WEIGHT) else None,
                )
                for number, name in enumerate(shown.each(records))
            }
        for name in state.keys() & {EMBEDDING, OUTPUT_WEIGHT}:
            fill_rows(state[name], new_rows, num_used=tokenizer.vocab_size, key=f"{options.seed} {name}")
        write_files(extended.files, staging)
        ancestor = Ancestor(
            checkpoint.name,
            read_committed_hash(checkpoint),
            os.path.relpath(checkpoint.absolute().parent, RunDirectory(out.absolute()).checkpoints),
        )
        made = save_weights(state, wider, extended, RunDirectory(staging).checkpoints, ancestor)
        _check_unchanged(made, manifest, state.keys() & {EMBEDDING, OUTPUT_WEIGHT})
        del state
        for path in staging.glob(f"{_STATE_NAME}.*"):
            path.unlink()
        write_recipe(out, staging, str(made.relative_to(staging)), wider, extended.hash)
        report = {
            "source": {"checkpoint": str(checkpoint.absolute()), "manifest_hash": ancestor.manifest_hash},
            "added_tokens": {
                extended.pieces[token]: token for token in range(tokenizer.vocab_size, extended.vocab_size)
            },
            "num_rows": {"before": config.vocab_size, "after": num_rows},
            "seed": options.seed,
            "tokenizer": {"before": tokenizer.hash, "after": extended.hash},
        }
        write_proof(staging, report)
    return report


def _read_config(checkpoint: Path, manifest: Manifest) -> DecoderConfig:
    where = f"the recipe in {checkpoint}"
    if read_adapter_config(manifest.recipe, where) is not None:
        raise UserError(
            f"{checkpoint} holds adapters beside a base: add tokens to the base, and train new adapters beside the "
            "result; or export with --merge, import that, and add tokens to the import"
        )
    model = manifest.recipe.get("model")
    config = build_decoder_config(model.get("decoder") if isinstance(model, dict) else None, where)
    refuse_body(config)  # its embedding has a name that is not ours
    refuse_scores(config, checkpoint)  # tokens are added before it begins
    num_tensors = sum(name.startswith(DECODER_PREFIX) for name in manifest.tensors)
    build_empty_decoder(config, num_tensors, checkpoint)
    return config


def _check_same_ids(tokenizer: Tokenizer, extended: Tokenizer) -> None:
    for text in SCRIPTS.values():
        if tokenizer.encode(text) != extended.encode(text):
            raise UserError(f"tokens cannot be added to this tokenizer: the ids of the text {text[:40]!r} would change")


def _name_new_rows(tokenizer: Tokenizer, extended: Tokenizer, config: DecoderConfig, num_rows: int) -> dict[int, str]:
    """Returns the rows to fill, each with a name from which its values follow: new tokens, and rows without a token.

    Rows that a model has in advance, and that new tokens take, were never trained and are filled, too.
    """
    tokens = {token: extended.pieces[token] for token in range(tokenizer.vocab_size, extended.vocab_size)}
    return tokens | {row: f"row {row}" for row in range(max(config.vocab_size, extended.vocab_size), num_rows)}


def _map_tensor(tensor: Tensor, path: Path, *, num_rows: int | None) -> Tensor:
    """Returns a copy of a tensor in the mapped file `path`, which is created, with the given number of rows."""
    shape = tensor.shape if num_rows is None else (num_rows, *tensor.shape[1:])
    size = torch.Size(shape).numel()
    mapped = torch.from_file(str(path), shared=True, size=size, dtype=tensor.dtype).view(shape)
    mapped[: len(tensor)].copy_(tensor)
    return mapped


def fill_rows(weight: Float[Tensor, "V D"], rows: Mapping[int, str], *, num_used: int, key: str) -> None:
    """Fills rows with the mean of the rows that are used, plus a little noise, in place.

    A mean row gives a new token a probability that the model gives to an average token, so that the probabilities of
    other tokens hardly change. The values depend on the row's name and not on its number.

    Args:
        weight: The embedding or the output weight.
        rows: The rows to fill, and their names.
        num_used: The number of rows from the first one on that belong to tokens.
        key: The seed and the tensor's name.

    References:
        Hewitt, Initializing New Word Embeddings for Pretrained Language Models (2021).
    """
    blocks = torch.split(weight[:num_used], _BLOCK_ROWS)  # in float64, the whole weight could exceed the memory
    mean = sum((block.double().sum(dim=0) for block in blocks), torch.zeros(())) / num_used
    squares = sum(((block.double() - mean).square().sum(dim=0) for block in blocks), torch.zeros(()))
    std = (squares / max(1, num_used - 1)).sqrt()
    for row, name in rows.items():
        noise = draw_block((1, weight.shape[1]), NOISE, f"{key} {name}", 0)[0]
        weight[row].copy_(mean + noise.double() * std)


def _check_unchanged(made: Path, source: Manifest, changed: set[str]) -> None:
    """Checks by their digests that all tensors without new rows are those of the source."""
    for name, record in read_manifest(made).tensors.items():
        if name.removeprefix(DECODER_PREFIX) not in changed:
            is_same = record.digest == source.tensors[name].digest
            assert is_same, f"{name} has changed"
