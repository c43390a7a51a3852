"""The pass over all pairs that computes a reference's log-probabilities before training, or reads those of a file.

The reference's weights take the place of the live ones for the pass, under the wrappers, the sharding and the precision
of the run, and the live ones return afterwards, bit for bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from genesis.base.errors import UserError, numbered
from genesis.data.loader import Ranks
from genesis.data.pair_windows import SomePairWindows
from genesis.data.window import MicroBatch
from genesis.model.adapter import adapters_off, is_adapter_tensor
from genesis.model.language_model import LanguageModel
from genesis.model.recipe import DECODER_PREFIX
from genesis.objectives.reference import ReferenceIdentity, read_log_probs, write_log_probs
from genesis.objectives.vocabulary import Vocabulary
from genesis.strategies.layout import layout_strategy
from genesis.strategies.wrap import free_gathered_parameters
from genesis.train.data_module import CorpusDataModule
from genesis_callbacks.base.local_shards import LocalShard, local_shards
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import (
    CheckpointError,
    Manifest,
    read_manifest,
    verify,
)
from genesis_callbacks.checkpoint.restore import restore_shards
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.phases import in_phase, note_progress


def score_pairs(
    checkpoint: Path,
    directory: Path | None,
    score: Callable[[LanguageModel, MicroBatch, Vocabulary], Tensor],
    *,
    decoder: nn.Module,
    trainer: pl.Trainer,
    data: CorpusDataModule,
) -> Tensor:
    """Returns the scores that a checkpoint gives to all pairs of the corpus, from a file if that has them.

    All ranks call it. It communicates.

    Args:
        checkpoint: The checkpoint.
        directory: Where a run keeps the scores; None to keep them in memory alone.
        score: Returns the scores of the answers of a micro-batch, chosen and rejected in turn.
        decoder: The model, whose weights give way to the checkpoint's for the pass.
        trainer: The trainer of the run.
        data: Its data.

    Raises:
        UserError: The checkpoint cannot be used.
    """
    pairs = data.training.pairs
    assert pairs is not None, "the module has checked the data"
    precision = str(trainer.precision)
    identity = ReferenceIdentity(read_committed_hash(checkpoint), pairs.corpus_hash, precision, len(pairs))
    found = "" if directory is None else read_log_probs(directory / identity.file_name, identity)
    # Every rank reads its own copy of the file, and all of them compute if one has none.
    (num_missing,) = HostGroup().sum((int(isinstance(found, str)),)).wait()
    if num_missing:
        if directory is not None and isinstance(found, str) and (directory / identity.file_name).exists():
            rank_zero_warn(f"{found}; its log-probabilities are computed again")
        with in_phase(trainer, "reference"):
            found = _compute(checkpoint, score, decoder, trainer, data)
        if directory is not None and trainer.is_global_zero:
            write_log_probs(directory / identity.file_name, identity, found)
    assert isinstance(found, Tensor)
    return found


def _compute(
    checkpoint: Path,
    score: Callable[[LanguageModel, MicroBatch, Vocabulary], Tensor],
    decoder: nn.Module,
    trainer: pl.Trainer,
    data: CorpusDataModule,
) -> Tensor:
    """Returns the log-probabilities of all pairs, the same on every rank."""
    pairs, sequence_format = data.training.pairs, data.training.sequence_format
    assert pairs is not None
    pairs.check_lengths(sequence_format.seq_len)
    rank_zero_info(f"computing the log-probabilities of {numbered(len(pairs), data.training.kind)} under {checkpoint}")
    layout, device = layout_strategy(trainer.strategy).layout, trainer.strategy.root_device
    windows = SomePairWindows(
        pairs,
        range(len(pairs)),
        sequence_format,
        data.training.options.micro_batch_size,
        Ranks(layout.data_rank, layout.data_world_size),
        is_padded=data.pads_pairs,
    )
    # The last row is for the pairs that a last window lacks.
    table = torch.zeros((len(pairs) + 1, 2), device=device)
    with _weights_of(checkpoint, decoder, is_reader=trainer.is_global_zero):
        for index in range(len(windows)):
            (micro_batch,) = windows.window(index).to(device).micro_batches
            with trainer.precision_plugin.forward_context():
                vocabulary = layout_strategy(trainer.strategy).vocabulary.bounded(decoder.softcap)  # type: ignore[arg-type]  # FSDP changes the class
                found = score(decoder, micro_batch, vocabulary)  # type: ignore[arg-type]
            table[micro_batch.extra["pairs"]] = found.view(-1, 2)
            note_progress(trainer)
        free_gathered_parameters(decoder)
    # Each pair is on one rank, and 0 on the others.
    summed = table[:-1].double()
    if dist.is_initialized():
        dist.all_reduce(summed, group=layout.token_process_group)
    return summed.float().cpu()


@contextmanager
def _weights_of(checkpoint: Path, decoder: nn.Module, *, is_reader: bool) -> Iterator[None]:
    """Replaces the decoder's weights by those of a checkpoint for the duration of the block."""
    try:
        # One rank reads all files; another of the same node would read them again.
        manifest = verify(checkpoint, "full") if is_reader else read_manifest(checkpoint)
        live = list(_list_shards(decoder, manifest, checkpoint))
        kept = [local.data.detach().to("cpu", copy=True) for local in live]
        replaces_adapters = any(is_adapter_tensor(local.part.name) for local in live)
        try:
            restore_shards(checkpoint, manifest, live)
            if replaces_adapters:
                yield
            else:
                with adapters_off(decoder):
                    yield
        finally:
            with torch.no_grad():
                for local, data in zip(live, kept, strict=True):
                    local.data.copy_(data)
    except CheckpointError as error:
        raise UserError(f"the reference {checkpoint} cannot be used: {error}") from None


def _name_elsewhere(decoder: Any) -> Iterator[str]:
    """Yields the names of the parameters of blocks that other ranks of a pipeline hold."""
    for number, block in decoder.blocks_elsewhere.items():
        yield from (f"{DECODER_PREFIX}blocks.{number}.{name}" for name, _ in block.named_parameters())


def _list_shards(decoder: nn.Module, manifest: Manifest, checkpoint: Path) -> Iterator[LocalShard]:
    """Yields this rank's parts of the parameters that the reference replaces."""
    names = {name: DECODER_PREFIX + name for name, _ in decoder.named_parameters()}
    known = {*names.values(), *_name_elsewhere(decoder)}
    lost = next((name for name in manifest.tensors if is_adapter_tensor(name) and name not in known), None)
    if lost is not None:
        raise UserError(
            f"the reference {checkpoint} has an adapter ({lost}) that this run has not: give a checkpoint without "
            "adapters, or one with the same"
        )
    replaces_adapters = any(is_adapter_tensor(name) for name in manifest.tensors)
    for name, parameter in decoder.named_parameters():
        if not is_adapter_tensor(name) or replaces_adapters:
            yield from local_shards(names[name], parameter, "parameter")
