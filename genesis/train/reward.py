"""The rewards of a recipe: those of Genesis, and a user's Python code, which runs only where an argument allows it.

    def reward(messages, text, columns):
        return 1.0 if text.strip() == columns["answer"] else 0.0

`messages` is the prompt as a list of messages, `text` the answer without the token that ended it, and `columns` a dict
of the other fields of the prompt's record. The result is a finite number. The function must give the same number for
the same arguments, or a resumed run differs from one that was never stopped. It runs in a process of its own, which is
killed if an answer takes too long. A reward model (`genesis.objectives.RewardModel`) is loaded in this process, beside
the model that trains, and scores one answer after the other, so that a score does not depend on others.

References:
    Yu et al., DAPO, arXiv:2503.14476, equation 13 (`overlong`).
"""

import math
import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from genesis.base.errors import UserError, numbered
from genesis.base.processes import PipedWorker
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.data.prompts import (
    ENVIRONMENT,
    EXACT_MATCH,
    MATH_ANSWER,
    OVERLONG,
    OWN_REWARDS,
    Prompt,
    RewardOptions,
    check_code,
)
from genesis.generate.load import find_texts, load_decoder, require_tokenizer
from genesis.generate.teacher import TeacherReference, find_teacher
from genesis.model.scores import score_text
from genesis.train.reward_worker import Fault

_IMPORT_SECONDS: Final = 600.0
"""How long the modules of reward functions may take to be imported."""
_MODULE: Final = "genesis.train.reward_worker"
_MODELS, _TEMPLATES = "reward_models", "reward_templates"
"""Entries of checkpoints' identity."""
_SHORT_ANSWER: Final = "So."
_REMEDY: Final = f"give module:function, file.py:function, {EXACT_MATCH} or {MATH_ANSWER} by data.prompts.reward"


class Rewards:
    """Scores answers; the user's functions run in a process that ends with this object. Communicates with no rank.

    Args:
        options: The rewards.
        seconds: How long a user's function may take for an answer.
        is_allowed: Whether the command line allows the user's code.
        device: Where reward models compute.
        models: The reward models, as `find_reward_models` returns them; None to find them here.
        chat: The date and the variables of their templates.

    Raises:
        UserError: A function is not allowed, or not found, or its module fails, or a model is no reward model.
    """

    def __init__(
        self,
        options: Sequence[RewardOptions],
        seconds: float,
        *,
        is_allowed: bool,
        device: torch.device | str = "cpu",
        models: Mapping[str, TeacherReference] | None = None,
        chat: ChatOptions | None = None,
    ) -> None:
        self._options, self._seconds = tuple(options), seconds
        self._functions = [one.function for one in options if one.function not in OWN_REWARDS]
        for name in self._functions:
            check_code("data.prompts.reward", name, _REMEDY, is_allowed=is_allowed)
        found = find_reward_models(options, {}) if models is None else models
        self._models = {name: ModelReward(name, one, chat or ChatOptions(), device) for name, one in found.items()}
        if self._functions:
            self._worker = PipedWorker(_MODULE, has_group=True, has_fixed_hashes=True)
            self._end = weakref.finalize(self, self._worker.end)
            fault = self._exchange(
                (sys.path, self._functions), _IMPORT_SECONDS, " or ".join(self._functions), "to load"
            )
            if isinstance(fault, Fault):
                self._end()
                raise UserError(fault.what)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the rewards in the log."""
        return tuple(one.label for one in self._options)

    def score(
        self,
        prompt: Prompt,
        text: str,
        number: int,
        num_tokens: int,
        most_tokens: int,
        given: float | None = None,
    ) -> NDArray[np.float64]:
        """Returns each reward of an answer, before its weight.

        Args:
            prompt: The prompt.
            text: The answer.
            number: The number of the answer among those to this prompt, from 1, for messages.
            num_tokens: The length of the answer.
            most_tokens: The longest that it could have been.
            given: What the environment has given, if there is one.

        Raises:
            UserError: A function fails, takes too long, or its result is not a finite number, or the record lacks what
                is compared; the message names the prompt's row.
        """
        return np.array(
            [
                given
                if one.function == ENVIRONMENT
                else self._score(one, prompt, text, number, num_tokens, most_tokens)
                for one in self._options
            ]
        )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuses reward models that cannot read the prompts, before an answer is written.

        A short answer is scored to the longest prompt, and rendered to one prompt of each order of roles.

        Raises:
            UserError: A template refuses a conversation, a context is too short, or a score is not finite.
        """
        kinds = {tuple(str(message.get("role")) for message in prompt.messages): prompt for prompt in prompts}
        for model in self._models.values():
            for prompt in kinds.values():
                model.encode(prompt, _SHORT_ANSWER)
            if prompts:
                model.score(max(prompts, key=lambda prompt: len(prompt.ids)), _SHORT_ANSWER)

    def _score(
        self, option: RewardOptions, prompt: Prompt, text: str, number: int, num_tokens: int, most_tokens: int
    ) -> float:
        if option.function == OVERLONG:
            assert option.buffer_tokens is not None, "checked by the options"
            return score_length(num_tokens, most_tokens, option.buffer_tokens)
        if option.model is not None:
            return self._models[option.model].score(prompt, text)
        if option.function in OWN_REWARDS:
            expected = prompt.columns.get(option.column)
            if not isinstance(expected, str | int | float):
                raise UserError(
                    f"{prompt.place}: the field {option.column!r} is {expected!r:.60}, and {option.function} compares "
                    "answers with it; name the field with the right answer by `column` of data.prompts.rewards"
                )
            matches = match_exactly if option.function == EXACT_MATCH else match_numbers
            return float(matches(text, str(expected)))
        index = self._functions.index(option.function)
        call = (index, (list(prompt.messages), text, dict(prompt.columns)))
        found = self._exchange(call, self._seconds, option.function, f"for answer {number} to {prompt.place}")
        if isinstance(found, Fault):
            where = f"answer {number} to {prompt.place}"
            raise UserError(f"the reward function {option.function} {found.what} for {where}{found.rest}")
        return float(found)

    def _exchange(self, message: object, seconds: float, function: str, what: str) -> Any:
        """Returns the answer of the process, which is killed if there is none in time."""
        try:
            self._worker.connection.send(message)
            if self._worker.connection.poll(seconds):
                return self._worker.connection.recv()
        except (EOFError, OSError):
            reason = f"ended {self._worker.describe_end()} {what}; correct it"
        else:
            reason = f"took longer than {seconds:g} s {what}; correct it"
            if seconds == self._seconds:
                reason += ", or raise data.prompts.reward_seconds"
        self._end()
        raise UserError(f"the reward function {function} {reason}")


