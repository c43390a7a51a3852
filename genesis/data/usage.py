"""What a checkpoint says of the data that were consumed until then, read from its state without a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from genesis.data.old_keys import rename_old_keys
from genesis_callbacks.checkpoint import CorruptCheckpointError, pick_data_sections

DATA_STATE: Final = "CorpusDataModule"
"""Under which name a checkpoint has the data module's state."""


@dataclass(frozen=True)
class DataUsage:
    """What was consumed of one source.

    Args:
        tokens: Labels, padding not counted.
        epochs: How often the source was consumed; None where that is not recorded.
        documents: Begun; None of a prepared corpus, which is consumed by sequences.
        bad_documents: Skipped because they could not be read; None likewise.
    """

    tokens: int
    epochs: float | None = None
    documents: int | None = None
    bad_documents: int | None = None


def read_data_usage(sections: Sequence[Mapping[str, Any]]) -> dict[str, DataUsage]:
    """Returns what was consumed of each source; empty where the run had other data.

    Args:
        sections: The checkpoint's state of each rank, as `read_state` gives it.

    Raises:
        CorruptCheckpointError: What stands there is not what a data module saves.
    """
    try:
        return _read(sections)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"the state of {DATA_STATE} is not what a data module saves: {error!r}") from error


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
    """Returns the sum of what each rank's lanes have consumed of a source."""
    return DataUsage(
        tokens=sum(entry["num_tokens"] for entry in entries),
        documents=sum(entry["num_documents"] for entry in entries),
        bad_documents=sum(entry["num_bad_documents"] for entry in entries),
    )
