"""Reads the data usage of a checkpoint from its state, without a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from genesis.data.old_keys import rename_old_keys
from genesis_callbacks.checkpoint import CorruptCheckpointError
from genesis_callbacks.checkpoint.state import pick_data_sections

DATA_STATE: Final = "CorpusDataModule"
"""The key of the data module's state in a checkpoint."""


@dataclass(frozen=True)
class DataUsage:
    """The usage of one source.

    Args:
        tokens: Number of labels, without padding.
        epochs: Number of passes over the source; None if it was not recorded.
        documents: Number of documents started; None for a prepared corpus, which is consumed by sequences.
        bad_documents: Number of documents that could not be read; None for a prepared corpus.
    """

    tokens: int
    epochs: float | None = None
    documents: int | None = None
    bad_documents: int | None = None


def read_data_usage(sections: Sequence[Mapping[str, Any]]) -> dict[str, DataUsage]:
    """Returns the usage of each source; empty if the run's data were of another kind.

    Args:
        sections: The checkpoint's state of each rank, as `read_state` gives it.

    Raises:
        CorruptCheckpointError: The state is not the state of a data module.
    """
    try:
        return _read(sections)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"the state of {DATA_STATE} is not that of a data module: {error!r}") from error


def _read(sections: Sequence[Mapping[str, Any]]) -> dict[str, DataUsage]:
    states = [section.get("trainer", {}).get(DATA_STATE) for section in pick_data_sections(sections)]
    states = [rename_old_keys(state) for state in states if state]
    if not states:
        return {}
    if "usage_of_lanes" in states[0]:
        return {
            name: _add_up([state["usage_of_lanes"][name] for state in states]) for name in states[0]["usage_of_lanes"]
        }
    epochs = states[0].get("epochs_consumed", {})
    return {
        name: DataUsage(int(tokens), _epochs(epochs.get(name))) for name, tokens in states[0]["tokens_consumed"].items()
    }


def _epochs(value: Any) -> float | None:
    return None if value is None else float(value)


def _add_up(entries: Sequence[Mapping[str, int]]) -> DataUsage:
    """Returns the usage of a source, summed over the lanes of all ranks."""
    return DataUsage(
        tokens=sum(entry["num_tokens"] for entry in entries),
        documents=sum(entry["num_documents"] for entry in entries),
        bad_documents=sum(entry["num_bad_documents"] for entry in entries),
    )
