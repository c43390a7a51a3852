"""Exports the adapters of a checkpoint alone, in PEFT's format, and proves them by PEFT itself."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from genesis.base.errors import UserError
from genesis.export.card import describe_nf4, describe_reading, name_auto_class
from genesis.export.proof import (
    PROVE_ADAPTER_MODULE,
    UNPROVED_TOKENIZER,
    check_proof_memory,
    run_proof_of,
    write_proof,
)
from genesis.export.reading import (
    Reading,
    check_choice,
    find_reading,
    write_generation_config,
    write_tokenizer,
)
from genesis.export.staging import check_is_new, staged
from genesis.export.tensors import DTYPES
from genesis.generate.checkpoint_reference import verify_shown
from genesis.huggingface.adapter_config import describe_adapter
from genesis.huggingface.directory import CARD_NAME, hash_files, read_json
from genesis.huggingface.directory import CONFIG_NAME as BASE_CONFIG_NAME
from genesis.huggingface.family import IMPORTED_AS, Family, TensorNames
from genesis.huggingface.peft import (
    BASE_FORMAT,
    CONFIG_NAME,
    FINGERPRINT,
    WEIGHTS_NAME,
    fingerprint,
    name_adapter_tensor,
    name_adapter_tensors_of_peft,
    name_tied_output,
    to_peft,
)
from genesis.huggingface.shape import find_names, is_exported_as_another
from genesis.huggingface.stored import list_nf4_tensors
from genesis.model.adapter import (
    EXTRA_TENSORS,
    AdapterConfig,
    is_adapter_tensor,
)
from genesis.model.decoder import build_model
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config, read_adapter_config
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import Manifest, read_manifest, read_tensors
from genesis_callbacks.checkpoint.tensor_places import find_base

_OTHER_BYTES = 64 << 20
"""Upper bound for the size of all files other than weights."""


@dataclass(frozen=True)
class AdapterExportOptions:
    """Options of an export of adapters.

    Args:
        dtype: The type of the adapters in the file: a name in `DTYPES`.
        base_name: Name or path under which PEFT finds the base; None for no name.
        compares_models: Whether the proof compares logits, for which it loads the base twice, as float32.
        tokenizer: Tokenizer file or directory; None for the checkpoint's own tokenizer.
        may_be_unproved: Whether to accept a `tokenizer` whose hash differs from the run's; proof and card report this.
        is_whole: Whether the proof compares all texts of the tokenizer, however long that takes.
    """

    dtype: str = "float32"
    base_name: str | None = None
    compares_models: bool = True
    tokenizer: Path | None = None
    may_be_unproved: bool = False
    is_whole: bool = False

    def __post_init__(self) -> None:
        check_choice(self.tokenizer, may_be_unproved=self.may_be_unproved)


def read_adapter(manifest: Manifest, path: Path) -> AdapterConfig:
    """Returns the adapters of a checkpoint.

    Raises:
        UserError: The checkpoint has no adapters.
    """
    adapter = read_adapter_config(manifest.recipe, where=f"the recipe in {path}")
    if adapter is None or manifest.base is None:
        raise UserError(f"{path} holds no adapters: export it without --adapter and --merge")
    return adapter


def export_adapter(checkpoint: Path, out: Path, options: AdapterExportOptions) -> dict[str, Any]:
    """Writes the directory `out` with the adapters of a checkpoint in PEFT's format and returns the proof.

    The directory also has what a whole export has beside weights: tokenizer, chat template and stops.

    Args:
        checkpoint: A committed checkpoint with adapters; its base must be there.
        out: The directory to create; it must not exist.
        options: The options.

    Raises:
        UserError: The checkpoint has no adapters, no family of transformers represents the decoder, `base_name` is a
            directory of another family, the tokenizer is not the run's or has no exact fast form, the memory is too
            small, or `out` exists.
        RunEndedError: The proof failed. No partial export is left.
    """
    check_is_new(out)
    manifest = verify_shown(checkpoint)
    adapter = read_adapter(manifest, checkpoint)
    assert manifest.base is not None
    config = build_decoder_config(manifest.recipe["model"]["decoder"], where=f"the recipe in {checkpoint}")
    if config.num_scores is not None:
        raise UserError(f"{checkpoint} is a reward model, whose adapters alone have no score: export it with --merge")
    family = find_names(config)
    _check_base_name(options.base_name, family)
    given, permission = options.tokenizer, options.may_be_unproved
    reading = find_reading(checkpoint, manifest, config.vocab_size, given, may_be_unproved=permission)
    content = describe_adapter(config, adapter, options.base_name)
    base, base_manifest = find_base(checkpoint, manifest.base)
    extras = {DECODER_PREFIX + EXTRA_TENSORS[extra] for extra in adapter.also_train}
    names = [
        name
        for name in manifest.tensors
        if name.startswith(DECODER_PREFIX) and (is_adapter_tensor(name) or name in extras)
    ]
    tensors = read_tensors(checkpoint, names)
    dtype = DTYPES[options.dtype]
    ours = {name.removeprefix(DECODER_PREFIX): tensor for name, tensor in tensors.items()}
    theirs = {
        name: to_peft(own, ours[own], family).to(dtype).contiguous()
        for own, name in name_adapter_tensors_of_peft(ours.keys(), family).items()
    }
    if config.has_tied_embeddings and extras:
        theirs[name_tied_output(family)] = theirs[name_adapter_tensor(EXTRA_TENSORS["embedding"], family)].clone()
    if options.compares_models:
        with torch.device("meta"):
            decoder = build_model(config)
        num_elements = sum(parameter.numel() for parameter in decoder.parameters())
        check_proof_memory(2 * num_elements * torch.float32.itemsize)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in theirs.values())
    with staged(out, num_bytes + _OTHER_BYTES) as staging:
        tokenizer, form = reading.tokenizer, write_tokenizer(reading, config, "huggingface", staging)
        write_generation_config(reading, staging)
        kept = "nf4" if list_nf4_tensors(base_manifest) else "plain"
        metadata = {"format": "pt", FINGERPRINT: fingerprint(base_manifest, DECODER_PREFIX), BASE_FORMAT: kept}
        save_file(theirs, staging / WEIGHTS_NAME, metadata=metadata)
        (staging / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        imported_as = _find_other_type(base_manifest, family) if isinstance(family, Family) else None
        described = describe_reading(tokenizer, staging) if tokenizer and form == "huggingface" else ""
        opens = name_auto_class(config)
        card = _write_card(
            out.name, checkpoint, manifest, adapter, base, family, imported_as, reading, described, opens
        )
        (staging / CARD_NAME).write_text(card, encoding="utf-8", errors="backslashreplace")
        request = {
            "directory": str(staging),
            "checkpoint": str(checkpoint),
            "base": str(base),
            "tokenizer": str(staging) if form == "huggingface" else None,
            "compares_models": options.compares_models,
            "is_whole": options.is_whole,
        }
        proof = run_proof_of(request, PROVE_ADAPTER_MODULE)
        proof |= {"tokenizer_origin": reading.origin, "tokenizer_form": form}
        proof["base"] = {"model_type": family.model_type, "imported_as": imported_as}
        proof["files"] = hash_files(staging)
        write_proof(staging, proof)
    return proof


def _check_base_name(base_name: str | None, family: TensorNames) -> None:
    """Refuses a directory whose model has other tensors: PEFT would leave out those adapters without a warning."""
    if base_name is None or not Path(base_name, BASE_CONFIG_NAME).is_file():
        return
    model_type = read_json(Path(base_name, BASE_CONFIG_NAME)).get("model_type")
    is_own = isinstance(family, Family) and not is_exported_as_another(model_type, family)
    if not is_own and model_type != family.model_type:
        found = "whose config.json names no model_type" if model_type is None else f"a model of type {model_type}"
        raise UserError(
            f"--base_name is {base_name}, {found}, and the adapters fit one of type "
            f"{family.model_type}, as which genesis exports the base: give the directory of `genesis export BASE DIR`"
        )


def _find_other_type(base: Manifest, family: Family) -> str | None:
    """Returns the type of the model that a base was imported from, if exports of the base have another type."""
    imported_as = base.identity.get(IMPORTED_AS)
    return imported_as if imported_as is not None and is_exported_as_another(imported_as, family) else None


def _write_card(
    name: str,
    checkpoint: Path,
    manifest: Manifest,
    adapter: AdapterConfig,
    base: Path,
    family: TensorNames,
    imported_as: str | None,
    reading: Reading,
    described: str,
    opens: str,
) -> str:
    assert manifest.base is not None
    head = yaml.safe_dump({"library_name": "peft", "tags": ["lora"]}, sort_keys=False)
    other = (
        ""
        if imported_as is None
        else f"""