class ModelReward:
    """A reward model that scores answers, in float32 or as its files have it. Communicates with no rank.

    Args:
        path: The value that names it, for messages.
        found: The checkpoint or the export.
        chat: The date and the variables of its template.
        device: Where it computes.

    Raises:
        UserError: There is no reward model, or it has no chat template.
    """

    def __init__(self, path: str, found: TeacherReference, chat: ChatOptions, device: torch.device | str) -> None:
        self._path = path
        loaded = load_decoder(found.path, device=device, allows_scores=True)
        self._decoder = loaded.decoder
        if self._decoder.config.num_scores is None:
            raise UserError(
                f"{path} is no reward model: name one that genesis.objectives.RewardModel has trained by `model` of "
                "data.prompts.rewards"
            )
        self._renderer = open_renderer(loaded.text_tokenizer, chat, is_training=False, learned=loaded.learned)

    def encode(self, prompt: Prompt, text: str) -> list[int]:
        """Returns the tokens of a prompt with an answer.

        Raises:
            UserError: The conversation cannot be rendered, or is longer than the context.
        """
        messages = [*prompt.messages, {"role": "assistant", "content": text}]
        try:
            ids = self._renderer.tokenizer.encode_with_controls(self._renderer.write_whole(messages))
        except UserError as error:
            reason = str(error).replace("chat.date", "data.prompts.date")
            raise UserError(
                f"the reward model {self._path} cannot read an answer to {prompt.place}: {reason}"
            ) from None
        longest = self._decoder.config.max_seq_len
        if len(ids) > longest:
            raise UserError(
                f"{prompt.place}: an answer has {numbered(len(ids), 'tokens')} with its prompt, and the reward model "
                f"{self._path} reads {longest:,}: lower data.prompts.max_new_tokens, or leave out long prompts"
            )
        return ids

    def score(self, prompt: Prompt, text: str) -> float:
        """Returns the score of a prompt with an answer.

        Raises:
            UserError: The conversation cannot be encoded, or the score is not finite.
        """
        ids = self.encode(prompt, text)
        with torch.autocast(self._decoder.output_weight.device.type, enabled=False):
            found = score_text(self._decoder, ids)
        if not math.isfinite(found):
            raise UserError(f"the reward model {self._path} gives {found} to an answer to {prompt.place}: replace it")
        return found


