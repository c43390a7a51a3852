"""The data of a run for Lightning: loaders over a corpus, a stream or prompts, from an exact position.

The data are a `TrainingData` (`genesis.data`), which has the position. This module makes loaders of its windows and
implements Lightning's hooks. A callback that the module puts before all others moves the position
(`data_position.py`).

An epoch, in Lightning's sense, is as many windows as the corpus has sequences for, with any mix. Position and order
continue after it, so `max_steps` is the natural length of a run, and `trainer.max_epochs` counts corpus sizes. The data
end, and the run with them, only if all sources have limits (`data.max_epochs`). Lightning's epoch of a stream never
ends, because the number of its sequences is unknown.

With `data.num_epochs`, `data.num_tokens`, or limits of epochs alone, the number of steps follows from the data: the
module sets it as the Trainer's `max_steps` before the schedule, which is set up after it, looks for its end.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.device import is_host
from genesis.base.errors import QuietExit, UserError, check_is_named, numbered
from genesis.data.clock import CopyClock
from genesis.data.corpus import VerifyHashes
from genesis.data.corpus_data import CorpusData
from genesis.data.loader import Ranks, WindowLoader
from genesis.data.packing import Packing
from genesis.data.pair_windows import SomePairWindows
from genesis.data.pairs import spread_validation
from genesis.data.prompt_data import HeldOutWindows, PromptData
from genesis.data.prompts import PromptOptions
from genesis.data.sizes import Size
from genesis.data.skipped import read_ranges
from genesis.data.stream.options import StreamOptions
from genesis.data.stream_data import StreamData
from genesis.data.training_data import TrainingData, TrainingOptions, check_counts
from genesis.data.validation_windows import ValidationWindows, name_measure
from genesis.data.window import AccumulationWindow
from genesis.generate.teacher import TeacherReference
from genesis.objectives.objective import Objective
from genesis.objectives.policy_gradient import PolicyGradient
from genesis.strategies.layout import layout_strategy
from genesis.train.data_position import MoveDataPosition
from genesis.train.episodes import Episodes
from genesis.train.fixed_rows import has_fixed_rows
from genesis.train.planned_steps import DATA_MAX_EPOCHS, TRAINER_MAX_EPOCHS, count_steps
from genesis.train.reward import Rewards, find_reward_models, identify_reward_models
from genesis.train.rollout import Rollouts, check_strategy
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.phases import note_progress


class CorpusDataModule(pl.LightningDataModule):
    """Windows of a prepared corpus or of a stream; the batch of its loaders is an `AccumulationWindow`.

    All ranks make the same calls. Only logging a stream's figures communicates. A resumed run starts from a restored
    state; a new run needs a new data module.

    Args:
        corpus: The directory that `genesis data prepare` wrote. Beside a stream it gives the validation set and the
            tokenizer alone, and may be left out.
        seq_len: Tokens of a sequence; `auto` for as many as the conversations of the corpus need, at most 2,048.
        micro_batch_size: Sequences of one forward and backward on one rank.
        global_batch_size: Sequences of one step, over all ranks; `auto` for 1 to 32 conversations, by the size of the
            corpus. A run that continues keeps its own.
        seed: The seed of the order.
        mix: Integer weights of sources, by their tokens (of a stream, by their sequences); by default those that the
            corpus was prepared with, or the stream's sources have.
        max_epochs: Maximum number of epochs by source; a source that is not named has no limit.
        packing: How documents are put into sequences: `chunk` cuts their stream evenly, `best_fit` keeps them whole,
            `pad` gives each a sequence of its own. By default `best_fit` for conversations, else `chunk`. The plan of
            conversations is made when it is missing; for text, run `genesis data plan`.
        num_epochs: Passes over each source (except those in `max_epochs`); sets the number of steps. The last
            sequences, too few for a batch, are dropped.
        stream: Raw shards to train on instead of a corpus.
        validation_micro_batch_size: Sequences of one validation forward; by default `micro_batch_size`.
        limit_validation_sequences: Number of validation sequences, evenly spread; by default all of them.
        pads_pairs: Whether each answer of a pair has a row of `seq_len` tokens, so that all micro-batches have one
            shape; by default only with compiled blocks. Otherwise the answers of a micro-batch are one row without
            padding. A corpus of pairs counts pairs wherever another counts sequences.
        prefetch_windows: Number of windows that a thread prepares ahead of the training step.
        verify_hashes: Whether to compare each shard with its hash when it is first read.
        tokenizer_hash: The hash of the tokenizer that the corpus must have been prepared with; by default any.
        prompts: Prompts that the model answers itself, instead of a corpus, for GRPO, GSPO and OnPolicyDistillation.
        num_tokens: Number of tokens to train on, padding included; sets the number of steps.
        skip_positions: Positions to skip, as [FIRST, STOP], STOP not included: steps whose global batch has one of them
            train on nothing. A checkpoint records them. Not for pairs and prompts.

    Attributes:
        training: The training data.
        allows_reward_code: Whether the reward function of `prompts` may be run; set it before a fit.
        recorded_identity: The identity in the checkpoint that a run continues from, by which the reward models of
            `prompts` are found again; set it before a fit.
        copy_clock: Measures the time of copying windows to a GPU.
    """

    def __init__(
        self,
        corpus: str | None = None,
        *,
        seq_len: Size,
        micro_batch_size: int,
        global_batch_size: Size,
        seed: int = 0,
        mix: dict[str, int] | None = None,
        max_epochs: dict[str, int] | None = None,
        packing: Packing | None = None,
        num_epochs: int | None = None,
        stream: StreamOptions | None = None,
        validation_micro_batch_size: int | None = None,
        limit_validation_sequences: int | None = None,
        pads_pairs: bool | None = None,
        prefetch_windows: int = 2,
        verify_hashes: VerifyHashes = "first_touch",
        tokenizer_hash: str | None = None,
        prompts: PromptOptions | None = None,
        # Without the type of its entries: for each entry jsonargparse copies the whole list.
        skip_positions: list | None = None,  # type: ignore[type-arg]
        num_tokens: int | None = None,
    ) -> None:
        super().__init__()
        # `genesis fit` has put numbers in their place (`genesis.data.sizes`).
        assert seq_len != "auto"
        assert global_batch_size != "auto"
        options = TrainingOptions(
            *(seq_len, micro_batch_size, global_batch_size, seed, mix, max_epochs, packing, num_epochs),
            read_ranges(skip_positions),
            num_tokens,
        )
        self.training = _build_training_data(corpus, stream, prompts, options, verify_hashes, tokenizer_hash)
        self._prompts = self.training if isinstance(self.training, PromptData) else None
        self.allows_reward_code = False
        self.recorded_identity: Mapping[str, Any] = {}
        self._rollouts: Rollouts | None = None
        self.copy_clock = CopyClock()
        self._validation_micro_batch_size = (
            micro_batch_size if validation_micro_batch_size is None else validation_micro_batch_size
        )
        self._limit_validation_sequences = limit_validation_sequences
        self._pads_pairs_option = pads_pairs
        self._prefetch_windows = prefetch_windows
        self._has_set_max_steps = False
        self._limit_val_batches: int | float | None = None  # the trainer's own value, while there is no validation set

    # ---- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Opens the data and checks that they can be trained on, before a model is built."""
        self._give_back_validation()  # an earlier error may have skipped the teardown
        check_counts(
            seq_len=self.training.options.seq_len,
            micro_batch_size=self.training.options.micro_batch_size,
            global_batch_size=self.training.options.global_batch_size,
            validation_micro_batch_size=self._validation_micro_batch_size,
            limit_validation_sequences=self._limit_validation_sequences,
            num_epochs=self.training.options.num_epochs,
            num_tokens=self.training.options.num_tokens,
        )
        if self._prefetch_windows < 0:
            raise UserError(f"data.prefetch_windows is {self._prefetch_windows}; it must be at least 0")
        if self.trainer is not None:
            _check_validation(self.trainer)
        if stage == "fit":
            self._set_up_objective()
            if self.trainer is not None and isinstance(self.training, CorpusData):
                make_plan_in_turn(self.training, self.trainer)
            self.training.open(self._ranks(), pads_pairs=self.pads_pairs)
            self._set_max_steps()
            self._put_position_callback_first()
        held_out = () if self._prompts is None else self._prompts.prompts.held_out
        has_validation_set = bool(held_out) or any(source.num_tokens for source in self.training.validation)
        if stage == "validate":
            self._check_can_validate(has_validation_set)
            self._set_up_objective()
        if stage == "fit" and self.trainer is not None and not has_validation_set:
            self._limit_val_batches = self.trainer.limit_val_batches
            self.trainer.limit_val_batches = 0  # else Lightning warns of a loader without batches

    def train_dataloader(self) -> WindowLoader:
        """Returns this rank's windows from the current position on."""
        self.training.open(self._ranks(), pads_pairs=self.pads_pairs)
        return WindowLoader(
            self.training.window,
            self._positions,
            self.training.num_windows,
            self._prefetch_windows,
            self._has_accelerator(),
        )

    def val_dataloader(self) -> WindowLoader:
        """Returns this rank's share of the validation set; no windows if there is no such set."""
        windows = self._validation_windows()
        return WindowLoader(
            windows.window, lambda: range(len(windows)), len(windows), self._prefetch_windows, self._has_accelerator()
        )

    def on_before_batch_transfer(self, batch: AccumulationWindow, dataloader_idx: int) -> AccumulationWindow:
        """Returns the window; one of prompts is answered here, on the training thread and by the current weights."""
        if self._rollouts is None or self.trainer is None:
            return batch
        if self.trainer.training:
            return self._rollouts.fill(batch)
        windows = self._validation_windows()
        assert isinstance(windows, HeldOutWindows)
        return self._rollouts.validate(batch, windows.prompts_of(batch))

    def transfer_batch_to_device(
        self, batch: AccumulationWindow, device: torch.device, dataloader_idx: int
    ) -> AccumulationWindow:
        """Returns the window on `device`; from page-locked memory the host does not wait for the copy."""
        return self.copy_clock.copy(batch, device)

    def teardown(self, stage: str) -> None:
        """Reverts the changes of `setup` to the trainer, and ends a stream's workers."""
        self.training.close()
        if self._rollouts is not None:
            self._rollouts.close()
        self._rollouts = None  # and the process of its rewards
        self._give_back_validation()
        if self.trainer is not None and self._has_set_max_steps:
            self.trainer.fit_loop.epoch_loop.max_steps, self._has_set_max_steps = -1, False
        callbacks = self._callbacks()
        callbacks[:] = [callback for callback in callbacks if not self._is_own(callback)]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last trained window, in plain types."""
        return self.training.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at a saved run's position, with this run's mix from there on. Validation does not use this state.

        Raises:
            UserError: This data module cannot continue the saved run's order.
        """
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            return
        note = self.training.load_state(state_dict)
        if note is not None:
            rank_zero_info(note)

    def combine_rank_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state for `load_state_dict` from the states of all ranks that saved."""
        return self.training.combine_states(states)

    # ---- parts

    @property
    def data_position(self) -> int:
        """The position after the last trained window, for `Heartbeat`."""
        return self.training.cursor.position

    @property
    def validation_measure(self) -> tuple[str | None, str | None]:
        """What a validation measures, so that checkpoints know which of its losses can be compared (`name_measure`)."""
        corpus = self.training.corpus if isinstance(self.training, CorpusData | StreamData) else None
        if corpus is None:
            return None, None
        return name_measure(corpus, self.training.options.seq_len, self._limit_validation_sequences)

    @property
    def why_no_validation(self) -> str | None:
        """Why this fit does not validate; None if it does."""
        if self._limit_val_batches is not None:
            return self.training.validation_remedy
        is_off = self.trainer is not None and self.trainer.limit_val_batches == 0
        return "trainer.limit_val_batches is 0" if is_off else None

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """The rows of a step over all ranks, and those of a micro-batch; a prompt has one row for each answer."""
        options = self.training.options
        num_answers = 1 if self._prompts is None else self._prompts.prompt_options.group_size
        return num_answers * options.global_batch_size, options.micro_batch_size

    @property
    def identity(self) -> dict[str, str]:
        """The entries that identify the data, and the models that reward answers, in a checkpoint."""
        if self._prompts is None:
            return self.training.identity
        return {
            **self.training.identity,
            **identify_reward_models(self._reward_models, self._prompts.prompt_options.chat_of_others),
        }

    @cached_property
    def _reward_models(self) -> dict[str, TeacherReference]:
        """The reward models, found once: the run of one may go on meanwhile."""
        assert self._prompts is not None
        return find_reward_models(self._prompts.prompt_options.all_rewards, self.recorded_identity)

    @property
    def has_ragged_pairs(self) -> bool:
        """Whether the option asks for rows of several lengths."""
        return self._pads_pairs_option is False

    @property
    def pads_pairs(self) -> bool:
        """Whether each answer of a pair has a row of its own."""
        if self._pads_pairs_option is not None or self.trainer is None:
            return bool(self._pads_pairs_option)
        return has_fixed_rows(self.trainer)

    def read_for(self, objective: Objective) -> None:
        """Reads the data as an objective learns from them. Call it before anything asks for their packing.

        Raises:
            UserError: The objective needs rewards, and the data have none.
        """
        if isinstance(self.training, CorpusData):
            self.training.has_answers = objective.learns_from == "answers"
            self.training.has_ends = objective.scores_texts
        if self._prompts is not None and objective.learns_from == "prompts":
            self._prompts.prompt_options.check_rewards(are_learned=objective.learns_rewards)

    def _validation_windows(self) -> ValidationWindows | SomePairWindows | HeldOutWindows:
        size, limit = self._validation_micro_batch_size, self._limit_validation_sequences
        if self._prompts is not None:
            return self._prompts.held_out(self._ranks(), limit)
        pairs, sequence_format = self.training.pairs, self.training.sequence_format
        if pairs is None:
            return ValidationWindows(self.training.validation, sequence_format, size, self._ranks(), limit)
        pairs.check_lengths(sequence_format.seq_len)
        numbers = spread_validation(pairs, limit)
        return SomePairWindows(pairs, numbers, sequence_format, size, self._ranks(), is_padded=self.pads_pairs)

    def _positions(self) -> range:
        """Returns the positions of an epoch's windows; fewer if the data end before the epoch."""
        cursor, step = self.training.cursor, self.training.options.global_batch_size
        end = cursor.position + self.training.num_windows * step
        if cursor.last_position is not None:
            end = min(end, cursor.last_position)
        return range(cursor.position, end, step)

    def _ranks(self) -> Ranks:
        """Returns this rank's index among the ranks with different data."""
        if self.trainer is None:
            return Ranks()
        layout = layout_strategy(self.trainer.strategy).layout
        return Ranks(layout.data_rank, layout.data_world_size)

    def _set_up_objective(self) -> None:
        """Refuses an objective or a strategy that does not fit the data, and loads the reward functions of prompts."""
        if self.trainer is None:
            return
        objective = getattr(self.trainer.lightning_module, "objective", None)
        if objective is not None:  # the module of another may have none
            self.read_for(objective)
            check_data(objective, self.training)
        if self._prompts is not None:
            check_strategy(self.trainer.strategy)
            options = self._prompts.prompt_options
            is_of_batch = isinstance(objective, PolicyGradient) and objective.options.advantage == "batch_std"
            if options.max_resamples and is_of_batch:
                raise UserError(
                    f"data.prompts.max_resamples is {options.max_resamples}, but with advantage batch_std answers to a "
                    "prompt are learned also where their rewards are equal; set it to 0, or choose another advantage"
                )
            if options.writer.is_remote and objective is not None and objective.has_teacher:
                raise UserError(
                    "data.prompts.rollouts.by is openai, but a student that a teacher corrects writes its answers "
                    "itself; leave rollouts out"
                )
            rewards = Rewards(
                options.all_rewards,
                options.reward_seconds,
                is_allowed=self.allows_reward_code,
                device=self.trainer.strategy.root_device,
                models=self.trainer.strategy.broadcast(self._reward_models) if self._reward_models else {},
                chat=options.chat_of_others,
            )
            trained = (prompt for prompts in self._prompts.prompts.of_source.values() for prompt in prompts)
            rewards.check_prompts([*trained, *self._prompts.prompts.held_out])
            note = partial(note_progress, self.trainer)
            episodes = None if options.environment is None else Episodes(self._prompts, self.allows_reward_code, note)
            self._rollouts = Rollouts(self._prompts, rewards, self.trainer, episodes)

    def _set_max_steps(self) -> None:
        """Sets the Trainer's number of steps from the length in epochs or tokens, before the schedule reads it.

        Raises:
            UserError: Two options say how long to train, or the data have no number of steps for one of them.
        """
        trainer, options = self.trainer, self.training.options
        if trainer is None:
            return
        found = count_steps(self.training, trainer.max_epochs)
        if found is None:
            return
        option, num_steps = found
        if trainer.max_steps != -1 and not self._has_set_max_steps:
            if option in (TRAINER_MAX_EPOCHS, DATA_MAX_EPOCHS):
                return  # limits, of which the first one ends the run
            raise UserError(
                f"{option} ({numbered(num_steps, 'steps')}) and trainer.max_steps {trainer.max_steps} both say how "
                "long to train; leave one out"
            )
        if not num_steps:
            raise UserError(
                f"{option} gives fewer sequences than data.global_batch_size {options.global_batch_size}; lower it, or "
                f"raise {option.partition(' ')[0]}"
            )
        trainer.fit_loop.epoch_loop.max_steps, self._has_set_max_steps = num_steps, True

    def _give_back_validation(self) -> None:
        if self.trainer is not None and self._limit_val_batches is not None:
            self.trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None

    def _check_can_validate(self, has_validation_set: bool) -> None:
        if not has_validation_set:
            raise UserError(self.training.validation_remedy)
        if self.trainer is not None and not self.trainer.limit_val_batches:
            raise UserError("trainer.limit_val_batches is 0, so that nothing would be validated; remove it")

    def _has_accelerator(self) -> bool:
        return self.trainer is not None and not is_host(self.trainer.strategy.root_device.type)

    def _callbacks(self) -> list[pl.Callback]:
        if self.trainer is None:
            return []
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by its connector
        return callbacks

    def _put_position_callback_first(self) -> None:
        callbacks = self._callbacks()
        # First in the list, because a callback that saves at a batch's end must find the position after that batch.
        if not any(self._is_own(callback) for callback in callbacks):
            callbacks.insert(0, MoveDataPosition(self.training, sets_max_steps=self._has_set_max_steps))

    def _is_own(self, callback: pl.Callback) -> bool:
        return isinstance(callback, MoveDataPosition) and callback.data is self.training


