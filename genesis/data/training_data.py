"""The protocol of training data, implemented by prepared corpora, streams and prompts, and what these share.

`CorpusData` (`corpus_data.py`), `StreamData` (`stream_data.py`) and `PromptData` (`prompt_data.py`) implement the
protocol. The Trainer's data module, the training step, the command line, telemetry and checkpoints use only the
protocol. `DataCursor` has the position and the order for all of them. Nothing in `genesis.data` imports Lightning.

The position counts global sequences; where the data are pairs of answers, it counts pairs. The position belongs to the
data, and moves when a window has been trained, not when a window is read ahead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, Protocol

from genesis.base.errors import UserError
from genesis.data.corpus import TokenSource
from genesis.data.loader import Ranks, SequenceFormat
from genesis.data.order import Mix, SequenceOrder, build_order
from genesis.data.packing import Packing
from genesis.data.pairs import PairSet
from genesis.data.skipped import Ranges, clip, describe
from genesis.data.sources import SourceOptions
from genesis.data.window import AccumulationWindow

DataKind = Literal["text", "pairs", "answers", "prompts"]
"""What a position of the data is: a sequence of text, a pair of answers, a single answer with a value, or a prompt that
the model answers."""
SumOverRanks = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class TrainingOptions:
    """Options of sequences and batches, for any kind of data.

    Args:
        seq_len: Tokens per sequence.
        micro_batch_size: Sequences of one forward and backward on one rank.
        global_batch_size: Sequences of one step, over all ranks.
        seed: Seed of the order.
        mix: Integer weights of sources; None uses the weights of the data.
        max_epochs: Maximum number of epochs by source; a source that is not listed has no limit.
        packing: How documents are put into sequences; None for `best_fit` if they are conversations, else `chunk`.
        num_epochs: Number of epochs of each source that `max_epochs` does not name; None for no limit.
        skip_positions: Positions whose windows are skipped.
        num_tokens: Number of tokens to train on, padding included; None for no limit.
    """

    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    seed: int = 0
    mix: Mapping[str, int] | None = None
    max_epochs: Mapping[str, int] | None = None
    packing: Packing | None = None
    num_epochs: int | None = None
    skip_positions: Ranges = ()
    num_tokens: int | None = None


class TrainingData(Protocol):
    """Training data. All ranks make the same calls; only `sum_usage` communicates."""

    @property
    def kind(self) -> DataKind:
        """Returns what the data consist of."""

    @property
    def options(self) -> TrainingOptions:
        """Returns the options of sequences and batches."""

    @property
    def packing(self) -> Packing:
        """Returns how documents are put into sequences: what the options say, or the default of these data."""

    @property
    def identity(self) -> dict[str, str]:
        """Returns the entries that identify the data in a checkpoint."""

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids of the tokenizer."""

    @property
    def vocabulary_owner(self) -> str:
        """Returns the name of the vocabulary's owner, for error messages."""

    @property
    def chat_template(self) -> str | None:
        """Returns the chat template that is learned, for prompts; None without conversations."""

    @property
    def pairs(self) -> PairSet | None:
        """Returns the pairs or single answers that the data consist of; None for sequences of tokens."""

    @property
    def sequence_format(self) -> SequenceFormat:
        """Returns how tokens become sequences."""

    # ---- training

    def open(self, ranks: Ranks, *, pads_pairs: bool = False) -> None:
        """Opens the data for one rank and checks that they can be trained on; may be called repeatedly.

        Args:
            ranks: The number of this rank.
            pads_pairs: Whether each answer of a pair has a row of `seq_len` tokens; else those of a micro-batch are one
                row without padding.
        """

    def close(self) -> None:
        """Ends the data's worker processes, if any; after the next `open` new ones can start."""

    @property
    def cursor(self) -> "DataCursor":
        """Returns where training is: the position, and the order of the training sequences or of their sources."""

    @property
    def num_windows(self) -> int:
        """Returns the number of windows of an epoch in Lightning's sense, whose end has no effect on the data."""

    def window(self, position: int) -> AccumulationWindow:
        """Returns this rank's window of the global batch that begins at `position`."""

    def advance(self, window: AccumulationWindow, *, has_tokens: bool = True) -> str | None:
        """Moves the position past a trained window; a second call for the same window has no effect.

        Args:
            window: The window that was trained.
            has_tokens: Whether the window of any rank had a token.

        Returns:
            A line about the mix of sources that begins at the new position; None if the mix does not change there.
        """

    def find_end(self) -> str | None:
        """Returns a line with the reason why training ends at this position, None if it continues."""

    def sum_usage(self, sum_over_ranks: SumOverRanks) -> dict[str, dict[str, float]]:
        """Returns the usage of each source up to the position, over all ranks, by the name of the metric."""

    # ---- validation

    @property
    def validation(self) -> Sequence[TokenSource]:
        """Returns the sources of the validation set; an empty sequence without such a set."""

    @property
    def validation_remedy(self) -> str:
        """Returns a line with the remedy for a run without a validation set."""

    # ---- state

    def state(self) -> dict[str, Any]:
        """Returns this rank's state in plain types."""

    def load_state(self, state: Mapping[str, Any]) -> str | None:
        """Continues from a saved state, with this run's mix from that position on.

        Returns:
            A line about the mix of sources if it differs from the saved one, else None.

        Raises:
            UserError: The saved run cannot be continued with these data.
        """

    def combine_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state for `load_state`, combined from the states of all ranks that saved."""

    # ---- telemetry

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the throughput of the data's workers together; None without workers, or before their first block."""

    @property
    def queue_depths(self) -> tuple[int, ...]:
        """Returns the number of blocks that each of these workers still has to make."""

    @property
    def wait_remedy(self) -> str:
        """Returns the remedy for training that waits for the data."""