def find_reward_models(options: Sequence[RewardOptions], recorded: Mapping[str, Any]) -> dict[str, TeacherReference]:
    """Returns the reward models by the values that name them; their weights are not read.

    Args:
        options: The rewards.
        recorded: The identity in the checkpoint that the run continues from; empty for a new run. Of a run that was
            trained further, the checkpoint that is recorded is the reward model, if it still exists.

    Raises:
        UserError: A model does not exist.
    """
    names = list(dict.fromkeys(one.model for one in options if one.model is not None))
    hashes: list[str | None] = [*str(recorded.get(_MODELS, "")).split()]
    known = hashes if len(hashes) == len(names) else [None] * len(names)
    return {name: find_teacher(name, hash) for name, hash in zip(names, known, strict=True)}


def identify_reward_models(models: Mapping[str, TeacherReference], chat: ChatOptions) -> dict[str, str]:
    """Returns the entries of checkpoints' identity with the hashes of reward models and of how they read texts.

    Args:
        models: The reward models; there are no entries without one.
        chat: The date and the variables of their templates.

    Raises:
        UserError: A model has no chat template, or no tokenizer.
    """
    if not models:
        return {}
    hashes = []
    for found in models.values():
        tokenizer, learned = find_texts(found.path)
        renderer = open_renderer(require_tokenizer(tokenizer, found.path), chat, is_training=False, learned=learned)
        hashes.append(renderer.hash)
    return {_MODELS: " ".join(found.hash for found in models.values()), _TEMPLATES: " ".join(hashes)}


def score_length(num_tokens: int, most_tokens: int, buffer_tokens: int) -> float:
    """Returns 0 for an answer that ends before the buffer, then less with each token, and -1 at the longest length."""
    return min(0.0, (most_tokens - buffer_tokens - num_tokens) / buffer_tokens)


# ---- right answers

_MAX_NUMBER: Final = 64
"""Characters of a number that is compared as one."""
_NUMBER: Final = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:/\d+)?", re.ASCII)
_FRACTION: Final = re.compile(r"\\[dt]?frac\{([-+]?\d+)\}\{(\d+)\}")
_TEXT: Final = re.compile(r"\\text\{([^{}]*)\}")
_DROPPED: Final = re.compile(r"\\(?:left|right|!|,|;| )|[\s$]|\\%|%$|\.$")


def match_exactly(text: str, expected: str) -> bool:
    """Returns whether an answer is the right one, apart from white space around it."""
    return text.strip() == expected.strip()


def match_numbers(text: str, expected: str) -> bool:
    r"""Returns whether the final answer within a text is the right one: the same number, or the same formula.

    The final answer is what the last \boxed{} has, or else follows the last ####, or else is the last number. Numbers
    are compared exactly, as fractions: 0.5, 1/2 and \frac{1}{2} are equal, and so are 1,000 and 1000.0. What is no
    number is compared as text without spaces; terms that are equal only by algebra are not.
    """
    found, wanted = find_answer(text), find_answer(expected, is_short=True)
    if found is None or wanted is None:
        return False
    one, other = read_number(found), read_number(wanted)
    if one is not None and other is not None:
        return one == other
    plain = _plain(_TEXT.sub(r"\1", found))
    return bool(plain) and plain == _plain(_TEXT.sub(r"\1", wanted))


def find_answer(text: str, *, is_short: bool = False) -> str | None:
    """Returns the final answer within a text; of a text that has no marked answer and no number, the text.

    Args:
        text: The text.
        is_short: Whether a text without a marked answer is the answer itself, whatever numbers it has.
    """
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if not depth:
                return text[begin:end]
        return None
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip().partition("\n")[0]
    if is_short or read_number(text) is not None:
        return text
    numbers = [found[0] for found in _NUMBER.finditer(text) if any(map(str.isdigit, found[0]))]
    return numbers[-1] if numbers else text


def read_number(text: str) -> Fraction | None:
    """Returns the number that a text is, exactly; None for other texts, and for too many digits."""
    plain = _FRACTION.sub(r"\1/\2", _plain(_TEXT.sub("", text)))  # a unit is no part of the number
    if len(plain) > _MAX_NUMBER or not plain.isascii() or _NUMBER.fullmatch(plain) is None:
        return None
    top, _, bottom = plain.replace(",", "").partition("/")
    if not any(map(str.isdigit, top)) or (bottom and not int(bottom)):
        return None
    return Fraction(top.rstrip(".")) / Fraction(bottom or "1")


def _plain(text: str) -> str:
    return _DROPPED.sub("", text.strip())