def make_plan_in_turn(data: CorpusData, trainer: pl.Trainer) -> None:
    """Makes a missing packing plan on the first rank of each node, one node after the other; all ranks wait.

    The first node's plan is the only one where nodes share the corpus: the others find it. Nodes with corpora of their
    own make one each. So there are never two writers, also where a file system has no locks. Communicates.

    Raises:
        UserError: A plan cannot be made.
        QuietExit: On another rank; that rank reports why.
    """
    for node in range(trainer.num_nodes):
        failed: Exception | None = None
        if (trainer.node_rank, trainer.local_rank) == (node, 0):
            try:
                data.make_plan()
            except Exception as error:  # the others wait for the word of this rank, and raised below
                failed = error
        # By the host: a device's group would wait on the device, and give up sooner than a large plan is made.
        (has_failed,) = HostGroup().max([int(failed is not None)]).wait()
        if failed is not None:
            raise failed
        if has_failed:
            raise QuietExit(UserError.exit_status)


def _build_training_data(
    corpus: str | None,
    stream: StreamOptions | None,
    prompts: PromptOptions | None,
    options: TrainingOptions,
    verify_hashes: VerifyHashes,
    tokenizer_hash: str | None,
) -> TrainingData:
    check_is_named(corpus, "data.corpus")
    path = None if corpus is None else Path(corpus)
    if prompts is not None:
        if path is not None or stream is not None:
            raise UserError("data.prompts is trained on alone; leave out data.corpus and data.stream")
        return PromptData(prompts, options, tokenizer_hash=tokenizer_hash)
    if stream is not None:
        if options.num_epochs is not None:
            raise UserError(
                f"data.num_epochs is {options.num_epochs}, but nobody has counted the sequences of a stream; give "
                "trainer.max_steps or data.num_tokens, and limits by data.max_epochs"
            )
        return StreamData(stream, options, corpus_path=path, verify_hashes=verify_hashes, tokenizer_hash=tokenizer_hash)
    if path is None:
        raise UserError(
            "there is nothing to train on; give data.corpus (of `genesis data prepare`), data.stream or data.prompts"
        )
    return CorpusData(path, options, verify_hashes=verify_hashes, tokenizer_hash=tokenizer_hash)


