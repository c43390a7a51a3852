"""Texts that the newest checkpoint of a run writes for a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from genesis.generate.ids import build_writer
from genesis.generate.load import load_decoder
from genesis.generate.sample import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.operations.report.collect import Sample
from genesis.tokenizer.tokenizer import encode_prompt

_TEMPERATURE: Final = 0.7
_NUM_TOKENS: Final = 120


def write_texts(run: Path, prompts: Sequence[str]) -> list[Sample]:
    """Returns the newest checkpoint's continuation of each prompt, sampled with a fixed seed on the CPU.

    Raises:
        UserError: The run has no checkpoint or no tokenizer.
    """
    loaded = load_decoder(run)
    tokenizer = loaded.text_tokenizer
    options = GenerateOptions(max_new_tokens=_NUM_TOKENS, sampling=SamplingOptions(_TEMPERATURE), seed=0)
    writers, texts = [build_writer(tokenizer) for _ in prompts], list(prompts)
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    for token in generate(loaded.decoder, ids, options, loaded.stop_ids):
        if token.id < tokenizer.vocab_size:  # a model may have more ids, without a text
            texts[token.prompt] += writers[token.prompt].feed(token.id)
        if token.is_last:
            texts[token.prompt] += writers[token.prompt].flush()
    title = f"{loaded.checkpoint.name}, temperature {_TEMPERATURE}"
    return [Sample(title, text) for text in texts]
