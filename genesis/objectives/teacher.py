"""The teacher of a distillation: a frozen decoder that is no part of the trained model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from genesis.data.window import MicroBatch
from genesis.model.decoder import Decoder
from genesis.model.device_proofs import prepare_kernels
from genesis.objectives.distillation_loss import TeacherClasses, read_classes

TeacherDtype = Literal["float32", "bfloat16", "float16"]
"""A dtype in which a teacher may run, other than that of its weights."""

IDS: Final = "teacher_ids"
LOG_PROBS: Final = "teacher_log_probs"
LOG_REST: Final = "teacher_log_rest"
"""Names of the teacher's classes in `MicroBatch.extra`."""


class RunningTeacher(NamedTuple):
    """A model that runs beside the trained one, whole on each rank, by the options in a recipe.

    Args:
        path: A run, a checkpoint or an export.
        dtype: The dtype of its weights; None for that of its files.
        top_k: Number of ids whose probabilities it leaves for each token.
    """

    path: str
    dtype: TeacherDtype | None
    top_k: int


class FoundTeacher(Protocol):
    """A teacher that is found and not loaded yet (`genesis.generate.teacher.TeacherReference`)."""

    @property
    def path(self) -> Path:
        """Its directory, as an absolute path."""

    @property
    def hash(self) -> str:
        """The hash of the checkpoint's manifest, or of all files of an export."""

    def check_tokenizer(self, tokenizer_hash: str, owner: str, tokenizer: Path | None) -> None:
        """Refuses another tokenizer than the teacher's."""


class Teacher:
    """A decoder that gives its classes for each position. Deterministic; draws no random numbers; never communicates.

    Args:
        decoder: The model, in evaluation mode. It runs in the dtype of its own weights, whatever the student's.
        vocab_size: Number of the tokenizer's ids, at most the rows of the decoder's head.
        top_k: Number of ids whose probabilities are kept.
        temperature: The temperature of the probabilities.
    """

    def __init__(self, decoder: Decoder, *, vocab_size: int, top_k: int, temperature: float) -> None:
        self._decoder = decoder.requires_grad_(False).eval()
        self._device = torch.device("meta")
        self._head = partial(read_classes, vocab_size=vocab_size, top_k=top_k, temperature=temperature)

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of its output weight: the tokenizer's ids, and padding."""
        return self._decoder.config.vocab_size

    @property
    def output_weight(self) -> Tensor:
        """Returns its output weight, on the device of the last call."""
        return self._decoder.output_weight

    def read(self, micro_batch: MicroBatch) -> TeacherClasses:
        """Returns the classes of each position of a micro-batch, on its device, which the first call moves to."""
        classes: TeacherClasses = self.run(micro_batch, self._head)
        return classes

    @torch.no_grad()
    def run(self, micro_batch: MicroBatch, head: Callable[[Tensor, Tensor], Any]) -> Any:
        """Returns what a head makes of its hidden states and its output weight, on the micro-batch's device."""
        device = micro_batch.input_ids.device
        if device != self._device:
            prepare_kernels(self._decoder.config, device)
            self._decoder.to(device)
            self._device = device
        # Training runs under autocast, which would round the teacher's products.
        with torch.autocast(device.type, enabled=False):
            return self._decoder(
                micro_batch.input_ids,
                document_ids=micro_batch.document_ids,
                document_offsets=micro_batch.document_offsets,
                head=head,
            )


def name_classes(classes: TeacherClasses) -> dict[str, Tensor]:
    """Returns the tensors by their names in `MicroBatch.extra`."""
    return {IDS: classes.ids, LOG_PROBS: classes.log_probs, LOG_REST: classes.log_rest}


def find_classes(micro_batch: MicroBatch) -> TeacherClasses | None:
    """Returns the classes in `MicroBatch.extra`; None if there are none."""
    extra = micro_batch.extra
    return TeacherClasses(extra[IDS], extra[LOG_PROBS], extra[LOG_REST]) if IDS in extra else None
