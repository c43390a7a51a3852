"""Training on prompts that the model answers itself: the order of the prompts, and the answers of the last rollout.

A *rollout* is the answers to the prompts of the next steps, all by the same weights. A window of this data has no
tensors until it is trained: `genesis.train.rollout` then answers its prompts, and puts the answers into it. The answers
that are not trained yet are part of the state, so that a resumed run continues with them in the middle of a rollout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.chat.learned import build_prompt_form, find_recorded, find_stop_ids
from genesis.chat.render import ChatRenderer, open_renderer
from genesis.chat.template import write_defaults
from genesis.data.corpus import TokenSource
from genesis.data.loader import Ranks, SequenceFormat, plan_micro_batches
from genesis.data.packing import CUT_EVENLY, Packing
from genesis.data.prompts import Prompt, PromptOptions, PromptSet, find_reward_file, read_prompts
from genesis.data.training_data import DataCursor, SumOverRanks, TrainingOptions, refuse_skips
from genesis.data.window import AccumulationWindow
from genesis.tokenizer.open import has_hash, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.untrusted import read_file


@dataclass(frozen=True)
class Group:
    """The answers to the prompt at one position.

    Args:
        answers: The new tokens of each answer, with the token that ended it; of an episode, all behind the prompt.
        is_finished: Whether each answer ended by itself, and not at the longest length.
        rewards: The reward of each answer.
        old_log_probs: The sum of the log-probabilities of each answer's tokens, by the weights that wrote it.
        single_rewards: What `rewards` is the weighted sum of, for each answer.
        token_log_probs: The log-probability of each token of each answer, if the objective needs them.
        num_resamples: How many prompts before this one were given up, because their rewards were equal.
        episodes: What else belongs to the answers if they are episodes.
        server_log_probs: The log-probability of each token of each answer, as the server that wrote it gives them.
    """

    answers: tuple[NDArray[np.int32], ...]
    is_finished: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    old_log_probs: NDArray[np.float32]
    single_rewards: NDArray[np.float64]
    token_log_probs: tuple[NDArray[np.float32], ...] | None = None
    num_resamples: int = 0
    episodes: "EpisodesOfGroup | None" = None
    server_log_probs: tuple[NDArray[np.float32], ...] | None = None

    def is_own(self, number: int) -> NDArray[np.bool_]:
        """Returns which tokens of an answer the model has written; the others are observations."""
        return np.ones(len(self.answers[number]), np.bool_) if self.episodes is None else self.episodes.is_own[number]


@dataclass(frozen=True)
class EpisodesOfGroup:
    """What the episodes of a group have beside their tokens.

    Args:
        prompt: The ids of the prompt with the environment's first observation, and with its tools.
        is_own: Which tokens of each episode the model has written.
        counts: The numbers of `EPISODE_COUNTS` of each episode.
    """

    prompt: NDArray[np.int32]
    is_own: tuple[NDArray[np.bool_], ...]
    counts: NDArray[np.int64]


EPISODE_COUNTS: Final = ("turns", "calls", "unread_calls")
"""The turns of the model, its calls of tools, and those that cannot be read."""


class HeldOutWindows:
    """One rank's windows of a validation, without tensors: each stands for some of the held-out prompts.

    Args:
        prompts: The prompts, the same on all ranks.
        size: Prompts of a window.
        ranks: The number of this rank.
    """

    def __init__(self, prompts: Sequence[Prompt], size: int, ranks: Ranks) -> None:
        self._prompts, self._size, self._ranks = prompts, size, ranks

    def __len__(self) -> int:
        return -(-len(self._prompts) // (self._size * self._ranks.world_size))

    def window(self, index: int) -> AccumulationWindow:
        """Returns the window `index`; `prompts_of` returns its prompts."""
        return AccumulationWindow((), 0, 0, index)

    def prompts_of(self, window: AccumulationWindow) -> Sequence[Prompt]:
        """Returns this rank's prompts of a window: none where the last windows have too few for all ranks."""
        first = (window.data_position * self._ranks.world_size + self._ranks.rank) * self._size
        return self._prompts[first : first + self._size]


