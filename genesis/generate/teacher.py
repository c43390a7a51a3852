"""The teacher of a distillation, from a checkpoint or an export: found and identified first, and loaded later."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3
from safetensors import SafetensorError

from genesis.base.available_memory import available_memory
from genesis.base.device import is_host, read_free_memory
from genesis.base.errors import UserError, numbered
from genesis.generate.checkpoint_reference import LATEST, Reference, read_reference
from genesis.generate.load import load_decoder, load_tokenizer, require_tokenizer
from genesis.huggingface.directory import check_files
from genesis.huggingface.weights import open_tensors
from genesis.model.recipe import DECODER_PREFIX
from genesis.objectives.teacher import Teacher, TeacherDtype
from genesis.tokenizer.open import find_format, has_hash, has_same_ids, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.base.untrusted import check_file
from genesis_callbacks.checkpoint import list_committed, read_manifest

_HASH_SHOWN: Final = 16
_WEIGHTS_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True)
class TeacherReference:
    """A teacher that is not loaded yet.

    Args:
        path: The directory of the checkpoint or the export, as an absolute path.
        hash: The hash of the checkpoint's manifest, or of all files of the export.
        tokenizer_hash: The identity of the teacher's tokenizer; empty without one.
        is_export: Whether the directory is an export.
    """

    path: Path
    hash: str
    tokenizer_hash: str
    is_export: bool = False

    def check_tokenizer(self, tokenizer_hash: str, owner: str, tokenizer: Path | None) -> None:
        """Compares the tokenizer with the student's. Files may differ in what changes no id, such as the template.

        Args:
            tokenizer_hash: The identity of the student's tokenizer; empty without one.
            owner: What has this tokenizer, for the message.
            tokenizer: Where the files of the student's tokenizer lie; None if there are none.

        Raises:
            UserError: The tokenizers differ, so that an id of one model is another text for the other.
        """
        if tokenizer_hash == self.tokenizer_hash:
            return
        reason = ""
        if tokenizer is not None and tokenizer_hash and self.tokenizer_hash:
            try:
                own = self._open_tokenizer()
            except UserError as error:
                reason = f" (their ids cannot be compared: {error})"
            else:
                if has_same_ids(own, open_tokenizer(tokenizer)):
                    return
        raise UserError(
            f"the teacher {self.path} has the tokenizer {_show(self.tokenizer_hash)}, and {owner} has "
            f"{_show(tokenizer_hash)}{reason}: give a teacher with the student's tokenizer, or prepare the data with "
            "the teacher's"
        )

    def _open_tokenizer(self) -> Tokenizer:
        if self.is_export:
            return open_tokenizer(self.path)
        return require_tokenizer(load_tokenizer(None, read_manifest(self.path), self.path), self.path)


def find_teacher(given: str | Path, recorded_hash: str | None = None) -> TeacherReference:
    """Returns the teacher that a value names (`genesis.generate.checkpoint_reference`); its weights are not read.

    Args:
        given: A run, a checkpoint or an export.
        recorded_hash: The hash of the teacher in the checkpoint that a run continues from. Of a run that was trained
            further, the checkpoint with this hash is the teacher, if it still exists.

    Raises:
        UserError: There is no such checkpoint, or the export is damaged.
    """
    reference = read_reference(given)
    if reference.kind == "export":
        files = check_files(reference.path)
        tokenizer = open_tokenizer(reference.path).hash if find_format(reference.path) is not None else ""
        content = blake3(json.dumps(files, sort_keys=True).encode()).hexdigest()
        return TeacherReference(reference.path.resolve(), f"blake3:{content}", tokenizer, is_export=True)
    path = _find_recorded(reference, recorded_hash) or reference.find_checkpoint(level="quick")
    tokenizer = read_manifest(path).identity.get("tokenizer_hash") or ""
    return TeacherReference(path.resolve(), read_committed_hash(path), tokenizer)


def _find_recorded(reference: Reference, recorded_hash: str | None) -> Path | None:
    if recorded_hash is None or reference.kind != "run" or reference.selector not in (None, LATEST):
        return None
    committed = (path for path, _ in list_committed(reference.path))
    return next((path for path in committed if read_committed_hash(path) == recorded_hash), None)


def check_teacher_fits(given: str | Path, device: torch.device, dtype: TeacherDtype | None = None) -> None:
    """Refuses a teacher that is larger than the memory, before its files are read. Activations are not counted.

    Args:
        given: A run, a checkpoint or an export.
        device: Where the teacher will run, after it was loaded into the host's memory.
        dtype: The dtype of the weights; None for that of the files.

    Raises:
        UserError: There is no such teacher, or the host or the device has less memory than its weights take.
    """
    num_bytes = _count_bytes(read_reference(given), None if dtype is None else getattr(torch, dtype))
    on_device = None if is_host(device.type) else read_free_memory(device.type, device.index or 0)
    for owner, available in (("this machine", available_memory()), (device, on_device and on_device[0])):
        if available is not None and available < num_bytes:
            raise UserError(
                f"the weights of the teacher {given} take {num_bytes / 1e9:,.1f} GB, and {owner} has "
                f"{available / 1e9:,.1f} GB free; a teacher is never divided among devices: give a machine with more "
                "memory (--device cpu needs only the host's), a narrower --dtype, or a smaller teacher"
            )


def _count_bytes(reference: Reference, dtype: torch.dtype | None) -> int:
    """Returns the bytes of a teacher's weights, by what lists them: nothing else is read."""
    if reference.kind != "export":
        manifest = read_manifest(reference.find_checkpoint(level="quick"))
        records = [record for name, record in manifest.tensors.items() if name.startswith(DECODER_PREFIX)]
        return sum(math.prod(record.shape) * (dtype or record.torch_dtype).itemsize for record in records)
    files = sorted(reference.path.glob(f"*{_WEIGHTS_SUFFIX}"))
    if dtype is None:
        return sum(map(check_file, files))
    num_elements = 0
    for path in files:
        try:
            with open_tensors(path) as file:
                names = list(file.keys())
                num_elements += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    return num_elements * dtype.itemsize


