"""Asks llama.cpp about a GGUF file, by its server in this process: the wheel `xllamacpp` has a whole llama.cpp.

The server listens on the loopback interface, on a port that the system chooses.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import xllamacpp

from genesis.base.errors import UserError
from genesis_callbacks.base.json_text import load_json

_TIMEOUT_SECONDS: Final = 600
_FORCED: Final = 1e4
"""Added to the logit of one token, so that it is the next one; the probabilities are those without this."""


class LlamaCpp:
    """A model in llama.cpp, whose attention computes in float32.

    Args:
        path: The file.
        context: The longest sequence, with what is generated.
        num_threads: Number of threads.

    Raises:
        RuntimeError: llama.cpp cannot load the file.
    """

    version: Final = xllamacpp.__version__

    def __init__(self, path: Path, context: int, num_threads: int) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context
        parameters.n_parallel = 1
        parameters.warmup = False
        parameters.swa_full = True
        parameters.verbosity = 0
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = num_threads
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        for cache in ("cache_type_k", "cache_type_v"):
            setattr(parameters, cache, xllamacpp.ggml_type.GGML_TYPE_F32)
        parameters.hostnames = ["127.0.0.1"]
        self._server = xllamacpp.Server(parameters)
        # Loopback, whatever the settings of a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._spelled: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without bos; the spelling of a control symbol is text."""
        asked = {"content": text, "add_special": False, "parse_special": False, "with_pieces": True}
        ids = []
        for token in self._ask("tokenize", asked)["tokens"]:
            piece = token["piece"]
            self._spelled[token["id"]] = piece.encode() if isinstance(piece, str) else bytes(piece)
            ids.append(token["id"])
        return ids

    def encode_framed(self, text: str) -> list[int]:
        """Returns the ids of a text as users give it: with bos, if the file asks for it, and with control symbols."""
        asked = {"content": text, "add_special": True, "parse_special": True}
        ids: list[int] = self._ask("tokenize", asked)["tokens"]
        return ids

    def spell(self, token: int) -> bytes:
        """Returns the bytes that llama.cpp has for an id that `encode` has given."""
        return self._spelled[token]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns a conversation as the file's chat template writes it, with the beginning of an answer."""
        prompt: str = self._ask("apply-template", {"messages": list(messages)})["prompt"]
        return prompt

    def score(self, prompt: Sequence[int], following: int, num_likely: int) -> tuple[float, dict[int, float]]:
        """Returns the logarithm of the probability of an id behind a prompt, and those of the most likely ids.

        Args:
            prompt: The ids.
            following: The id, of a whole text: llama.cpp gives no probabilities where it chooses half a character.
            num_likely: Number of the most likely ids.
        """
        asked = {"n_predict": 1, "n_probs": num_likely, "ignore_eos": True, "logit_bias": [[following, _FORCED]]}
        (found,) = self._ask("completion", {"prompt": list(prompt), **asked})["completion_probabilities"]
        if found["id"] != following:
            raise UserError(f"llama.cpp chose the id {found['id']} and not {following}, which was asked for")
        return found["logprob"], {one["id"]: one["logprob"] for one in found["top_logprobs"]}

    def generate(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """Returns the most likely next tokens behind a prompt, up to one that ends a text."""
        greedy = {"temperature": 0.0, "samplers": ["temperature"], "return_tokens": True}
        ids: list[int] = self._ask("completion", {"prompt": list(prompt), "n_predict": num_new, **greedy})["tokens"]
        return ids

    def _ask(self, path: str, content: Mapping[str, Any]) -> Any:
        url = f"{self._server.listening_address}/{path}"
        request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
                return load_json(response.read())
        except urllib.error.HTTPError as error:
            raise UserError(f"llama.cpp answers /{path} with {error.read()[:200].decode(errors='replace')}") from None
