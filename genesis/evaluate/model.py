"""lm-eval's interface to our decoder: the same results as its `hf` backend on the export, computed by our engine."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from genesis.base.errors import UserError, numbered
from genesis.chat.render import ChatRenderer
from genesis.evaluate.complete import CompleteOptions, complete, default_cache_tokens
from genesis.evaluate.plan import Request
from genesis.evaluate.questions import UnanswerableError
from genesis.evaluate.score import Score, Scorer
from genesis.generate.layout import transpose_linears
from genesis.generate.sampling_options import SamplingOptions
from genesis.model.decoder import Decoder
from genesis.model.language_model import LanguageModel
from genesis.tokenizer.tokenizer import Tokenizer

MAX_NEW_TOKENS: Final = 256
"""The default of the `hf` backend, for tasks without their own."""
SEED: Final = 1234
"""The default of lm-eval for sampled text."""
_CACHED_TEXTS: Final = 65_536
_QUOTED_CHARS: Final = 60


class GenesisLM(TemplateLM):  # type: ignore[misc]  # it has no types
    """Answers lm-eval's requests. Pairs of texts become ids by lm-eval's own rules (`TemplateLM.loglikelihood`).

    Args:
        decoder: The decoder, in evaluation mode; the layout of its weights in memory changes.
        tokenizer: The decoder's tokenizer.
        batch_tokens: See `Scorer`.
        on_progress: Called with the number of requests answered since the last call; equal requests count once.
        chat: Writes contexts as conversations; None without a chat template.
        stop_ids: Tokens that end a text besides those of the tokenizer.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        tokenizer: Tokenizer,
        batch_tokens: int | None = None,
        on_progress: Callable[[int], None] = lambda _: None,
        chat: ChatRenderer | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._chat, self._stop_ids = chat, stop_ids
        self._tokenizer = tokenizer
        self._decoder = decoder
        transpose_linears(decoder)
        self._device = decoder.output_weight.device
        self._scorer = Scorer(decoder, batch_tokens)
        self._batch_tokens = batch_tokens
        self._on_progress = on_progress
        # A template writes control symbols by their spelling; what a task spells is text, and is hidden in such a text.
        encode = tokenizer.encode if chat is None else tokenizer.encode_with_controls
        # The same context comes once for each of its continuations.
        self._encode = lru_cache(_CACHED_TEXTS)(encode)

    @property
    def eot_token_id(self) -> int:
        """Returns the token that ends a document."""
        return self._require(self._find_named("eos_token"), self._tokenizer.eos_id, self._tokenizer.bos_id)

    @property
    def prefix_token_id(self) -> int:
        """Returns the token before a text, as in the `hf` backend: bos, or eos if the tokenizer has no bos.

        A tokenizer may have a bos and not put it before texts, such as SmolLM2's.
        """
        return self._require(self._tokenizer.bos_id, self._find_named("bos_token"), self._tokenizer.eos_id)

    @property
    def max_length(self) -> int:
        """Returns the decoder's context in tokens."""
        return self._decoder.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        """Returns the hash of the tokenizer, by which lm-eval keeps rendered contexts apart."""
        return self._tokenizer.hash

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the chat template; empty without one."""
        return "" if self._chat is None else self._chat.template.text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as text; without a generation prompt the model continues its last message.

        Control symbols that the messages spell are hidden in it (`genesis.tokenizer.literal`).

        Raises:
            UserError: The template refuses the conversation.
        """
        assert self._chat is not None
        return self._chat.write_prompt(chat_history, continues_last=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the ids of a text, with bos before it unless the text begins with bos or the caller wants no bos."""
        ids, bos_id = list(self._encode(string)), self._tokenizer.bos_id
        if bos_id is None:
            return ids
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._tokenizer.pieces[bos_id])
        return [bos_id, *ids] if add_special_tokens else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair: tuple[list[int], list[int]] = super()._encode_pair(context, self._hide(continuation))
        return pair

    def _hide(self, text: str) -> str:
        """Returns a text of a task, which no chat template has written, for `tok_encode`."""
        hidden: str = text if self._chat is None else self._tokenizer.literal.hide(text)
        return hidden

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns log-likelihood and greediness of each continuation after its context.

        Raises:
            UnanswerableError: A continuation is empty, has no token of its own, or exceeds the model's context.
        """
        for request in requests:
            if not request.args[1]:
                raise UnanswerableError(f"{_name(request)}: an empty continuation after {_quote(request.args[0])}")
        self._asked = requests
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        # lm-eval passes only the pairs, in the order of the requests.
        for asked, request in zip(self._asked, requests, strict=True):
            self._check_fits(asked, request[2])
        room = self.max_length + 1
        cut = [
            Request(tuple(context[-(room - len(continuation)) :]), tuple(continuation))
            for _text, context, continuation in requests
        ]
        return [(score.log_likelihood, score.is_greedy) for score in self._score(cut)]

    def _check_fits(self, asked: Instance, continuation: Sequence[int]) -> None:
        """Checks that a continuation leaves room for a token of context; its last token is never fed."""
        if continuation and len(continuation) <= self.max_length:
            return
        reason = (
            f"has {numbered(len(continuation), 'tokens')}, but the model's context is {self.max_length:,}"
            if continuation
            else "has no token of its own after its context: the tokenizer joins them"
        )
        raise UnanswerableError(f"{_name(asked)}: the continuation {_quote(asked.args[1])} {reason}")

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Returns the log-likelihood of each text, in windows of the model's context, each token scored once.

        As in the `hf` backend, bos is also scored: the tokenizer adds bos to the text, and lm-eval another one before
            it.
        """
        windows = []
        for number, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                self.tok_encode(self._hide(request.args[0])), self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(number, Request(*map(tuple, make_disjoint_window(pair)))) for pair in pairs]
        sums: list[list[float]] = [[] for _ in requests]
        for (number, _), score in zip(windows, self._score([window for _, window in windows]), strict=True):
            sums[number].append(score.log_likelihood)
        return [math.fsum(values) for values in sums]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns the generated text after each context, up to a stop string or the token limit.

        Raises:
            UserError: A task needs an unknown sampling option, or more tokens than the context.
            UnanswerableError: The model has no cache.
        """
        if not isinstance(self._decoder, Decoder):
            raise UnanswerableError(
                f"task {requests[0].task_name} asks for generated text, and the model is of another library, of which "
                "only given text is scored: export it, and give the directory to lm-eval's own `hf` backend"
            )
        answers = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(number)
        for numbers in by_options.values():
            options = self._read_options(requests[numbers[0]], self._decoder)
            room = self.max_length - options.max_new_tokens
            prompts = [tuple(self.tok_encode(requests[number].args[0])[-room:]) for number in numbers]
            # Greedy text is the same for equal prompts, so that one of them suffices; each sampled text is different.
            is_greedy = options.sampling.temperature == 0.0
            asked = list(dict.fromkeys(prompts)) if is_greedy else prompts
            texts = complete(self._decoder, self._tokenizer, asked, options, self._on_progress)
            if is_greedy:
                by_prompt = dict(zip(asked, texts, strict=True))
                texts = [by_prompt[prompt] for prompt in prompts]
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
        return answers

    def _find_named(self, name: str) -> int | None:
        """Returns the id of a token that the tokenizer's settings name."""
        piece = self._tokenizer.named_tokens.get(name)
        return self._tokenizer.pieces.index(piece) if piece in self._tokenizer.pieces else None

    @staticmethod
    def _require(*tokens: int | None) -> int:
        for token in tokens:
            if token is not None:
                return token
        raise UnanswerableError(
            "the model's tokenizer has neither bos nor eos, but scored texts must begin with one of them"
        )

    def _score(self, requests: Sequence[Request]) -> list[Score]:
        return self._scorer.score(requests, self._on_progress)

    def _read_options(self, request: Instance, decoder: Decoder) -> CompleteOptions:
        asked: dict[str, Any] = dict(normalize_gen_kwargs(request.args[1], MAX_NEW_TOKENS))
        max_new_tokens, is_sampled = asked.pop("max_gen_toks"), asked.pop("do_sample")
        eos_id = self._tokenizer.eos_id
        eos = None if eos_id is None else self._tokenizer.pieces[eos_id]
        stop = handle_stop_sequences(asked.pop("until"), eos=eos)
        temperature, top_k, top_p = asked.pop("temperature", 1.0), asked.pop("top_k", 0), asked.pop("top_p", 1.0)
        if asked:
            raise UserError(
                f"task {request.task_name} asks for {', '.join(sorted(asked))} in its generation_kwargs; use only "
                "until, max_gen_toks, do_sample, temperature, top_k and top_p"
            )
        if not 0 < max_new_tokens < self.max_length:
            raise UnanswerableError(
                f"task {request.task_name} asks for {numbered(max_new_tokens, 'new tokens')}, but the model's context "
                f"has {self.max_length:,}; set max_gen_toks in the generation_kwargs of its task.yaml"
            )
        sampling = SamplingOptions(temperature, top_k or None, top_p) if is_sampled else SamplingOptions(0.0)
        return CompleteOptions(
            max_new_tokens,
            tuple(stop),
            sampling,
            SEED,
            self._scorer.batch_tokens,
            self._batch_tokens or default_cache_tokens(decoder.config, decoder.output_weight.dtype),
            self._stop_ids,
        )


def _name(request: Instance) -> str:
    """Returns the task and the row of a request; rows are counted from 1, as lines of a file are."""
    return f"task {request.task_name}" + ("" if request.doc_id is None else f", row {request.doc_id + 1}")


def _quote(text: str) -> str:
    return repr(text if len(text) <= _QUOTED_CHARS else text[:_QUOTED_CHARS] + "...")
