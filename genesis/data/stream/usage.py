"""The data usage of a stream, computed from the states of its lanes."""

from dataclasses import dataclass

from genesis.data.stream.open import Stream
from genesis.data.stream.state import LaneStates, PartState
from genesis.data.stream.worker import LaneSource


@dataclass(frozen=True)
class SourceUsage:
    """The usage of one source by some lanes. Entries of different lanes can be added, field by field.

    Args:
        num_sequences: Number of sequences given out.
        num_tokens: Number of labels of these sequences.
        num_documents: Number of documents started.
        num_bad_documents: Number of documents skipped because they could not be read.
        num_damaged_spans: Number of parts of shards whose rest was skipped.
        num_spans: Number of parts of shards read to their end, counted in every epoch.
        num_blank_documents: Number of documents dropped because they are only white space.
    """

    num_sequences: int
    num_tokens: int
    num_documents: int
    num_bad_documents: int
    num_damaged_spans: int
    num_spans: int
    num_blank_documents: int


def measure_usage(stream: Stream, states: LaneStates) -> dict[str, SourceUsage]:
    """Returns the usage of each source by the lanes of `states`."""
    usage = {}
    for index, name in enumerate(stream.names):
        parts = {key: state for key, state in states.items() if key.source == index}
        usage[name] = SourceUsage(
            num_sequences=sum(state.num_sequences for state in parts.values()),
            num_tokens=sum(state.num_tokens for state in parts.values()),
            num_documents=sum(state.num_documents for state in parts.values()),
            num_bad_documents=sum(state.num_bad_documents for state in parts.values()),
            num_damaged_spans=sum(state.num_damaged_spans for state in parts.values()),
            num_spans=sum(_count_spans(stream, key, state) for key, state in parts.items()),
            num_blank_documents=sum(state.num_blank_documents for state in parts.values()),
        )
    return usage


def count_spans(stream: Stream) -> dict[str, int]:
    """Returns the number of spans of each source in one epoch."""
    counts = dict.fromkeys(stream.names, 0)
    for part in stream.parts.values():
        counts[part.source.name] += len(part.spans)
    return counts


def _count_spans(stream: Stream, key: LaneSource, state: PartState) -> int:
    part = stream.parts[key]
    if state.cursor is None:
        return len(part.spans) * (part.max_epochs or 0)
    return state.cursor.epoch * len(part.spans) + state.cursor.span