class DataCursor:
    """Where training is: a position in an order of sequences, with the mix that is in force there.

    The order is built at the first use, because that opens the data.

    Args:
        options: The seed, the mix, the limits of epochs, and what is skipped.
        list_sources: Returns the sources, whose weights are the mix where the options have none.
        count: Returns the number of sequences of each source, and the weights by which these are mixed, from the
            weights of the sources.
        has_limits: Whether the order ends at the limits of epochs; False where the data keep them by themselves.

    Attributes:
        position: The position after the last trained window.
    """

    def __init__(
        self,
        options: TrainingOptions,
        list_sources: Callable[[], Sequence[TokenSource] | Sequence[SourceOptions]],
        count: Callable[[Mapping[str, int]], tuple[Mapping[str, int], Mapping[str, int]]],
        *,
        has_limits: bool = True,
    ) -> None:
        self.position = 0
        self._options, self._list_sources, self._count, self._has_limits = options, list_sources, count, has_limits

    @property
    def weights(self) -> Mapping[str, int]:
        """Returns the weights of the sources, as the user wrote them."""
        if self._options.mix is not None:
            return self._options.mix
        return {source.name: source.weight for source in self._list_sources()}

    @cached_property
    def order(self) -> SequenceOrder:
        """Returns the order, or that of the saved run which is continued."""
        return self._build()

    @property
    def last_position(self) -> int | None:
        """Returns the position after the last whole global batch; None if it is unknown or the data never end."""
        end, size = self.order.end, self._options.global_batch_size
        return None if end is None else end - max(0, end - self.position) % size

    def advance(self, window: AccumulationWindow) -> str | None:
        """Moves the position past a trained window; a second call for the same window has no effect.

        Returns:
            A line about the mix of sources that begins at the new position; None if the mix does not change there.

        Raises:
            RuntimeError: The window neither begins nor ends at the position: training skipped or repeated windows.
        """
        before, after = self.position, window.data_position
        if after not in (before, before + self._options.global_batch_size):
            raise RuntimeError(
                f"a window that ends at position {after} was trained at position {before}: windows are trained in "
                "order, each once"
            )
        self.position = after
        passed = [mix for mix in self.order.mixes if before < mix.start_position <= after and any(mix.weights)]
        return describe_mixes(self.order, passed, self.weights) if passed else None

    def state(self) -> dict[str, Any]:
        """Returns the position and the order, in plain types."""
        return {"data_position": self.position, "order": self.order.state()}

    def load_state(self, state: Mapping[str, Any]) -> str | None:
        """Continues at a saved position and in the saved order, with the mix of this run's options from there on.

        What this run skips is skipped beside what the saved run skips.

        Returns:
            A line about what changes; None if nothing does.

        Raises:
            UserError: The saved run had another order.
        """
        position, size, skips = state["data_position"], self._options.global_batch_size, self._options.skip_positions
        order = self._build().continued(state["order"], position)
        asked = clip(skips, 0, position)
        notes = []
        if any(clip(order.skipped, first, stop) != ((first, stop),) for first, stop in asked):
            notes.append(
                f"data.skip_positions has positions before the checkpoint's, {position} ({describe(asked)}): what was "
                "trained there is not skipped"
            )
        order = order.with_skips(skips, position, size)
        if order.state()["mixes"] != state["order"]["mixes"]:
            now = replace(order.mix_at(position), start_position=position)
            ahead = [mix for mix in order.mixes if mix.start_position > position]
            notes.append(describe_mixes(order, [now, *ahead], self.weights))
        self.position, self.order = position, order
        return "; ".join(notes) or None

    def _build(self) -> SequenceOrder:
        options = self._options
        counts, weights = self._count(self.weights)
        limits: dict[str, int] = {}
        if self._has_limits:
            limits = {} if options.num_epochs is None else dict.fromkeys(counts, options.num_epochs)
            limits |= options.max_epochs or {}
        order = build_order(counts, weights, options.seed, limits)
        return order.with_skips(options.skip_positions, 0, options.global_batch_size)