**BASE is the export of the base by genesis** (`genesis export`), and not the `{imported_as}` model that the base was
imported from: some layers have other names there, and PEFT leaves out their adapters without a warning.
"""
    )
    tokenizer = f"\n{described}\n" if described else ""
    if reading.origin == "unproved":
        tokenizer += f"\n**The tokenizer is unproved**: {UNPROVED_TOKENIZER}.\n"
    names = f"{opens}, AutoTokenizer, GenerationConfig"
    names = names if described else names.replace(" AutoTokenizer,", "")
    opened = 'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")\n' if described else ""
    base_manifest = read_manifest(base)
    if list_nf4_tensors(base_manifest):
        other += f"\n{describe_nf4()} BASE is therefore the export of the base by genesis (`genesis export`).\n"
    return f"""---
{head}---

# {name}

Adapters of rank {adapter.rank} in PEFT's format, trained beside a frozen base of type `{family.model_type}`.
`proof.json` lists the comparisons with the checkpoint.

```python
from peft import PeftModel
from transformers import {names}

{opened}base = {opens}.from_pretrained("BASE")
model = PeftModel.from_pretrained(base, "THIS_DIRECTORY")
# PEFT keeps the stops of the base: this file has those that the adapters learned.
model.generation_config = GenerationConfig.from_pretrained("THIS_DIRECTORY")
```
{tokenizer}{other}
- `{checkpoint.name}`, step {manifest.step:,}, manifest `{read_committed_hash(checkpoint)}`
- base `{base.name}`, manifest `{manifest.base.manifest_hash}`
"""
