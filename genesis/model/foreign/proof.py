"""The proof of a model of another library before it trains: nothing of what it checks fails by itself if it is wrong.

1. Documents: a change in the first document of a row changes no bit of those behind it, and each document has the
   hidden states that it has alone.
2. Order: a change of the last token changes no bit of the tokens before it.
3. Head: our logits, of the hidden states, the output weight, a factor and a bound, are the model's own.

All of it runs by the model of the fit itself, wrapped as the fit wraps it, on one row of its length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from genesis.base.errors import UserError
from genesis.model.language_model import LanguageModel, project

_TOLERANCES: Final = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Of the largest value: products of other sizes round differently."""
_COARSE: Final = 5e-2
"""In 16 bits."""
_SEED: Final = 20
_MAX_REASON: Final = 200


@dataclass(frozen=True)
class Subject:
    """What is proved.

    Args:
        model: The model with its weights.
        kind: Its name for messages.
        vocab_size: Its number of ids.
        own_logits: The head by which its forward returns its own logits.
        remedy: What to do if it cannot keep documents of a row apart.
    """

    model: LanguageModel
    kind: str
    vocab_size: int
    own_logits: Callable[[Tensor, Tensor], Tensor]
    remedy: str


class _Row:
    """One row of three documents, and the forwards of it and of its changes."""

    def __init__(self, model: LanguageModel, seq_len: int, vocab_size: int) -> None:
        self._model, self._device = model, model.output_weight.device
        self.starts = [0, seq_len // 4, seq_len // 4 + max(1, seq_len // 8), seq_len]
        generator = torch.Generator().manual_seed(_SEED)
        self.ids = torch.randint(vocab_size, (1, seq_len), generator=generator)
        self.other_ids = torch.randint(vocab_size, (1, seq_len), generator=generator)
        self.documents = torch.zeros(1, seq_len, dtype=torch.int32)
        for start in self.starts[1:-1]:
            self.documents[:, start:] += 1

    def run(self, ids: Tensor, documents: Tensor, head: Any = None) -> Tensor:
        """Returns the hidden states of the row [S, D], or what a head makes of them."""
        moved = (one.to(self._device) for one in (ids, documents))
        ids, documents = moved
        head = head or (lambda hidden, _: hidden)
        found: Tensor = self._model(ids, document_ids=documents, head=head)
        return found[0]

    def run_alone(self, number: int) -> Tensor:
        """Returns the hidden states of a document that is the first of a row of the same length."""
        start, end = self.starts[number : number + 2]
        order = torch.cat((torch.arange(start, end), torch.arange(start), torch.arange(end, self.ids.shape[1])))
        documents = torch.zeros_like(self.documents)
        documents[:, end - start :] = 1
        return self.run(self.ids[:, order], documents)[: end - start]


@torch.no_grad()
def prove(subject: Subject, seq_len: int) -> None:
    """Checks that a model computes what training needs. All ranks call it together; see the module's text.

    Args:
        subject: The model; it keeps its mode.
        seq_len: The tokens of a row in the fit.

    Raises:
        UserError: The model leaks, reads ahead, or has another head.
    """
    model = subject.model
    was_training = model.training
    model.eval()
    try:
        _prove(subject, _Row(model, max(seq_len, 3), subject.vocab_size))
    except UserError:
        raise
    except Exception as error:  # whatever a class of others makes of a mask that is none of its own
        reason = " ".join(str(error).split())[:_MAX_REASON]
        raise UserError(f"{subject.kind} fails ({type(error).__name__}: {reason}): {subject.remedy}") from error
    finally:
        model.train(was_training)


def _prove(subject: Subject, row: _Row) -> None:
    kind, model = subject.kind, subject.model
    hidden = row.run(row.ids, row.documents)
    is_coarse = torch.is_autocast_enabled(hidden.device.type)
    tolerance = _COARSE if is_coarse else _TOLERANCES.get(hidden.dtype, _COARSE)
    # Beside experts, the products of a token have more or fewer rows when another token chooses another expert.
    exact = tolerance if model.num_inactive_parameters else 0.0

    def differ(found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).abs().amax() / hidden.abs().amax()) if len(wanted) else 0.0

    behind = row.starts[1]
    changed = row.run(torch.cat((row.other_ids[:, :behind], row.ids[:, behind:]), 1), row.documents)
    gap = differ(changed[behind:], hidden[behind:])
    if not gap <= exact:
        raise UserError(
            f"{kind} does not keep documents apart: another first document changes the hidden states of later ones by "
            f"{gap:.1e} of the largest: {subject.remedy}"
        )
    last = torch.cat((row.ids[:, :-1], (row.ids[:, -1:] + 1) % subject.vocab_size), 1)
    gap = differ(row.run(last, row.documents)[:-1], hidden[:-1])
    if not gap <= exact:
        raise UserError(
            f"{kind} reads ahead: another last token changes the hidden states before it by {gap:.1e} of the largest, "
            "so that it would learn to copy: choose a causal model"
        )
    for number, (start, end) in enumerate(pairwise(row.starts)):
        gap = differ(row.run_alone(number), hidden[start:end])
        if not gap <= tolerance:
            raise UserError(
                f"{kind} computes a document behind others differently than alone, by {gap:.1e} of the largest hidden "
                f"state: {subject.remedy}"
            )
    logits, wanted = (row.run(row.ids, row.documents, head) for head in (project, subject.own_logits))
    gap = float((logits - wanted).abs().amax() / wanted.abs().amax())
    if not gap <= tolerance:
        raise UserError(
            f"the logits of {kind} are no product of hidden states and output weight with a factor or a bound that is "
            f"known here (they differ by {gap:.1e} of the largest): train it with transformers itself"
        )