class PromptData:
    """The `TrainingData` of prompts.

    Args:
        prompt_options: The prompts, and how they are answered.
        options: How batches are built.
        tokenizer_hash: The tokenizer that the directory must hold; None accepts any.
    """

    kind: Final = "prompts"
    pairs: Final = None
    tokens_per_second: Final = None
    queue_depths: Final = ()
    wait_remedy: Final = "leave the loader a core"
    packing: Final[Packing] = CUT_EVENLY  # without an effect: an answer has a row of its own
    validation: Final[Sequence[TokenSource]] = ()
    validation_remedy: Final = (
        "data.prompts has no validation set; hold prompts out by data.prompts.validation_share, validate with the "
        "recipe of a corpus, or score checkpoints by `genesis evaluate`"
    )

    def __init__(self, prompt_options: PromptOptions, options: TrainingOptions, *, tokenizer_hash: str | None) -> None:
        if options.packing not in (None, CUT_EVENLY):
            raise UserError(f"data.packing is {options.packing}, but an answer has a row of its own; leave it out")
        refuse_skips(options, "prompts")
        self.prompt_options = prompt_options
        self.options = options
        self.cursor = DataCursor(options, lambda: prompt_options.sources, self._count_prompts)
        self.groups: dict[int, Group] = {}
        # The names of the weights that a server got after updates, while rollouts need them.
        self.served: dict[int, str] = {}
        self._tokenizer_hash = tokenizer_hash
        self._ranks = Ranks()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer."""
        tokenizer = open_tokenizer(self.prompt_options.tokenizer)
        if self._tokenizer_hash is not None and not has_hash(tokenizer, self._tokenizer_hash):
            raise UserError(
                f"data.prompts.tokenizer is {tokenizer.hash[:16]}, data.tokenizer_hash is "
                f"{self._tokenizer_hash[:16]}; use the same"
            )
        return tokenizer

    @cached_property
    def prompts(self) -> PromptSet:
        """Returns the prompts of all sources."""
        return read_prompts(self.prompt_options, self._renderer, self.options.seq_len)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Returns the tokens that end an answer."""
        return find_stop_ids(self.tokenizer, self._learned, self.prompt_options.template)

    @property
    def template_file(self) -> Path | None:
        """Returns the file of the template of the prompts; None for the tokenizer's own."""
        return self.prompt_options.template or self._learned

    @property
    def chat_template(self) -> str:
        """Returns the template of the prompts, with its variables as defaults."""
        text = build_prompt_form(self._renderer.template.text, self.tokenizer)
        return write_defaults(text, self.prompt_options.variables)

    @cached_property
    def _learned(self) -> Path | None:
        """Returns the template in the directory of the tokenizer, if that is a corpus or a run which keeps one."""
        return find_recorded(Path(self.prompt_options.tokenizer))

    @cached_property
    def _renderer(self) -> ChatRenderer:
        # Earlier turns of an episode stay as they were written; a template of training keeps them.
        is_training = self.prompt_options.environment is not None
        return open_renderer(self.tokenizer, self.prompt_options.chat, is_training=is_training, learned=self._learned)

    @property
    def renderer(self) -> ChatRenderer:
        """Returns what turns conversations into ids."""
        return self._renderer

    def write_answer(self, prompt: Prompt, text: str) -> list[int]:
        """Returns the ids of a prompt with an answer as the template writes them, without tools of the record.

        Raises:
            UserError: The template refuses the conversation.
        """
        messages = [*prompt.messages, {"role": "assistant", "content": text}]
        return self.tokenizer.encode_with_controls(self._renderer.write_whole(messages))

    @cached_property
    def identity(self) -> dict[str, str]:
        """Returns the entries that identify the prompts, and the reward function's source, in a checkpoint."""
        identity = {"tokenizer_hash": self.tokenizer.hash, "prompts": self.prompts.hash()}
        places = [find_reward_file(reward.function) for reward in self.prompt_options.all_rewards]
        hashes = [blake3(read_file(path)).hexdigest() for path in places if path is not None]
        identity |= {"reward": " ".join(hashes)} if hashes else {}
        environment = find_reward_file(self.prompt_options.environment or "")
        return (
            identity if environment is None else {**identity, "environment": blake3(read_file(environment)).hexdigest()}
        )

    def held_out(self, ranks: Ranks, limit: int | None) -> HeldOutWindows:
        """Returns a rank's windows of the held-out prompts, or of `limit` of them that are spread over the set."""
        prompts = self.prompts.held_out
        number = min(len(prompts), len(prompts) if limit is None else limit)
        spread = [prompts[index * len(prompts) // number] for index in range(number)]
        return HeldOutWindows(spread, self.prompt_options.num_rows, ranks)

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def vocabulary_owner(self) -> str:
        """Returns the name of the vocabulary's owner, for error messages."""
        return f"the tokenizer {self.prompt_options.tokenizer}"

    @cached_property
    def sequence_format(self) -> SequenceFormat:
        """Returns how tokens become sequences."""
        return SequenceFormat.of(self.tokenizer, self.options.seq_len)

    # ---- training

    def open(self, ranks: Ranks, *, pads_pairs: bool = False) -> None:
        """Reads the prompts and checks that the ranks can share them; may be called repeatedly."""
        num_prompts, num_ranks = self.options.global_batch_size, ranks.world_size
        plan_micro_batches(num_prompts, 1, num_ranks)
        num_answers = num_prompts * self.prompt_options.group_size
        if num_answers % (self.options.micro_batch_size * num_ranks):
            raise UserError(
                f"data.global_batch_size {num_prompts} has {numbered(num_answers, 'answers')}, not divisible into "
                f"micro-batches of data.micro_batch_size {self.options.micro_batch_size} on "
                f"{numbered(num_ranks, 'ranks')}; give a divisor of {num_answers // num_ranks}"
            )
        self._ranks = ranks
        _ = self.cursor.order

    def close(self) -> None:
        """Does nothing: the prompts are in memory."""

    @property
    def num_windows(self) -> int:
        """Returns the number of windows in one pass over the prompts."""
        return max(1, sum(map(len, self.prompts.of_source.values())) // self.options.global_batch_size)

    def window(self, position: int) -> AccumulationWindow:
        """Returns a window without tensors, which stands for the prompts from `position` on."""
        return AccumulationWindow((), 0, 0, position + self.options.global_batch_size)

    def own_positions(self, position: int) -> range:
        """Returns the positions of this rank in the global batch that begins at `position`."""
        count = self.options.global_batch_size // self._ranks.world_size
        first = position + self._ranks.rank * count
        return range(first, first + count)

    def plan_rollout(self, position: int) -> list[int]:
        """Returns the positions that this rank has to answer before it can train the global batch at `position`.

        There are none if the answers are known; else they are those of all steps of a rollout that begins there.
        """
        if all(own in self.groups for own in self.own_positions(position)):
            return []
        step, last = self.options.global_batch_size, self.cursor.last_position
        size = step * self.prompt_options.steps_per_rollout
        end = position + size
        if self.prompt_options.writer.is_remote:  # the weights of each rollout are fixed by its number
            end -= position % size
        batches = range(position, end if last is None else min(end, last), step)
        return [own for batch in batches for own in self.own_positions(batch) if own not in self.groups]

    def prompt_at(self, position: int, num_resamples: int = 0) -> Prompt:
        """Returns the prompt at a position, or the one of its source that replaces it after so many others."""
        order = self.cursor.order
        sources, sequences = order.sequences(position, 1)
        prompts, number = self.prompts.of_source[order.names[int(sources[0])]], int(sequences[0])
        if num_resamples:
            # A function of the position alone: the order is that of a run without, on any number of ranks.
            digest = blake3(f"{self.options.seed} {position} {num_resamples}".encode()).digest(8)
            number = int.from_bytes(digest, "big") % len(prompts)
        return prompts[number]

    def advance(self, window: AccumulationWindow, *, has_tokens: bool = True) -> str | None:
        """Moves the position past a trained window; returns a line about a mix that begins at the new position."""
        note, after = self.cursor.advance(window), self.cursor.position
        self.groups = {position: group for position, group in self.groups.items() if position >= after}
        return note

    def find_end(self) -> str | None:
        """Returns a line with the reason why training ends at this position, None if it continues."""
        position, last = self.cursor.position, self.cursor.last_position
        if last is None or position < last:
            return None
        return f"every source of prompts has reached its epoch limit: training ends at position {position}"

    def sum_usage(self, sum_over_ranks: SumOverRanks) -> dict[str, dict[str, float]]:
        """Returns the prompts and epochs of each source up to the position, which every rank knows."""
        order = self.cursor.order
        consumed = order.sequences_consumed(self.cursor.position)
        return {
            name: {"prompts": count, "epochs": count / max(1, length)}
            for name, count, length in zip(order.names, consumed, order.num_sequences, strict=True)
        }

    # ---- state

    def state(self) -> dict[str, Any]:
        """Returns the position, the order, and this rank's answers that are not trained yet."""
        served: dict[str, Any] = {}
        if self.served:
            served["served"] = {str(update): name for update, name in self.served.items()}
            served["served_batch_size"] = self.options.global_batch_size
        return {**self.cursor.state(), "prompts": True, "groups": pack_groups(self.groups), **served}

    def load_state(self, state: Mapping[str, Any]) -> str | None:
        """Continues from a saved state; returns a line about the mix if that has changed."""
        if "prompts" not in state:
            raise UserError(
                "the checkpoint was not trained on prompts, so that its position has no meaning here; start a new run "
                "from its weights (--checkpoint.restore weights)"
            )
        is_remote, size = self.prompt_options.writer.is_remote, self.options.global_batch_size
        if is_remote and (before := state.get("served_batch_size", size)) != size:
            raise UserError(
                f"data.global_batch_size is {size}, and the checkpoint's rollouts by a server are counted in batches "
                f"of {before}: leave it, or start a new run from the weights (--checkpoint.restore weights)"
            )
        note, self.groups = self.cursor.load_state(state), unpack_groups(state["groups"])
        self.served = {int(update): name for update, name in state.get("served", {}).items()} if is_remote else {}
        wanted = self.prompt_options.group_size, len(self.prompt_options.all_rewards)
        shapes = {group.single_rewards.shape for group in self.groups.values()}
        has_episodes = self.prompt_options.environment is not None
        if shapes - {wanted} or any((one.episodes is None) == has_episodes for one in self.groups.values()):
            # The saved answers cannot be shared among other micro-batches, or lack rewards or turns: the weights that
            # wrote them answer again.
            self.groups = {}
        return note

    def combine_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the state with the answers of all ranks."""
        first, *_ = states
        groups = {position: group for state in states for position, group in unpack_groups(state["groups"]).items()}
        return {**first, "groups": pack_groups(groups)}

    # ---- parts

    def _count_prompts(self, weights: Mapping[str, int]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {name: len(prompts) for name, prompts in self.prompts.of_source.items()}, weights


def pack_groups(groups: Mapping[int, Group]) -> dict[str, Any]:
    """Returns groups as a few arrays, which a checkpoint stores with its tensors; `unpack_groups` reads them."""
    if not groups:
        return {}
    ordered = sorted(groups.items())
    answers = [answer for _, group in ordered for answer in group.answers]
    of_tokens = [one for _, group in ordered for one in group.token_log_probs or ()]
    episodes = [group.episodes for _, group in ordered if group.episodes is not None]
    # Those of a group without are the trainer's own, which has then written its answers.
    by_server = [
        one
        for _, group in ordered
        for one in group.server_log_probs or group.token_log_probs or ()
        if any(other.server_log_probs is not None for _, other in ordered)
    ]
    return {
        **({"token_log_probs": np.concatenate(of_tokens)} if of_tokens else {}),
        **({"server_log_probs": np.concatenate(by_server)} if by_server else {}),
        **(_pack_episodes(episodes) if episodes else {}),
        "positions": np.array([position for position, _ in ordered], np.int64),
        "sizes": np.array([len(group.answers) for _, group in ordered], np.int64),
        "lengths": np.array([len(answer) for answer in answers], np.int64),
        "tokens": np.concatenate(answers),
        "is_finished": np.concatenate([group.is_finished for _, group in ordered]),
        "rewards": np.concatenate([group.rewards for _, group in ordered]),
        "old_log_probs": np.concatenate([group.old_log_probs for _, group in ordered]),
        "single_rewards": np.concatenate([group.single_rewards for _, group in ordered]),
        "num_resamples": np.array([group.num_resamples for _, group in ordered], np.int64),
    }


def unpack_groups(packed: Mapping[str, Any]) -> dict[int, Group]:
    """Returns the groups that `pack_groups` has packed; releases with one reward and one kind of ratio packed less."""
    if not packed:
        return {}
    packed = {
        "single_rewards": packed["rewards"][:, None],
        "num_resamples": np.zeros(len(packed["sizes"]), np.int64),
        **packed,
    }
    ends = np.cumsum(packed["sizes"])[:-1]
    of_answers = np.cumsum(packed["lengths"])[:-1]
    answers = np.split(packed["tokens"], of_answers)
    is_own = np.split(packed["is_own"], of_answers) if "is_own" in packed else None
    of_model = of_answers if is_own is None else np.cumsum([np.count_nonzero(ones) for ones in is_own])[:-1]
    of_tokens = np.split(packed["token_log_probs"], of_model) if "token_log_probs" in packed else None
    by_server = np.split(packed["server_log_probs"], of_model) if "server_log_probs" in packed else None
    prompts = None if is_own is None else np.split(packed["prompts"], np.cumsum(packed["prompt_lengths"])[:-1])
    columns = [np.split(packed[name], ends) for name in ("is_finished", "rewards", "old_log_probs", "single_rewards")]
    groups = {}
    for index, (position, size, start) in enumerate(
        zip(packed["positions"], packed["sizes"], [0, *ends.tolist()], strict=True)
    ):
        own = slice(start, start + int(size))
        is_finished, rewards, old_log_probs, single_rewards = (column[index] for column in columns)
        groups[int(position)] = Group(
            tuple(answers[own]),
            is_finished,
            rewards,
            old_log_probs,
            single_rewards,
            None if of_tokens is None else tuple(of_tokens[own]),
            int(packed["num_resamples"][index]),
            None
            if is_own is None or prompts is None
            else EpisodesOfGroup(prompts[index], tuple(is_own[own]), packed["counts"][own]),
            None if by_server is None else tuple(by_server[own]),
        )
    return groups


def _pack_episodes(episodes: Sequence[EpisodesOfGroup]) -> dict[str, Any]:
    return {
        "prompts": np.concatenate([one.prompt for one in episodes]),
        "prompt_lengths": np.array([len(one.prompt) for one in episodes], np.int64),
        "is_own": np.concatenate([ones for one in episodes for ones in one.is_own]),
        "counts": np.concatenate([one.counts for one in episodes]),
    }
