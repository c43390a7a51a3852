"""A sample of the first batch, as a table that a person reads: input -> label, with masks and documents."""

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.markup import escape
from rich.table import Table

from genesis.base.errors import numbered
from genesis.data.window import IGNORE_INDEX, MicroBatch
from genesis.operations.doctor.checks import Check
from genesis.operations.doctor.model_checks import Scene
from genesis.tokenizer.tokenizer import Tokenizer

_AROUND: Final = 2
_FIRST: Final = 4
_MAX_EDGES: Final = 3


def choose_places(is_learned: Sequence[bool], documents: Sequence[int]) -> list[int]:
    """Returns the places that show the most: the first tokens, and those around changes of mask and document.

    Example:
        >>> choose_places([False] * 6 + [True] * 6, [0] * 12)
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    length = len(documents)
    shown = set(range(min(_FIRST, length)))
    places = range(1, length)
    of_mask = [place for place in places if is_learned[place] != is_learned[place - 1]]
    of_document = [place for place in places if documents[place] != documents[place - 1]]
    for edge in (*of_document[:1], *of_mask[:_MAX_EDGES]):
        shown.update(place for place in range(edge - _AROUND, edge + _AROUND) if 0 <= place < length)
    return sorted(shown)


def show_sample(scene: Scene) -> tuple[Check, Table]:
    """Returns what the first window holds, and a table of one of its rows."""
    learned = [int((micro.labels != IGNORE_INDEX).sum()) for micro in scene.window.micro_batches]
    num_tokens = sum(micro.input_ids.numel() for micro in scene.window.micro_batches)
    num_rows = sum(len(micro.input_ids) for micro in scene.window.micro_batches)
    num_documents = sum(int((micro.document_ids.amax(1) + 1).sum()) for micro in scene.window.micro_batches)
    found = (
        f"{numbered(num_rows, 'rows')}, {numbered(num_documents, 'documents')} or parts of them, "
        f"{numbered(num_tokens, 'tokens')}, of which {sum(learned)} ({sum(learned) / num_tokens:.1%}) are learned"
    )
    micro, row = _choose_row(scene)
    table = build_table(micro, row, scene.tokenizer)
    if scene.tokenizer is None:
        found += "; the tokenizer is unknown, so tokens are shown as ids"
    if not sum(learned):
        remedy = "no label is learned: check the masks of the chat template, and that answers fit data.seq_len"
        return Check("sample", "failed", found, remedy), table
    return Check("sample", "passed", found), table


def _choose_row(scene: Scene) -> tuple[MicroBatch, int]:
    """Returns a row with several documents if there is one, else the first."""
    for micro in scene.window.micro_batches:
        rows = (micro.document_ids.amax(1) > 0).nonzero().flatten()
        if len(rows):
            return micro, int(rows[0])
    return scene.window.micro_batches[0], 0


def build_table(micro: MicroBatch, row: int, tokenizer: Tokenizer | None) -> Table:
    """Returns a table of a row: places, documents, inputs and labels as text."""
    ids, labels = micro.input_ids[row].tolist(), micro.labels[row].tolist()
    documents = micro.document_ids[row].tolist()
    table = Table(box=box.SIMPLE, title="a row of the first batch: input -> label", title_justify="left")
    for column in ("place", "document"):
        table.add_column(column, justify="right")
    table.add_column("input")
    table.add_column("label")
    before = -1
    for place in choose_places([label != IGNORE_INDEX for label in labels], documents):
        if place != before + 1:
            table.add_row("...", "", "", "")
        label = "- (not learned)" if labels[place] == IGNORE_INDEX else spell(labels[place], tokenizer)
        table.add_row(str(place), str(documents[place]), escape(spell(ids[place], tokenizer)), escape(label))
        before = place
    return table


def spell(token: int, tokenizer: Tokenizer | None) -> str:
    """Returns a token as quoted text, or as its number."""
    if tokenizer is None or token >= tokenizer.vocab_size:
        return str(token)
    text = tokenizer.spell([token], has_controls=True)
    return repr(text) if text else f"{token}"