def load_teacher(
    found: TeacherReference,
    *,
    tokenizer: Path | None,
    vocab_size: int,
    seq_len: int,
    top_k: int,
    temperature: float,
    dtype: TeacherDtype | None = None,
) -> tuple[Teacher, str]:
    """Returns the teacher, in host memory until its first use, and the dtype in which it runs.

    Args:
        found: The teacher.
        tokenizer: Where the tokenizer's files lie; None if there is no tokenizer.
        vocab_size: Number of the tokenizer's ids.
        seq_len: Tokens of a sequence.
        top_k: Number of ids whose probabilities the teacher gives.
        temperature: The temperature of the probabilities.
        dtype: The dtype of the weights; None for that of the files.

    Raises:
        UserError: The teacher is damaged, reads shorter sequences, or has fewer ids than the tokenizer.
    """
    if tokenizer is not None and not has_hash(open_tokenizer(tokenizer), found.tokenizer_hash):
        tokenizer = None  # other files with the same ids; the teacher's own lie beside it
    decoder = load_decoder(found.path, tokenizer, dtype=None if dtype is None else getattr(torch, dtype)).decoder
    config = decoder.config
    if seq_len > config.max_seq_len:
        raise UserError(
            f"the teacher {found.path} reads at most {numbered(config.max_seq_len, 'tokens')}, fewer than seq_len "
            f"{seq_len}: lower seq_len, or give another teacher"
        )
    if vocab_size > config.vocab_size:
        raise UserError(
            f"the teacher {found.path} has {numbered(config.vocab_size, 'ids')}, fewer than the tokenizer's "
            f"{vocab_size:,}: give another teacher"
        )
    if top_k > vocab_size:
        raise UserError(f"top_k is {top_k}, more than the {numbered(vocab_size, 'ids')} of the tokenizer: lower it")
    name = str(decoder.embedding.weight.dtype).removeprefix("torch.")
    return Teacher(decoder, vocab_size=vocab_size, top_k=top_k, temperature=temperature), name


def _show(tokenizer_hash: str) -> str:
    return tokenizer_hash[:_HASH_SHOWN] if tokenizer_hash else "none"