def _check_validation(trainer: pl.Trainer) -> None:
    """Rejects options under which validation depends on the number of ranks, or a rank would wait forever."""
    settings = vars(trainer)
    if settings["fast_dev_run"] or settings["overfit_batches"]:  # both are tests on a few batches
        return
    limit = trainer.limit_val_batches
    if limit and not (isinstance(limit, float) and limit == 1.0):
        raise UserError(
            f"trainer.limit_val_batches is {limit}: it counts micro-batches of each rank, so that the sequences depend "
            "on the number of ranks; set data.limit_validation_sequences, which spreads them over the whole set"
        )
    if trainer.world_size > 1 and "val_check_interval" not in settings:  # set if it is a number of steps
        raise UserError(
            "trainer.val_check_interval is a time: the clocks of ranks differ, so that ranks that validate would wait "
            "for ranks that train; give a number of steps"
        )


def check_data(objective: Objective, data: TrainingData) -> None:
    """Refuses data from which an objective cannot learn, before the model is built.

    Raises:
        UserError: The data are of another kind, lack the values of documents, or come in too small micro-batches.
    """
    name, wanted, given = type(objective).__name__, objective.learns_from, data.kind
    if wanted == "prompts" != given:
        raise UserError(f"model.objective is {name}, which learns from its own answers to prompts; give data.prompts")
    if given == "prompts" != wanted:
        raise UserError(
            f"data.prompts is given, but model.objective is {name}, which learns from given texts; set model.objective "
            "to GRPO, GSPO or OnPolicyDistillation, or give data.corpus"
        )
    if wanted == "pairs" != given:
        raise UserError(
            f"{name} learns from pairs of answers, and the data have none: give data.corpus, made by `genesis data "
            "prepare` of sources with chat: pairs"
        )
    if given == "pairs" != wanted:
        raise UserError(
            "data.corpus has pairs of answers, half of which are not to be learned: give model.objective, such as "
            "genesis.objectives.DPO, or a corpus of conversations"
        )
    if (objective.needs_values or wanted == "answers") and not data.sequence_format.has_values:
        raise UserError(
            f"{name} needs the value of each conversation, and the data have none: prepare data.corpus of "
            "sources with value_field, the name of a field of each record"
        )
    objective.check_micro_batch(data.options.micro_batch_size)