def describe_mixes(order: SequenceOrder, mixes: Sequence[Mix], weights: Mapping[str, int]) -> str:
    """Returns a line about mixes: the weights that the user wrote, their shares, and their start positions.

    The weights of the order itself count sequences. They are large if a packing fills the sources' sequences
    differently.
    """

    def describe(mix: Mix) -> str:
        consumed = {name: weights[name] for name, weight in zip(order.names, mix.weights, strict=True) if weight}
        total = sum(consumed.values())
        shares = ", ".join(f"{name} {weight} ({100 * weight / total:.3g}%)" for name, weight in consumed.items())
        return f"{shares or 'none, every source has reached its limit'} from position {mix.start_position} on"

    return "the mix of sources changes: " + "; ".join(map(describe, mixes))


_BEFORE_PACKING: Final[dict[str, Any]] = {"packing": "chunk", "plans": {}}
"""The packing of checkpoints that do not record it."""
_REMEDIES: Final = {
    "seq_len": "set data.seq_len to the checkpoint's",
    "packing": "set data.packing to the checkpoint's",
    "plans": "train with the plan that the checkpoint was trained with",
    "answers": "train on the corpus that the checkpoint was trained on, with its margins and values",
}


def check_counts(**counts: int | None) -> None:
    """Refuses a count below 1.

    Raises:
        UserError: A count is below 1; the message has the name of its option.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"data.{name} is {value}; it must be at least 1")


def refuse_skips(options: TrainingOptions, what: str) -> None:
    """Refuses `data.skip_positions` for a kind of data.

    Raises:
        UserError: The option is given.
    """
    if options.skip_positions:
        raise UserError(f"data.skip_positions cannot skip {what}: leave it out, or remove them from the data")


def check_kind(state: Mapping[str, Any], *, is_stream: bool) -> None:
    """Checks that a state was saved by a run on the same kind of data.

    Raises:
        UserError: The state is of another kind of data.
    """
    if is_stream == ("stream" in state):
        return
    was, now = ("a corpus", "a stream") if is_stream else ("a stream", "a corpus")
    raise UserError(
        f"the checkpoint was trained on {was}, but this run trains on {now}, whose positions differ; use the "
        "checkpoint's data, or start a new run from its weights (--checkpoint.restore weights)"
    )


def check_sequences(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Checks that the positions of a state select the same sequences as in this run.

    Args:
        state: The saved state.
        here: This run's settings that, together with the order, determine the tokens of a sequence.

    Raises:
        UserError: A setting differs.
    """
    for key, value in here.items():
        if key == "answers" and key not in state:  # earlier versions saved only where answers end
            continue
        saved = state.get(key, _BEFORE_PACKING.get(key))
        if saved != value:
            raise UserError(
                f"the checkpoint was trained with {key} {saved}, but this run has {value}, so that a position "
                f"selects other sequences: {_REMEDIES[key]}"
            )
