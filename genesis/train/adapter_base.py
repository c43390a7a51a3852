"""The base checkpoint of a run with adapters, and the tensors that each save leaves out because the base has them."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from genesis.base.errors import UserError, check_is_named
from genesis.generate.checkpoint_reference import LATEST, Reference, read_reference
from genesis.huggingface.peft import fingerprint, read_adapters
from genesis.huggingface.shape import find_names
from genesis.huggingface.stored import is_of_nf4, list_nf4_tensors
from genesis.model.adapter import ADAPTER_TENSORS, EXTRA_TENSORS, MAGNITUDE, AdapterConfig, BaseFormat, attach_adapters
from genesis.model.decoder import DecoderConfig, build_model
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config
from genesis_callbacks.base.manifest import BaseReference, read_committed_hash
from genesis_callbacks.base.run_directory import is_checkpoint_name
from genesis_callbacks.checkpoint import (
    Manifest,
    SaveScope,
    list_committed,
    read_manifest,
)
from genesis_callbacks.checkpoint.tensor_places import find_base

_HASH_SHOWN = 23


class AdapterBase(NamedTuple):
    """The checkpoint whose weights adapters change.

    Args:
        path: The checkpoint's directory, as an absolute path.
        manifest_hash: The hash of the checkpoint's manifest, by which the saves refer to it.
        format: How the checkpoint stores its weights.
    """

    path: Path
    manifest_hash: str
    format: BaseFormat


def find_adapter_base(given: str | None, continued: Path | None) -> AdapterBase:
    """Returns the base of a run with adapters.

    Args:
        given: The base in the recipe, if there is one.
        continued: The checkpoint that the run starts from, if any: either a checkpoint with adapters, whose base is
            used, or the base itself.

    Raises:
        UserError: No checkpoint is named, the checkpoint has no decoder, it cannot be a base, or it is not the base of
            the adapters that the run continues with.
    """
    check_is_named(given, "model.adapter.base")
    manifest = None if continued is None else read_manifest(continued)
    recorded = None if manifest is None else manifest.base
    if given is None and continued is None:
        raise UserError(
            "model.adapter has no base: give model.adapter.base, or --ckpt_path, a checkpoint or the run of an import, "
            "whose weights stay frozen beside the adapters"
        )
    if recorded is not None:
        assert continued is not None
        path = _find_recorded(given, continued, recorded)
    elif given is not None:
        path = read_reference(given).find_checkpoint(level="quick")
    else:
        assert continued is not None
        path = continued
    found = read_manifest(path)
    if found.base is not None:
        raise UserError(
            f"{path} holds adapters itself, and cannot be the base of others: give its base {found.base.path}, or "
            "export it with --merge and import that"
        )
    return AdapterBase(path.resolve(), read_committed_hash(path), read_format(path, found))


def _read_there(given: str) -> Reference | None:
    """Returns what a recipe's base refers to; None if nothing is there, because it was moved since."""
    path = Path(given)
    if not path.exists() and is_checkpoint_name(path.name):
        return None
    try:
        return read_reference(given)  # a step of a run, too: RUN/STEP is no path
    except UserError:
        return None


def _find_recorded(given: str | None, continued: Path, recorded: BaseReference) -> Path:
    """Returns the directory of the base that a checkpoint refers to, and rejects any other base."""
    reference = None if given is None else _read_there(given)
    if reference is None:
        return find_base(continued, recorded)[0]
    if reference.kind == "run" and reference.selector in (None, LATEST):
        # A run may have continued since its newest checkpoint became the base.
        for path, _ in list_committed(reference.path):
            if read_committed_hash(path) == recorded.manifest_hash:
                return path
    path = reference.find_checkpoint(level="quick")
    found = read_committed_hash(path)
    if found != recorded.manifest_hash:
        was_nf4 = any(is_of_nf4(name) for name in recorded.names)
        kind = "in NF4" if was_nf4 else "not in NF4"
        other = f" {kind}" if bool(list_nf4_tensors(read_manifest(path))) != was_nf4 else ""
        raise UserError(
            f"model.adapter.base is {path} with manifest {found[:_HASH_SHOWN]}, and the adapters in {continued} belong "
            f"to the base {recorded.path}{other} with manifest {recorded.manifest_hash[:_HASH_SHOWN]}: give that base, "
            "or train new adapters in another run_dir"
        )
    return path


def read_start(config: AdapterConfig, decoder_config: DecoderConfig, base: AdapterBase) -> dict[str, Tensor]:
    """Returns the adapters in PEFT's format that a run starts with, by our names; empty without `config.start`.

    Raises:
        UserError: The adapters cannot be read, differ from those of the recipe, or belong to another base.
    """
    if config.start is None:
        return {}
    with torch.device("meta"):
        decoder = build_model(decoder_config)
        attach_adapters(decoder, config, base.format)
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder.named_parameters() if tensor.requires_grad}
    family = find_names(decoder_config)
    made = fingerprint(read_manifest(base.path), DECODER_PREFIX)
    return read_adapters(Path(config.start), config, family, shapes=shapes, base_fingerprint=made)


def read_format(path: Path, manifest: Manifest) -> BaseFormat:
    """Returns how a checkpoint stores the weights of its decoder.

    Args:
        path: The checkpoint's directory.
        manifest: Its manifest.

    Raises:
        UserError: Adapters cannot be trained beside it.
    """
    of_bytes = list_nf4_tensors(manifest)
    dtypes = _find_dtypes(manifest, of_bytes)
    if len(dtypes) > 1 and torch.float32 in dtypes:  # routers may be float32 beside other weights
        config = build_decoder_config(manifest.recipe["model"]["decoder"], where=f"the recipe in {path}")
        with torch.device("meta"):
            dtypes = _find_dtypes(manifest, of_bytes | build_model(config).list_float32())
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no weights of a decoder"
        raise UserError(f"{path} cannot be a base: it holds {names}; give a checkpoint with weights of one dtype")
    return BaseFormat(next(iter(dtypes)), is_nf4=bool(of_bytes))


def _find_dtypes(manifest: Manifest, left_out: Collection[str]) -> set[torch.dtype]:
    return {
        record.torch_dtype
        for name, record in manifest.tensors.items()
        if name.startswith(DECODER_PREFIX) and name.removeprefix(DECODER_PREFIX) not in left_out
    }


def build_scope(base: AdapterBase, *, has_magnitudes: bool, also_train: Sequence[str]) -> SaveScope:
    """Returns the scope of the saves: they contain the trained tensors, and the base provides all other weights.

    Args:
        base: The base.
        has_magnitudes: Whether the adapters have the magnitudes of DoRA.
        also_train: The same field as in `AdapterConfig`.
    """
    held = [f"{DECODER_PREFIX}*.{name}" for name in ADAPTER_TENSORS if has_magnitudes or name != MAGNITUDE]
    # `AdapterConfig` rejects unknown names.
    held += [DECODER_PREFIX + EXTRA_TENSORS[extra] for extra in also_train if extra in EXTRA_TENSORS]
    return SaveScope(
        base=base.path, in_base=(f"{DECODER_PREFIX}*",), not_in_base=tuple(held), base_hash=base.manifest_hash
    )
