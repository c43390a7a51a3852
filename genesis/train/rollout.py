"""Rollouts: the model answers prompts in the middle of training, and its answers become the windows of the next steps.

The answers to the prompts of `steps_per_rollout` steps are written by the same weights, scored, and compared within
their group. Their log-probabilities by these weights come from the training forward, in the same micro-batches as in
training, so that the ratio of the first step is 1 and not a difference between two kinds of forward.

An answer's random numbers depend on the seed, the position of its prompt and its number alone: ranks share the prompts
of each global batch, and any number of ranks gives the same answers up to the rounding of other matrix shapes. Ranks
that read the same prompts, because they share rows, matrices or layers, divide the answers: one of them writes and
scores each, and gives it to the others, so that all train on the same rewards.

Nothing here keeps state: the answers are part of the data's state, so that a run killed in a rollout repeats the
rollout, and a run killed after it continues with the saved answers.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray
from torch import Tensor

from genesis.base.errors import RunEndedError, UserError
from genesis.base.run_directory import RunDirectory
from genesis.data.loader import SequenceFormat, build_window
from genesis.data.prompt_data import EPISODE_COUNTS, EpisodesOfGroup, Group, PromptData
from genesis.data.prompts import OVERLONG, Prompt
from genesis.data.window import IGNORE_INDEX, AccumulationWindow
from genesis.generate.batch import Batch, Request, check_is_number
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.adapter import AdapterConfig, adapters_merged
from genesis.model.decoder import Decoder
from genesis.objectives.objective import Objective
from genesis.objectives.policy_gradient import (
    ADVANTAGE,
    ANSWERS,
    COUNT_OF,
    IS_FINISHED,
    IS_FIRST,
    LAG,
    LEARNED_ANSWERS,
    LEARNED_TOKENS,
    LONGEST,
    MAX_RATIO,
    NUM_ASKED,
    OLD_LOG_PROB,
    OLD_TOKEN_LOG_PROB,
    REWARD,
    REWARD_OF,
    SERVER_LOG_PROB,
    SPREAD,
    SPREAD_OF,
    TEMPERATURE,
    VALIDATION_FIGURES,
    measure_spread,
    score_tokens,
)
from genesis.strategies import Sharded
from genesis.strategies.layout import layout_strategy
from genesis.strategies.whole import gather_decoder
from genesis.strategies.wrap import free_gathered_parameters
from genesis.train.answer_journal import Completion
from genesis.train.episodes import Answer, Asked, Episodes, describe_episode, shorten_transcripts
from genesis.train.fixed_rows import has_fixed_rows
from genesis.train.reward import Rewards
from genesis.train.server_rollouts import ServerRollouts
from genesis_callbacks import AsyncProcessCheckpoint
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.host_group import HostGroup
from genesis_callbacks.phases import in_phase, note_progress
from genesis_callbacks.step_parts import timing

_ROW_MULTIPLE = 16
"""Rows are as long as the longest answer of their micro-batch needs, up to this multiple: fewer shapes of tensors."""


class _Row(NamedTuple):
    """One answer, before or after its group is complete; `is_own` are the tokens that the model has written."""

    position: int
    number: int
    prompt: Sequence[int] | NDArray[np.int32]
    answer: NDArray[np.int32]
    is_own: NDArray[np.bool_]


class _Written(NamedTuple):
    """The answers to a prompt, before they are scored by the training forward."""

    answers: list[Answer]
    single_rewards: NDArray[np.float64]
    num_resamples: int


class Rollouts:
    """Fills windows of `PromptData` with answers, which the model writes when they are needed. Communicates.

    Args:
        data: The prompts and the answers.
        rewards: The rewards of answers.
        trainer: The Trainer of the fit.
        episodes: What plays the episodes, if answers are episodes in an environment.
    """

    def __init__(
        self, data: PromptData, rewards: Rewards, trainer: pl.Trainer, episodes: Episodes | None = None
    ) -> None:
        self._data, self._rewards, self._trainer, self._episodes = data, rewards, trainer, episodes
        self._options = data.prompt_options.all_rewards
        # Not for a validation, whose answers are those of the weights at hand.
        is_remote = data.prompt_options.writer.is_remote and trainer.state.fn == TrainerFn.FITTING
        self._server = ServerRollouts(data, trainer, self._plan) if is_remote else None

    def close(self) -> None:
        """Ends what asks a server."""
        if self._server is not None:
            self._server.close()

    def fill(self, window: AccumulationWindow) -> AccumulationWindow:
        """Returns this rank's window with its answers. All ranks call it for the same window."""
        data = self._data
        position = window.data_position - data.options.global_batch_size
        if any(self._lacks_log_probs(one) for one in data.groups.values()):
            data.groups = {}  # of a run whose objective did not need them
        (num_missing,) = HostGroup().sum((len(data.plan_rollout(position)),)).wait()
        if num_missing:
            # After a resume with another batch size some answers may be known. All are written again, so that all ranks
            # have equally many: under sharding they run the same forwards.
            data.groups = {}
        if self._server is not None:
            with timing(self._trainer, "generation"), in_phase(self._trainer, "generate"):
                self._server.advance(position)
        if num_missing:
            with timing(self._trainer, "generation"), in_phase(self._trainer, "generate"):
                self._answer(data.plan_rollout(position))
        advantages = self._compare(data.own_positions(position))
        rows = self._rows_at(data.own_positions(position))
        micro_batches, num_bytes = [], 0
        for chunk in self._chunks(rows):
            built = self._build(chunk)
            extra = self._describe(chunk, advantages, built.micro_batches[0].labels, is_first=bool(num_missing))
            micro_batches.append(replace(built.micro_batches[0], extra=extra))
            num_bytes += built.num_bytes
        num_valid = sum(int(row.is_own.sum()) for row in rows)
        num_units = {}
        if self._objective.masks_cut_answers:
            finished = [row for row in rows if data.groups[row.position].is_finished[row.number]]
            learned = [int(row.is_own.sum()) for row in finished]
            num_units = {LEARNED_ANSWERS: len(learned), LEARNED_TOKENS: sum(learned)}
        return AccumulationWindow(tuple(micro_batches), num_valid, num_bytes, window.data_position, num_units)

    def validate(self, window: AccumulationWindow, prompts: Sequence[Prompt]) -> AccumulationWindow:
        """Returns the window of a validation with the sums of the greedy answers' figures. All ranks call it together.

        Nothing random is drawn and nothing is kept, so that a run trains the same with and without a validation.
        """
        requests = [self._request(prompt, SamplingOptions(0.0), 0) for prompt in prompts]
        # Answers take longer than the forwards of other validations: they have the limit of generation.
        with in_phase(self._trainer, "generate"), self._evaluating():
            answers, single = self._write(requests, [Asked(prompt, 1, 0) for prompt in prompts])
        free_gathered_parameters(self._decoder)
        num_tokens = sum(answer.num_own for answer in answers)
        sums = (self._add(single).sum(), sum(answer.is_finished for answer in answers), num_tokens)
        figures = dict(zip(VALIDATION_FIGURES, sums, strict=True)) | {
            REWARD_OF + name: values.sum() for name, values in self._by_name(single)
        }
        if not self._options:
            del figures[REWARD]
        return replace(
            window,
            num_valid_tokens=num_tokens,
            num_units={ANSWERS: len(answers)},
            figures={name: float(value) for name, value in figures.items()},
        )

    # ---- a rollout

    def _answer(self, positions: Sequence[int]) -> None:
        """Writes and scores the answers to the prompts at `positions`, and adds their groups to the data.

        A prompt whose answers give no signal is replaced by another one, as often as the options allow.
        """
        data, decoder = self._data, self._decoder
        options = data.prompt_options
        size = options.group_size
        rollout = None if self._server is None else self._server.find_rollout(data.cursor.position)
        written: dict[int, _Written] = {}
        asked = list(positions)
        with self._evaluating():
            for num_resamples in range(options.max_resamples + 1):
                prompts = [data.prompt_at(position, num_resamples) for position in asked]
                requests = self._request_all(asked, prompts, num_resamples)
                # All answers to a prompt begin alike.
                starts = [_seed(data.options.seed, position, 0, num_resamples) for position in asked]
                named = [
                    Asked(prompt, number + 1, start)
                    for prompt, start in zip(prompts, starts, strict=True)
                    for number in range(size)
                ]
                answers, single = self._write(requests, named, rollout)
                for index, position in enumerate(asked):
                    own = slice(index * size, (index + 1) * size)
                    written[position] = _Written(answers[own], single[own], num_resamples)
                asked = [position for position in asked if not self._has_signal(written[position].single_rewards)]
                # All ranks go on together, because they answer together.
                (num_asked,) = HostGroup().sum((len(asked),)).wait()
                if not num_asked:
                    break
            rows = [
                _Row(position, number, answer.prompt, answer.ids, answer.is_own)
                for position in positions
                for number, answer in enumerate(written[position].answers)
            ]
            scored: list[tuple[NDArray[np.float32], list[NDArray[np.float32]]]] = [
                (np.full(len(rows), np.nan, np.float32), [])
            ]
            if self._scores_answers:
                scored = [self._score_log_probs(decoder, chunk) for chunk in self._chunks(rows)]
        free_gathered_parameters(decoder)
        old_log_probs = np.concatenate([sums for sums, _ in scored])
        of_tokens = [one for _, found in scored for one in found]
        for index, position in enumerate(positions):
            own, one = slice(index * size, (index + 1) * size), written[position]
            by_server = tuple(answer.log_probs for answer in one.answers if answer.log_probs is not None)
            data.groups[position] = Group(
                tuple(answer.ids for answer in one.answers),
                np.array([answer.is_finished for answer in one.answers]),
                self._add(one.single_rewards),
                old_log_probs[own],
                one.single_rewards,
                tuple(of_tokens[own]) if of_tokens else None,
                one.num_resamples,
                _collect_episodes(one.answers),
                by_server or None,
            )
        self._write_samples(positions, {position: one.answers for position, one in written.items()})

    def _lacks_log_probs(self, group: Group) -> bool:
        if np.isnan(group.old_log_probs).any():
            return self._scores_answers
        return self._keeps_tokens and group.token_log_probs is None

    def _add(self, single: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the weighted sum of the rewards of each answer."""
        weighted: NDArray[np.float64] = single * [one.weight for one in self._options]
        # Not a product of matrices, whose rounding depends on the number of answers.
        rewards: NDArray[np.float64] = weighted.sum(1)
        return rewards

    def _by_name(self, single: NDArray[np.float64]) -> list[tuple[str, NDArray[np.float64]]]:
        """Returns the rewards of answers by name, if there are several."""
        return list(zip(self._rewards.names, single.T, strict=True)) if self._data.prompt_options.rewards else []

    def _has_signal(self, single: NDArray[np.float64]) -> bool:
        """Returns whether the answers to a prompt got different rewards, apart from those of their length."""
        is_counted = np.array([one.function != OVERLONG for one in self._options])
        return bool(np.ptp(self._add(single * is_counted)))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Computes as in training, without dropout and without gradients."""
        with _in_evaluation(self._decoder), self._trainer.precision_plugin.forward_context(), torch.no_grad():
            yield

    def _request(self, prompt: Prompt, sampling: SamplingOptions, seed: int) -> Request:
        room, most = self._data.options.seq_len - len(prompt.ids), self._data.prompt_options.max_new_tokens
        return Request(prompt.ids, room if most is None else min(room, most), sampling, seed)

    def _request_all(
        self, positions: Sequence[int], prompts: Sequence[Prompt], num_resamples: int = 0
    ) -> list[Request]:
        """Returns the requests for the answers to the prompts at `positions`."""
        options, seed = self._data.prompt_options, self._data.options.seed
        sampling = SamplingOptions(options.temperature)
        return [
            self._request(prompt, sampling, _seed(seed, position, number, num_resamples))
            for position, prompt in zip(positions, prompts, strict=True)
            for number in range(options.group_size)
        ]

    def _plan(self, positions: Sequence[int]) -> list[Request]:
        """Returns those of the requests for the answers at `positions` that this rank sends to a server."""
        requests = self._request_all(positions, [self._data.prompt_at(position) for position in positions])
        return [requests[index] for index in self._share(len(requests))]

    def _share(self, number: int) -> range:
        """Returns which of so many requests this rank answers, of those that its peers have, too."""
        groups = layout_strategy(self._trainer.strategy).layout.degrees.peer_groups()
        peers = next(group for group in groups if self._trainer.global_rank in group)
        return range(peers.index(self._trainer.global_rank), number, len(peers))

    def _write(
        self, requests: Sequence[Request], asked: Sequence[Asked], rollout: int | None = None
    ) -> tuple[list[Answer], NDArray[np.float64]]:
        """Returns the answers to this rank's requests, and their rewards by name. All ranks call it together.

        Args:
            requests: The requests.
            asked: What each is for.
            rollout: The number of the rollout that a server writes; None to answer here.
        """
        layout = layout_strategy(self._trainer.strategy).layout
        own = self._share(len(requests))
        written: dict[int, tuple[Answer, NDArray[np.float64]]] = {}
        failure: UserError | RunEndedError | None = None
        whole = None
        if rollout is None:
            whole = gather_decoder(self._decoder, self._adapter, layout.pipeline_process_group)
        try:
            ours = [requests[index] for index in own]
            if whole is None:
                answers = self._ask_server(rollout, ours)
            else:
                answers = self._answer_all(whole, ours, [asked[index] for index in own])
            for index, answer in zip(own, answers, strict=True):
                written[index] = answer, self._score(asked[index], answer)
                note_progress(self._trainer)  # a reward function may take long
        except (UserError, RunEndedError) as error:
            failure = error
        del whole
        # The ranks agree, because a rank that goes on alone would wait for the others in the next forward.
        (num_failed,) = HostGroup().sum((int(failure is not None),)).wait()
        if failure is not None:
            raise failure
        if num_failed:
            raise RunEndedError("another rank could not answer or score its prompts; its error has the reason")
        # Peers that scored an answer each would train on other rewards where a reward function is not deterministic.
        groups = layout.degrees.peer_groups()
        of_peers = {index: one for given in HostGroup(groups).gather(written) for index, one in given.items()}
        ordered = [of_peers[index] for index in range(len(requests))]
        single = np.array([found for _, found in ordered], np.float64).reshape(len(ordered), len(self._options))
        return [answer for answer, _ in ordered], single

    def _ask_server(self, rollout: int | None, requests: Sequence[Request]) -> list[Answer]:
        """Returns the answers of the server that writes a rollout."""
        assert self._server is not None, "a rollout has a number if a server writes it"
        assert rollout is not None
        return self._describe_answers(requests, self._server.answer(rollout, requests))

    def _answer_all(self, whole: Decoder, requests: Sequence[Request], asked: Sequence[Asked]) -> list[Answer]:
        """Returns the answers of the model to requests: their tokens alone, or whole episodes."""
        # Compiled blocks would be compiled again for nearly every length of a prompt.
        with torch.compiler.set_stance("force_eager"), adapters_merged(whole):
            if self._episodes is not None:
                return self._episodes.play(requests, asked, partial(self._generate, whole))
            return self._describe_answers(requests, [Completion(ids) for ids in self._generate(whole, requests)])

    def _describe_answers(self, requests: Sequence[Request], written: Sequence[Completion]) -> list[Answer]:
        return [
            Answer(
                tuple(request.prompt),
                one.ids,
                np.ones(len(one.ids), np.bool_),
                self._is_finished(one.ids),
                log_probs=one.log_probs,
            )
            for request, one in zip(requests, written, strict=True)
        ]

    def _score(self, asked: Asked, answer: Answer) -> NDArray[np.float64]:
        """Returns the rewards of an answer; of an episode, that of its last turn behind the ones before it."""
        episode, prompt = answer.episode, asked.prompt
        most = self._data.prompt_options.longest_answer(self._data.options.seq_len - len(answer.prompt))
        if episode is None:
            return self._rewards.score(prompt, self._text(answer.ids), asked.number, len(answer.ids), most)
        last = episode.last
        prompt, text = prompt._replace(messages=episode.messages[:last]), episode.messages[last]["content"]
        return self._rewards.score(prompt, text, asked.number, answer.num_own, most, episode.reward)

    def _generate(self, decoder: Decoder, requests: Sequence[Request]) -> list[NDArray[np.int32]]:
        """Returns the answers in the order of the requests."""
        data = self._data
        answers: list[list[int]] = [[] for _ in requests]
        num_rows = min(data.prompt_options.num_rows, max(1, len(requests)))
        batch = Batch(decoder, num_rows, data.stop_ids, num_slots=data.options.seq_len)
        waiting = iter(requests)
        request = next(waiting, None)
        while True:
            while request is not None and batch.num_free:
                batch.add(request)  # handles count up, so that a handle is the index of its request
                request = next(waiting, None)
            tokens = batch.step()
            if not tokens:
                break
            note_progress(self._trainer)
            for token in tokens:
                check_is_number(token)
                answers[token.request].append(token.id)
        return [np.array(ids, np.int32) for ids in answers]

    def _score_log_probs(
        self, decoder: Decoder, rows: Sequence[_Row]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """Returns the sum of the log-probabilities of each answer, by a forward as in training.

        And those of its tokens, if the objective needs them.
        """
        micro_batch = self._build(rows).micro_batches[0].to(self._trainer.strategy.root_device)
        temperature = self._temperature.to(micro_batch.labels.device)
        vocabulary = layout_strategy(self._trainer.strategy).vocabulary

        def head(hidden: Tensor, weight: Tensor) -> Tensor:
            of_tokens = score_tokens(hidden, weight, micro_batch.labels, temperature, vocabulary)
            # The sums are those of the training forward, to the bit, where its ratio is that of an answer.
            sums = vocabulary.sum_over_rows(of_tokens.sum(1))
            if not self._keeps_tokens:
                return sums
            whole = vocabulary.sum_over_rows(of_tokens.flatten()).view_as(of_tokens)
            return torch.cat([sums.unsqueeze(1), whole], dim=1)

        found: Tensor = decoder(
            micro_batch.input_ids,
            document_ids=micro_batch.document_ids,
            document_offsets=micro_batch.document_offsets,
            head=head,
        )
        numbers = found.float().cpu().numpy()
        if not self._keeps_tokens:
            return numbers, []
        is_label = (micro_batch.labels != IGNORE_INDEX).cpu().numpy()
        sums, of_tokens = numbers[:, 0], numbers[:, 1:]
        return sums, [ones[of_answer] for ones, of_answer in zip(of_tokens, is_label, strict=True)]

    def _is_finished(self, answer: NDArray[np.int32]) -> bool:
        return int(answer[-1]) in self._data.stop_ids

    def _text(self, answer: NDArray[np.int32]) -> str:
        """Returns an answer as text, without the token that ended it.

        Other control symbols are spelled: a reward for a format may depend on them, and a model must not hide tokens
        from its reward.
        """
        tokenizer = self._data.tokenizer
        ids = [token for token in answer.tolist() if token < tokenizer.vocab_size and token not in self._data.stop_ids]
        return tokenizer.spell(ids, has_controls=True)

    def _write_samples(self, positions: Sequence[int], written: Mapping[int, Sequence[Answer]]) -> None:
        """Writes the answers to a few prompts, or all episodes, into the run's directory.

        A repeated rollout replaces its file. Of episodes, older files keep those of a few prompts.
        """
        num_logged = self._data.prompt_options.num_logged_prompts
        positions = positions if self._episodes is not None else positions[:num_logged]
        checkpoints = [c for c in vars(self._trainer)["callbacks"] if isinstance(c, AsyncProcessCheckpoint)]
        layout = layout_strategy(self._trainer.strategy).layout
        if not positions or not checkpoints or not layout.reports_rows:
            return
        lines = []
        for position in positions:
            group = self._data.groups[position]
            prompt = self._data.prompt_at(position, group.num_resamples)
            for number, answer in enumerate(group.answers):
                is_own = group.is_own(number)
                sample = {
                    "position": position,
                    "prompt": prompt.name,
                    "messages": prompt.messages,
                    "answer": number + 1,
                    "text": self._text(answer),
                    "num_tokens": len(answer),
                    "is_finished": bool(group.is_finished[number]),
                }
                if self._options:
                    sample["reward"] = float(group.rewards[number])
                if (episode := written[position][number].episode) is not None:
                    sample |= describe_episode(episode)
                    sample |= {"num_tokens": written[position][number].num_own, "num_observed": int((~is_own).sum())}
                sample |= {f"reward_{name}": float(ones[number]) for name, ones in self._by_name(group.single_rewards)}
                lines.append(json.dumps(sample, ensure_ascii=False, default=repr))
        run = RunDirectory(checkpoints[0].directory.parent)
        path = run.rollout(positions[0], layout.data_rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, ("\n".join(lines) + "\n").encode("utf-8", "replace"))
        if self._episodes is not None:
            shorten_transcripts(run.rollouts, layout.data_rank, num_logged * self._data.prompt_options.group_size)

    # ---- from answers to tensors

    def _rows_at(self, positions: Sequence[int]) -> list[_Row]:
        groups = [(position, self._data.groups[position]) for position in positions]
        return [
            _Row(position, number, self._find_prompt(position, group), answer, group.is_own(number))
            for position, group in groups
            for number, answer in enumerate(group.answers)
        ]

    def _find_prompt(self, position: int, group: Group) -> Sequence[int] | NDArray[np.int32]:
        """Returns the ids before the answers to a prompt."""
        if group.episodes is not None:
            return group.episodes.prompt
        return self._data.prompt_at(position, group.num_resamples).ids

    def _chunks(self, rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
        """Yields the rows of each micro-batch."""
        size = self._data.options.micro_batch_size
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def _build(self, rows: Sequence[_Row]) -> AccumulationWindow:
        """Returns a window of one micro-batch, in which the tokens of the answers are the labels."""
        longest = max(len(row.prompt) + len(row.answer) for row in rows) - 1
        seq_len = self._data.options.seq_len
        multiple = seq_len if has_fixed_rows(self._trainer) else _ROW_MULTIPLE
        width = min(-(-longest // multiple) * multiple, seq_len)
        ids = np.full((len(rows), width + 1), self._data.sequence_format.padding_id, np.int64)
        has_label = np.zeros(ids.shape, np.bool_)
        lengths = np.empty(len(rows), np.int64)
        for number, row in enumerate(rows):
            end = len(row.prompt) + len(row.answer)
            ids[number, : len(row.prompt)], ids[number, len(row.prompt) : end] = row.prompt, row.answer
            has_label[number, len(row.prompt) : end] = row.is_own
            lengths[number] = end - 1
        return build_window(
            ids, self._format(width), len(rows), 0, np.zeros((len(rows), width), np.bool_), lengths, has_label
        )

    def _format(self, width: int) -> SequenceFormat:
        """Returns the format of rows of `width` tokens; the model may have ids that the tokenizer does not."""
        own = self._data.sequence_format
        num_more = max(0, self._decoder.config.vocab_size - len(own.token_num_bytes))
        return replace(own, seq_len=width, token_num_bytes=np.pad(own.token_num_bytes, (0, num_more)))

    def _compare(self, positions: Sequence[int]) -> dict[int, NDArray[np.float64]]:
        """Returns the advantages of the answers at the positions of this rank in a global batch. Communicates."""
        own = {position: self._data.groups[position].rewards for position in positions}
        # Ranks that share prompts give the same ones.
        every = {position: rewards for given in HostGroup().gather(own) for position, rewards in given.items()}
        ordered = sorted(every)
        advantages = self._objective.compare_rewards(np.stack([every[position] for position in ordered]))
        return dict(zip(ordered, advantages, strict=True))

    def _describe(
        self, rows: Sequence[_Row], advantages: Mapping[int, NDArray[np.float64]], labels: Tensor, *, is_first: bool
    ) -> dict[str, Tensor]:
        """Returns what the objective needs for the answers of a micro-batch."""
        columns: dict[str, list[float]] = {}
        groups = [self._data.groups[row.position] for row in rows]
        is_scored = not any(np.isnan(group.old_log_probs).any() for group in groups)
        for row, group in zip(rows, groups, strict=True):
            values = {IS_FINISHED: group.is_finished[row.number], IS_FIRST: is_first}
            if is_scored:
                values[OLD_LOG_PROB] = group.old_log_probs[row.number]
            if self._options:
                values |= {
                    ADVANTAGE: advantages[row.position][row.number],
                    REWARD: group.rewards[row.number],
                    SPREAD: measure_spread(group.rewards),
                }
            values |= self._list_figures(row, group)
            for name, value in values.items():
                columns.setdefault(name, []).append(float(value))
        tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
        if is_scored and self._keeps_tokens:
            tensors[OLD_TOKEN_LOG_PROB] = _lay_out(rows, [group.token_log_probs for group in groups], labels)
        if self._is_corrected:
            by_server = [group.server_log_probs or group.token_log_probs for group in groups]
            tensors[SERVER_LOG_PROB] = _lay_out(rows, by_server, labels)
            tensors[MAX_RATIO] = torch.tensor([self._data.prompt_options.writer.max_ratio], dtype=torch.float32)
        longest = self._data.prompt_options.longest_answer(self._data.options.seq_len)
        return {**tensors, TEMPERATURE: self._temperature, LONGEST: torch.tensor([longest], dtype=torch.float32)}

    def _list_figures(self, row: _Row, group: Group) -> dict[str, float]:
        """Returns what is logged for an answer, and not learned."""
        figures: dict[str, float] = {}
        if self._data.prompt_options.max_resamples:
            figures[NUM_ASKED] = group.num_resamples + 1
        if group.episodes is not None:
            counts = group.episodes.counts[row.number].tolist()
            figures |= {COUNT_OF + name: count for name, count in zip(EPISODE_COUNTS, counts, strict=True)}
        if self._server is not None and self._data.prompt_options.writer.reload != "none":
            figures[LAG] = self._server.count_lag(row.position)
        for name, ones in self._by_name(group.single_rewards):
            figures |= {REWARD_OF + name: ones[row.number], SPREAD_OF + name: measure_spread(ones)}
        return figures

    @property
    def _is_corrected(self) -> bool:
        """Whether answers of a server are trained, by whose log-probabilities the loss is corrected."""
        groups = self._data.groups.values()
        return self._server is not None or any(group.server_log_probs is not None for group in groups)

    @property
    def _keeps_tokens(self) -> bool:
        """Whether the log-probability of each token is kept, and not their sum alone."""
        return self._objective.needs_token_log_probs or self._is_corrected

    @property
    def _scores_answers(self) -> bool:
        """Whether a forward before the first step scores the answers, and not that step's own forward.

        One step on a rollout has the weights that wrote it. With dropout, its forward has other log-probabilities.
        """
        decoder = self._decoder
        has_dropout = any(decoder.draws_random_numbers(block) for block in decoder.blocks)
        is_one = self._data.prompt_options.steps_per_rollout == 1 and not has_dropout
        return (self._objective.needs_old_log_probs and not is_one) or self._is_corrected

    @property
    def _objective(self) -> Objective:
        objective: Any = self._trainer.lightning_module.objective
        assert isinstance(objective, Objective), "the data module has checked it"
        return objective

    @property
    def _temperature(self) -> Tensor:
        return torch.tensor([self._data.prompt_options.temperature], dtype=torch.float32)

    @property
    def _adapter(self) -> AdapterConfig | None:
        module: Any = self._trainer.lightning_module
        config: AdapterConfig | None = module.adapter_config
        return config

    @property
    def _decoder(self) -> Decoder:
        decoder: Any = self._trainer.lightning_module.decoder
        assert isinstance(decoder, Decoder), "configure_model builds the decoder"
        return decoder


def check_strategy(strategy: Strategy) -> None:
    """Refuses a strategy that keeps parameters on the host.

    Raises:
        UserError: Parameters are offloaded.
    """
    if isinstance(strategy, Sharded) and strategy.cpu_offload:
        raise UserError(
            f"trainer.strategy has cpu_offload {strategy.cpu_offload:g}: each rank gathers the model on its device to "
            "answer prompts; set it to 0, or train with the strategy replicated"
        )


def _lay_out(rows: Sequence[_Row], values: Sequence[Sequence[NDArray[np.float32]] | None], labels: Tensor) -> Tensor:
    """Returns a value for each label, from those of the answers of each row's group; 0 elsewhere."""
    found = torch.zeros(labels.shape)
    for row, of_group, ones, is_label in zip(rows, values, found, labels != IGNORE_INDEX, strict=True):
        assert of_group is not None, "kept for each token"
        ones[is_label] = torch.from_numpy(of_group[row.number])
    return found


@contextmanager
def _in_evaluation(decoder: Decoder) -> Iterator[None]:
    """Switches dropout off."""
    was_training = decoder.training
    decoder.eval()
    try:
        yield
    finally:
        decoder.train(was_training)


def _collect_episodes(answers: Sequence[Answer]) -> EpisodesOfGroup | None:
    """Returns what the answers of a group have beside their tokens, if they are episodes."""
    first, *_ = answers
    if first.episode is None:
        return None
    counts = [answer.episode.counts for answer in answers if answer.episode is not None]
    is_own = tuple(answer.is_own for answer in answers)
    return EpisodesOfGroup(np.array(first.prompt, np.int32), is_own, np.array(counts, np.int64))


def _seed(seed: int, position: int, number: int, num_resamples: int) -> int:
    """Returns the seed of one answer."""
    place = f"{seed} {position} {number}" + (f" {num_resamples}" if num_resamples else "")
    digest = hashlib.sha256(place.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
