"""The options of `genesis data prepare` for conversations."""

import datetime
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from genesis.base.errors import UserError

Labels = Literal["assistant", "last", "all"]
OnLong = Literal["error", "cut", "drop"]
OnBadRow = Literal["error", "skip"]

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class ChatOptions:
    """How conversations become tokens with labels.

    Args:
        template: File of a Jinja chat template; by default the tokenizer's own, or the training template of its family.
        date: The date, such as 2026-01-31, for templates that print today's date.
        labels: The tokens to learn: the turns of the assistant, its last turn, or all tokens. A turn of the
            assistant with weight 0 is never learned.
        variables: Further variables of the template, such as `enable_thinking: false`.
        max_tokens: Number of tokens above which a conversation is long; by default the seq_len of a packing if one is
            given, else no limit. `genesis fit` prints how many conversations its own data.seq_len cuts.
        on_long: The action for a long conversation: error, cut off its end, or drop it.
        on_bad_row: The action for a record without a conversation, or one that the template rejects: error or skip.
    """

    template: Path | None = None
    date: str | None = None
    labels: Labels = "assistant"
    variables: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    on_long: OnLong = "error"
    on_bad_row: OnBadRow = "error"

    def __post_init__(self) -> None:
        _ = self.today
        if self.max_tokens is not None and self.max_tokens < 2:
            raise UserError(f"chat.max_tokens {self.max_tokens} must be at least 2")
        for name in self.variables:
            if name in _RESERVED or not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name):
                raise UserError(f"chat.variables has {name!r}, which a template's variable cannot be called; rename it")

    @property
    def today(self) -> datetime.date | None:
        """Returns `date` as a date."""
        try:
            return None if self.date is None else datetime.date.fromisoformat(self.date)
        except ValueError:
            raise UserError(f"chat.date {self.date!r} is not a date; give one as 2026-01-31") from None
