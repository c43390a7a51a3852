"""Answers for llama.cpp: the ids of texts and a greedy continuation, from a GGUF file, by the wheel `xllamacpp`.

Reads one JSON object from standard input, {"model": FILE, "texts": [...], "prompt": [ids], "num_new_tokens": N,
"scored": [ids], "vocab_size": V}, and writes one to the file that is its argument, {"version": ..., "ids": [[...],
...], "greedy": [...], "log_probabilities": [...]}: llama.cpp logs to standard output. The last are those of each id of
"scored" but the first. Its server listens on 127.0.0.1, on a port that the system chooses.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


def main() -> int:
    """Runs the worker and returns its exit status."""
    request = json.load(sys.stdin)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = request["model"]
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.warmup = False
    parameters.cpuparams.n_threads = 1
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for kind in ("cache_type_k", "cache_type_v"):
        setattr(parameters, kind, xllamacpp.ggml_type.GGML_TYPE_F32)
    parameters.hostnames = ["127.0.0.1"]
    server = xllamacpp.Server(parameters)
    url = server.listening_address
    as_text = {"add_special": False, "parse_special": False}
    greedy = {"temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True, "return_tokens": True}
    asked = {"prompt": request["prompt"], "n_predict": request["num_new_tokens"], **greedy}
    answer = {
        "version": xllamacpp.__version__,
        "ids": [_ask(f"{url}/tokenize", {"content": text, **as_text})["tokens"] for text in request["texts"]],
        "greedy": _ask(f"{url}/completion", asked)["tokens"],
        "log_probabilities": _score(url, request["scored"], request["vocab_size"]),
    }
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _score(url: str, ids: list[int], vocab_size: int) -> list[float]:
    found = []
    for end in range(1, len(ids)):
        asked = {"prompt": ids[:end], "n_predict": 1, "ignore_eos": True, "n_probs": vocab_size}
        (answer,) = _ask(f"{url}/completion", asked)["completion_probabilities"]
        found.append(next(one["logprob"] for one in answer["top_logprobs"] if one["id"] == ids[end]))
    return found


def _ask(url: str, content: dict[str, Any]) -> Any:
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the proxy's settings
    with opener.open(request, timeout=60) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
