"""The proof of a GGUF file by llama.cpp itself, in a separate process that also does what `prove_gguf` does.

tokenizer    the ids of the test texts and the bytes of each id are ours; so are the ids of a conversation, or the
             proof lists both
llama_cpp    the probabilities of next tokens are those of our decoder with the file's weights, up to the rounding with
             which llama.cpp multiplies in this type; the loss is compared with that of the checkpoint's weights
generation   greedy text parts from our decoder's only where two tokens are equally likely up to that rounding
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGUFReader, dequantize
from tokenizers.normalizers import NFC
from torch import Tensor

from genesis.base.errors import UserError
from genesis.base.progress import sent_as_lines, stage
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.export.llama_cpp import LlamaCpp
from genesis.export.proof import answer_request
from genesis.export.proof_size import ProofSize, plan_proof
from genesis.export.prove import build_sequences, count_equal, count_parameters, find_long_length
from genesis.export.prove_gguf import Proved, list_versions, prove_weights
from genesis.export.tensors import iterate_blocks
from genesis.export.tokenizer import compare_tokenizers
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.huggingface.stored import list_weights
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.feed_forward import DenseConfig
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import DECODER_PREFIX
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.huggingface import read_json
from genesis.tokenizer.limits import iterate_steps
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer, encode_prompt

TOLERANCE: Final = 2e-4
"""In float32, the largest difference of logarithms of probabilities, relative to the largest logit."""
_GELU_TOLERANCE: Final = 5e-3
"""The same with GELU, which llama.cpp reads from a table of values in float16."""
SHARES: Final[Mapping[str, float]] = {"f32": 1e-5, "f16": 1e-4, "bf16": 1e-3}
"""By type of matrices, the mean divergence of probabilities as a share of their divergence from equal ones: what
llama.cpp multiplies with the weights is rounded to the same type."""
_QUANTISED_SHARE: Final = 0.02
"""The same for other types, where it is rounded to 8 bits."""
_MIXTURE_SHARE: Final = 0.1
"""The same with experts: rounding lets a router that is almost undecided choose others."""
_SMALLEST: Final = 1e-6
"""A divergence in nats that float32 itself rounds, of a model whose probabilities are almost equal."""
_NUM_PLACES: Final = 32
_NUM_LIKELY: Final = 256
_PROMPT_TOKENS: Final = 16
_CONVERSATION: Final = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
)


def main(argv: Sequence[str]) -> int:
    """Runs the proof for the request, JSON in the first argument; prints the results as one line of JSON."""
    with sent_as_lines():
        return answer_request(argv, _prove)


def _prove(request: dict[str, Any]) -> dict[str, Any]:
    proved, weights = prove_weights(request)
    tokenizer = open_tokenizer(request["tokenizer"])
    config = proved.config
    size = plan_proof(
        count_parameters(proved.sources[0].manifest), find_long_length(config), is_whole=request["is_whole"]
    )
    sequences = build_sequences(config, tokenizer, size)
    places = _choose_places(sequences, tokenizer)
    exact = _score(_build_decoder(_read_exact(proved), config), sequences, places)
    decoder = _build_decoder(_read_file(proved), config)
    ours = _score(decoder, sequences, places)
    num_new = min(size.num_new_tokens, config.max_seq_len - _PROMPT_TOKENS)
    context = max(*map(len, sequences), _PROMPT_TOKENS + num_new) + 1
    with stage("loading the file in llama.cpp"):
        theirs = LlamaCpp(proved.path, context, torch.get_num_threads())
    scored, tolerance = _compare_scores(theirs, request["kind"], config, sequences, places, ours)
    following = torch.tensor([sequences[number][end] for number, end in places])
    scored["loss_of_the_file_here"] = _mean_loss(ours, following)
    scored["loss_of_the_checkpoint"] = _mean_loss(exact, following)
    generation = _compare_generation(theirs, decoder, sequences[0][:_PROMPT_TOKENS], num_new, tolerance)
    learned = None if request["learned"] is None else Path(request["learned"])
    return {
        "weights": weights,
        "tokenizer": _compare_tokenizer(theirs, tokenizer, size),
        "chat": _compare_chat(theirs, tokenizer, learned),
        "llama_cpp": scored,
        "generation": generation,
        "versions": list_versions("xllamacpp", *tokenizer.packages),
    }


def _compare_scores(
    theirs: LlamaCpp,
    kind: str,
    config: DecoderConfig,
    sequences: Sequence[Sequence[int]],
    places: Sequence[tuple[int, int]],
    ours: Sequence[Tensor],
) -> tuple[dict[str, Any], float]:
    """Returns the result, and the tolerance of differences."""
    largest = difference = divergence = from_equal = 0.0
    losses = []
    num_same_choice = 0
    with stage("probabilities of llama.cpp", len(places), "places") as shown:
        for (number, end), logits in shown.each(zip(places, ours, strict=True)):
            sequence = sequences[number]
            loss, likely = theirs.score(sequence[:end], sequence[end], min(_NUM_LIKELY, len(logits)))
            known, found = logits.log_softmax(-1)[torch.tensor(list(likely))], torch.tensor(list(likely.values()))
            gap = float((known - found).abs().max())
            largest, difference = max(largest, float(logits.abs().max())), max(difference, gap)
            # Among the listed ones: llama.cpp adds up the others in another order.
            known, found = known.log_softmax(-1), found.log_softmax(-1)
            divergence += float((known.exp() * (known - found)).sum()) / len(places)
            from_equal += (math.log(len(likely)) + float((known.exp() * known).sum())) / len(places)
            num_same_choice += int(logits.argmax()) == max(likely, key=likely.__getitem__)
            losses.append(-loss)
    feed_forward = config.parts.feed_forward
    quantised = _MIXTURE_SHARE if isinstance(feed_forward, MixtureConfig) else _QUANTISED_SHARE
    allowed = max(SHARES.get(kind, quantised) * from_equal, _SMALLEST)
    is_gelu = isinstance(feed_forward, DenseConfig) and feed_forward.activation != "silu"
    tolerance = (_GELU_TOLERANCE if is_gelu else TOLERANCE) * max(1.0, largest)
    if not divergence <= allowed or (kind == "f32" and not difference <= tolerance):
        raise UserError(
            f"probabilities in llama.cpp differ by {divergence:.3g} nats, and their logarithms by up to "
            f"{difference:.3g}, more than rounding in {kind} explains ({allowed:.3g} nats)"
        )
    result = {
        "compared": "probabilities of the most likely tokens, with genesis in float32 and the weights of the file",
        "num_places": len(places),
        "longest_context": max(end for _, end in places),
        "num_same_choice": num_same_choice,
        "largest_difference": difference,
        "divergence": divergence,
        "allowed_divergence": allowed,
        "loss": sum(losses) / len(losses),
    }
    return result, max(difference, tolerance)


def _compare_generation(
    theirs: LlamaCpp, decoder: Decoder, prompt: list[int], num_new: int, tolerance: float
) -> dict[str, Any]:
    options = GenerateOptions(num_new, SamplingOptions(temperature=0.0))
    with stage("greedy text", num_new, "tokens") as shown:
        ours = [token.id for token in shown.each(generate(decoder, [prompt], options, frozenset()))]
    found = theirs.generate(prompt, num_new)
    num_equal = count_equal(decoder, prompt, ours[: len(found)], found, tolerance)
    return {
        "compared": "greedy, with a cache, up to the end of a text",
        "num_tokens": len(found),
        "num_equal": num_equal,
        "parted_at_a_tie": num_equal < len(found),
    }


def _mean_loss(logits: Sequence[Tensor], following: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(torch.stack(list(logits)), following))


def _choose_places(sequences: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Returns sequences and numbers of their tokens, the next of which is a whole text.

    They are spread over the first sequence, with the last ones of a longer one, which exceeds the window of attention
    or the context before rotary scaling.
    """
    whole = [
        (number, end)
        for number, sequence in enumerate(sequences)
        for end in range(1, len(sequence))
        if not tokenizer.is_byte(sequence[end]) and not tokenizer.is_control(sequence[end])
    ]
    first = [place for place in whole if place[0] == 0]
    longest = max(range(len(sequences)), key=lambda number: len(sequences[number]))
    last = [place for place in whole if place[0] == longest][-2:] if longest else []
    step = max(1, len(first) // _NUM_PLACES)
    return first[::step][:_NUM_PLACES] + last


def _score(decoder: Decoder, sequences: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns our logits behind each place."""
    found: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad(), stage("logits of genesis", len(places), "places") as shown:
        for number in dict.fromkeys(number for number, _ in places):
            ends = [end for one, end in places if one == number]
            logits = decoder(torch.tensor([sequences[number]]), logits_to_keep=torch.tensor(ends) - 1).flatten(0, -2)
            found |= {(number, end): row for end, row in zip(ends, logits, strict=True)}
            shown.advance(len(ends))
    return [found[place] for place in places]


def _read_exact(proved: Proved) -> dict[str, Tensor]:
    """Returns the weights of the checkpoint in float32."""
    names = dict.fromkeys(stored.ours for stored in proved.planned if stored.ours is not None)
    return {name: torch.cat(list(iterate_blocks(proved.sources, name, torch.float32))) for name in names}


def _read_file(proved: Proved) -> dict[str, Tensor]:
    """Returns the weights of the file, in float32, as the decoder has them."""
    held = {tensor.name: tensor for tensor in GGUFReader(proved.path).tensors}
    shapes = list_weights(proved.sources[0].manifest)
    found: dict[str, Tensor] = {}
    for stored in proved.planned:
        if stored.ours is not None and stored.ours not in found:
            values = dequantize(held[stored.name].data, stored.kind)
            found[stored.ours] = stored.to_ours(torch.from_numpy(values.copy()), shapes[stored.ours])
    return found


def _build_decoder(state: Mapping[str, Tensor], config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict({name.removeprefix(DECODER_PREFIX): one for name, one in state.items()}, assign=True)
    return decoder.eval()


def _compare_tokenizer(theirs: LlamaCpp, tokenizer: Tokenizer, size: ProofSize) -> dict[str, Any]:
    """Compares ids, and the bytes that llama.cpp has for each of them."""
    # llama.cpp does not normalise texts, and Python's Unicode has another version than the library's.
    steps = iterate_steps(read_json(tokenizer.files, FAST_NAME).get("normalizer"), "normalizers")
    is_composed = any(step.get("type") == "NFC" for step in steps)

    def encode(text: str) -> list[int]:
        return theirs.encode(NFC().normalize_str(text) if is_composed else text)

    framed = theirs.encode_framed("a")
    if tokenizer.bos_id is not None and framed != list(encode_prompt(tokenizer, "a")):
        raise UserError(
            f"the text 'a' is {list(encode_prompt(tokenizer, 'a'))} here, with bos, and {framed} in llama.cpp"
        )

    def decode(ids: list[int]) -> str:
        for token in ids:
            ours, spelled = tokenizer.decode_bytes([token]), theirs.spell(token)
            if ours != spelled:
                raise UserError(f"the id {token} is {ours!r} here and {spelled!r} in llama.cpp")
        return tokenizer.decode(ids)

    counts = compare_tokenizers(
        tokenizer,
        encode,
        decode,
        left_out=tokenizer.altered_characters,
        remedy="leave out --gguf, or the comparison by --proof weights",
        num_pieces=size.num_pieces,
        num_runs=size.num_runs,
    )
    compared = f"ids{', of texts in NFC' * is_composed}, and the bytes of each"
    return {"compared": compared, "num_texts": counts, "num_different": 0}


def _compare_chat(theirs: LlamaCpp, tokenizer: Tokenizer, learned: Path | None) -> dict[str, Any] | None:
    """Returns whether llama.cpp gives a model the same ids for a conversation; None without a template."""
    if learned is None and tokenizer.chat_template is None:
        return None
    renderer = open_renderer(tokenizer, ChatOptions(), is_training=False, learned=learned)
    try:
        ours = list(renderer.render_prompt(_CONVERSATION))
        found = theirs.encode_framed(theirs.render(_CONVERSATION))
    except UserError as error:
        return {"is_equal": False, "problem": str(error)}
    return {"is_equal": ours == found, "ours": ours, "llama_cpp": found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
