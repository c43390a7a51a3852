"""What a run is trained on: one protocol for a prepared corpus and for a stream.

`CorpusData` (`corpus_data.py`) and `StreamData` (`stream_data.py`) fulfil it. The Trainer's data module, the training
step, the command line, telemetry and checkpoints know the protocol alone. The pure functions that both kinds of data
share are here, too. Nothing in `genesis.data` imports Lightning.

The position counts global sequences. It belongs to the data, and moves when a window has been trained, not when it was
read ahead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from genesis.data.corpus import TokenSource
from genesis.data.loader import Ranks, SequenceFormat
from genesis.data.order import Mix, SequenceOrder
from genesis.data.packing import Packing
from genesis.data.window import AccumulationWindow
from genesis.errors import UserError

SumOverRanks = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class TrainingOptions:
    """How sequences and batches are made of any kind of data.

    Args:
        seq_len: Tokens of a sequence.
        micro_batch_size: Sequences of one forward and backward on one rank.
        global_batch_size: Sequences of one step, over all ranks.
        seed: Of the order.
        mix: Integer weights of sources; None takes those that the data have.
        max_epochs: How often a source is consumed at most; one that it does not name has no limit.
        packing: How documents are put into sequences.
    """

    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    seed: int = 0
    mix: Mapping[str, int] | None = None
    max_epochs: Mapping[str, int] | None = None
    packing: Packing = "chunk"


class TrainingData(Protocol):
    """What a run is trained on. Every rank calls it alike; no method but `sum_usage` communicates."""

    @property
    def options(self) -> TrainingOptions:
        """Returns how sequences and batches are made."""

    @property
    def identity(self) -> dict[str, str]:
        """Returns what a checkpoint says of the data that it was trained on."""

    @property
    def vocab_size(self) -> int:
        """Returns how many ids the tokenizer has."""

    @property
    def vocabulary_owner(self) -> str:
        """Returns whose vocabulary that is, for an error."""

    @property
    def sequence_format(self) -> SequenceFormat:
        """Returns how a sequence is made of tokens."""

    # ---- training

    def open(self, ranks: Ranks) -> None:
        """Opens the data for one rank and refuses what cannot be trained on; may be called again."""

    def close(self) -> None:
        """Ends the processes that the data have, if any; `open` allows new ones."""

    @property
    def order(self) -> SequenceOrder:
        """Returns the order of the training sequences, or at least the source that stands at each position."""

    @property
    def data_position(self) -> int:
        """Returns the position after the last window that was trained."""

    @property
    def last_position(self) -> int | None:
        """Returns the position after the last window; None if the data do not end at a known one."""

    @property
    def num_windows(self) -> int:
        """Returns the windows of an epoch in Lightning's sense, which ends nothing."""

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`."""

    def advance(self, window: AccumulationWindow, *, has_tokens: bool = True) -> str | None:
        """Moves the position past a window that was trained; once more of the same window changes nothing.

        Args:
            window: What was trained.
            has_tokens: Whether that of any rank had a token.

        Returns:
            A line about the mix of sources that begins there, None where none does.
        """

    def find_end(self) -> str | None:
        """Returns a line that says why training ends at the position, None where it goes on."""

    def sum_usage(self, sum_over_ranks: SumOverRanks) -> dict[str, dict[str, float]]:
        """Returns what was consumed of each source up to the position, over all ranks, by the name of the figure."""

    # ---- validation

    @property
    def validation(self) -> Sequence[TokenSource]:
        """Returns the sources of the validation set; none where there is no such set."""

    @property
    def validation_remedy(self) -> str:
        """Returns a line for a run that has no validation set and wants one."""

    # ---- state

    def state(self) -> dict[str, Any]:
        """Returns where this rank stands, in plain types."""

    def load_state(self, state: Mapping[str, Any]) -> str | None:
        """Goes on where a saved run stood, with this run's mix from there on.

        Returns:
            A line about the mix of sources where it is another, else None.

        Raises:
            UserError: The saved run can't be continued here.
        """

    def combine_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state for `load_state` from those of all ranks that saved."""

    # ---- telemetry

    @property
    def tokens_per_second(self) -> float | None:
        """Returns what the data's own workers can make together; None where they have none, or made nothing yet."""

    @property
    def queue_depths(self) -> tuple[int, ...]:
        """Returns how many blocks each of these workers still has to make."""

    @property
    def wait_remedy(self) -> str:
        """Returns what to do where training waits for the data."""


_BEFORE_PACKING: Final[dict[str, Any]] = {"packing": "chunk", "plans": {}}
"""What a checkpoint means that does not say how its documents were packed."""
_REMEDIES: Final = {
    "seq_len": "set data.seq_len to the checkpoint's",
    "packing": "set data.packing to the checkpoint's",
    "plans": "train with the plan that the checkpoint was trained with",
}


def check_counts(**counts: int | None) -> None:
    """Refuses a count below 1 by the name of its option.

    Raises:
        UserError: See above.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"data.{name} is {value}; it counts from 1 up")


def check_kind(state: Mapping[str, Any], *, is_stream: bool) -> None:
    """Refuses the state of the other kind of data.

    Raises:
        UserError: See above.
    """
    if is_stream == ("stream" in state):
        return
    was, now = ("a corpus", "a stream") if is_stream else ("a stream", "a corpus")
    raise UserError(
        f"the checkpoint was trained on {was}, this run trains on {now}, where no position is the same; give "
        "the data of the checkpoint, or begin a new run from its weights (--checkpoint.restore weights)"
    )


def check_sequences(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuses a state whose positions name other sequences than here.

    Args:
        state: What was saved.
        here: What decides which tokens a sequence holds, beside the order.

    Raises:
        UserError: See above.
    """
    for key, value in here.items():
        saved = state.get(key, _BEFORE_PACKING.get(key))
        if saved != value:
            raise UserError(
                f"the checkpoint was trained with {key} {saved}, this run has {value}; positions would name other "
                f"sequences: {_REMEDIES[key]}"
            )


def moved_position(window: AccumulationWindow, position: int, global_batch_size: int) -> int:
    """Returns the position after `window`, which is the one at `position` or the one before that, given again.

    Raises:
        RuntimeError: It is another window: training left some out, or repeats them.
    """
    if window.data_position not in (position, position + global_batch_size):
        raise RuntimeError(
            f"a window that ends at position {window.data_position} was trained at position {position}: windows are "
            "trained in their order, each once"
        )
    return window.data_position


def find_last_position(order: SequenceOrder, position: int, global_batch_size: int) -> int | None:
    """Returns the position after the last whole global batch; None if the order does not end."""
    return None if order.end is None else order.end - max(0, order.end - position) % global_batch_size


def continue_order(
    order: SequenceOrder, saved: Mapping[str, Any], position: int, weights: Mapping[str, int]
) -> tuple[SequenceOrder, str | None]:
    """Returns the saved order, which goes on at `position` with the mix of `order`, and a line if that is another mix.

    Args:
        order: This run's.
        saved: `SequenceOrder.state` of the saved run.
        position: Where the saved run stands.
        weights: Of the sources, as this run's user wrote them.

    Raises:
        UserError: The saved run had another order.
    """
    continued = order.continued(saved, position)
    if continued.state()["mixes"] == saved["mixes"]:
        return continued, None
    now = replace(continued.mix_at(position), start_position=position)
    ahead = [mix for mix in continued.mixes if mix.start_position > position]
    return continued, describe_mixes(continued, [now, *ahead], weights)


def describe_passed(order: SequenceOrder, before: int, position: int, weights: Mapping[str, int]) -> str | None:
    """Returns a line about the mixes that begin after `before` and up to `position`; None where none draws on."""
    passed = [mix for mix in order.mixes if before < mix.start_position <= position and any(mix.weights)]
    return describe_mixes(order, passed, weights) if passed else None


def describe_mixes(order: SequenceOrder, mixes: Sequence[Mix], weights: Mapping[str, int]) -> str:
    """Returns a line that names mixes by the weights that the user wrote, with their shares, and where they begin.

    An order's own weights count sequences, and are large where a packing fills sources' sequences differently.
    """

    def describe(mix: Mix) -> str:
        consumed = {name: weights[name] for name, weight in zip(order.names, mix.weights, strict=True) if weight}
        total = sum(consumed.values())
        shares = ", ".join(f"{name} {weight} ({100 * weight / total:.3g}%)" for name, weight in consumed.items())
        return f"{shares or 'none, every source has reached its limit'} from position {mix.start_position} on"

    return "the mix of sources changes: " + "; ".join(map(describe, mixes))
