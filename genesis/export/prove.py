"""The proof: a separate process that loads the result with transformers and compares it with the checkpoint.

weights      every tensor in the directory equals, bit for bit, the checkpoints' (average) tensor cast to its dtype
tokenizer    equal ids and decoded text for every byte, every assigned character, texts in many scripts, all pieces
logits       of transformers' model and our decoder, both in float32 from the directory's weights, on real text; one
             sequence is longer than a sliding window and than the context before rotary scaling; of a reward model
             the scores
generation   greedy text of both models; where it differs, the two tokens must be equally likely up to rounding
adapters     if merged: logits of the merged weights equal those of the base with separate adapters
"""

import gc
import math
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from genesis.base.errors import UserError, numbered
from genesis.base.progress import sent_as_lines, stage
from genesis.export.proof import answer_request
from genesis.export.proof_size import SEQUENCE_TOKENS, ProofSize, plan_proof
from genesis.export.texts import SCRIPTS
from genesis.export.theirs import load_model, load_tokenizer
from genesis.export.tokenizer import compare_tokenizers
from genesis.generate.load import load_decoder
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.huggingface.directory import CONFIG_NAME, read_json
from genesis.huggingface.family import OUTPUT_WEIGHT, Family, Placed
from genesis.huggingface.latent import latents_of
from genesis.huggingface.shape import read_shape
from genesis.huggingface.stored import find_nf4_tensors, list_nf4_tensors, list_weights, read_stored
from genesis.huggingface.weights import iterate_tensors, read_file_names
from genesis.model.adapter import cut_adapter, is_adapter_tensor, merge_rows, name_adapter_tensors, read_plain_state
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.nf4 import quantise
from genesis.model.recipe import DECODER_PREFIX, build_decoder_config, read_adapter_config
from genesis.model.scores import score_text
from genesis.tokenizer.fast_form import FAST_NAME
from genesis.tokenizer.open import open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer, encode_prompt
from genesis_callbacks.checkpoint import Manifest, read_manifest
from genesis_callbacks.checkpoint.restore import read_recorded_tensors

RELATIVE_TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest logit: the effect of another summation order in float32."""
_PROMPT_TOKENS = 16
_GENERAL_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers that follow `tokenizer.json`."""
_NUM_CACHED = 4
"""Tensors of a checkpoint that stay in memory, because a file lists the three stacks of a layer's experts in turns."""
PACKAGES = ("genesis-lm", "genesis-callbacks", "torch", "safetensors", "transformers", "tokenizers")


def main(argv: Sequence[str]) -> int:
    """Runs the proof for the request, JSON in the first argument; prints the results as one line of JSON."""
    with sent_as_lines():
        return answer_request(argv, _prove)


def _prove(request: dict[str, Any]) -> dict[str, Any]:
    directory, layout = Path(request["directory"]), request["layout"]
    checkpoints = [Path(path) for path in request["checkpoints"]]
    names = read_file_names(directory)
    ours = None if request["tokenizer"] is None else open_tokenizer(request["tokenizer"])
    packages = (*PACKAGES, *(() if ours is None else ours.packages))
    manifest = read_manifest(checkpoints[0])
    config = build_decoder_config(manifest.recipe["model"]["decoder"], where=str(checkpoints[0]))
    family, own = read_shape(directory) if layout == "huggingface" else (None, config)
    has_new_head = own.num_scores != config.num_scores  # a reward model that begins with a model that writes text
    size = plan_proof(count_parameters(manifest), find_long_length(config), is_whole=request["is_whole"])
    result: dict[str, Any] = {
        "weights": _compare_weights(
            *(directory, names, checkpoints, family, config),
            is_merged=request["is_merged"],
            is_import=request["is_import"],
            has_new_head=has_new_head,
        ),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in packages},
    }
    if family is None:
        return result
    is_open = ours is not None and ours.huggingface_files(config.max_seq_len) is not None  # passed to transformers
    result["tokenizer"] = prove_tokenizer(directory, ours, request["is_import"], size) if ours and is_open else None
    if request["compares_models"]:
        result |= _compare_models(directory, names, own if has_new_head else config, family, ours, size)
    if request["compares_models"] and request["is_import"] and list_nf4_tensors(manifest):
        result["nf4"] = _compare_nf4(checkpoints[0], directory, names, family, ours, size)
    if request["compares_models"] and request["is_merged"]:
        result["adapters"] = _compare_adapters(checkpoints[0], ours, size)
    return result


def count_parameters(manifest: Manifest) -> int:
    """Returns the number of parameters of the decoder in a checkpoint."""
    return sum(map(math.prod, list_weights(manifest).values()))


# ---- weights


def _compare_weights(
    directory: Path,
    names: dict[str, str],
    checkpoints: Sequence[Path],
    family: Family | None,
    config: DecoderConfig,
    *,
    is_merged: bool,
    is_import: bool,
    has_new_head: bool,
) -> dict[str, Any]:
    recorded = [(path, read_manifest(path)) for path in checkpoints]
    manifest = recorded[0][1]
    shapes = list_weights(manifest)
    missing = {name for name in shapes if not is_adapter_tensor(name)}
    if has_new_head:
        missing.remove(DECODER_PREFIX + OUTPUT_WEIGHT)
    adapter = read_adapter_config(manifest.recipe, where=str(checkpoints[0])) if is_merged else None
    num_values: Counter[str] = Counter()
    held = lru_cache(_NUM_CACHED)(partial(_read_average, recorded))
    rows: dict[str, dict[int, Tensor]] = {}
    for name, tensor in _shown(iterate_tensors(directory, names, family), len(names), "comparing the weights"):
        placed = [Placed(name, None, tensor)] if family is None else family.place(name, tensor, config)
        for found, expert, values in placed:
            ours = DECODER_PREFIX + found
            if ours not in missing:
                if ours == DECODER_PREFIX + OUTPUT_WEIGHT:
                    continue  # a copy of tied embeddings, already compared by the import, or replaced by a new head
                raise UserError(f"{name} is in the directory but not in the checkpoint")
            is_bytes = is_import and bool(find_nf4_tensors(manifest, ours))
            whole = _collect(rows, ours, expert, values if is_bytes else values.new_empty(0), shapes[ours])
            if whole is not None:
                missing.remove(ours)
            if adapter is not None and name_adapter_tensors(ours)["lora_A"] in manifest.tensors:
                _compare_merged(manifest, held, ours, expert, values, adapter.scaling)
                num_values["num_merged"] += values.numel()
            elif is_bytes:
                _compare_quantised(checkpoints[0], manifest, ours, whole)
                num_values["num_quantised"] += values.numel()
            else:
                _compare_equal(held(ours), expert, values, name)
                num_values["num_equal"] += values.numel()
    if missing:
        raise UserError(
            f"the directory lacks {numbered(len(missing), 'tensors')} of the checkpoint, such as {min(missing)}"
        )
    compared = {
        "compared": "every value, bit for bit, after the cast",
        "num_values": num_values.total(),
        "num_different": 0,
    }
    del num_values["num_equal"]
    return {**compared, **({"num_merged": 0} if is_merged else {}), **num_values}


def _collect(
    rows: dict[str, dict[int, Tensor]], name: str, expert: int | None, values: Tensor, shape: tuple[int, ...]
) -> Tensor | None:
    """Returns a tensor, or the stack of all experts' once the last of them came; None before."""
    if expert is None:
        return values
    found = rows.setdefault(name, {})
    found[expert] = values
    return torch.stack([one for _, one in sorted(rows.pop(name).items())]) if len(found) == shape[0] else None


def _compare_equal(held: Tensor, expert: int | None, theirs: Tensor, name: str) -> None:
    if not torch.equal((held if expert is None else held[expert]).to(theirs.dtype), theirs):
        raise UserError(f"the values of {name} differ from the checkpoint's")


def _compare_quantised(checkpoint: Path, manifest: Manifest, name: str, theirs: Tensor | None) -> None:
    """Compares the bytes of a weight in NF4 with those that its values in the directory give, computed again."""
    if theirs is None:  # a stack is quantised as a whole, and an expert is missing yet
        return
    names = find_nf4_tensors(manifest, name)
    held = read_recorded_tensors(checkpoint, manifest, names.values())
    for tensor, expected in quantise(theirs).items():
        if not torch.equal(held[names[tensor]], expected):
            raise UserError(f"{tensor} of {name.removesuffix('.weight')} is not what its weights in the directory give")


def _shown(tensors: Iterable[tuple[str, Tensor]], number: int, what: str) -> Iterator[tuple[str, Tensor]]:
    with stage(what, number, "tensors") as shown:
        yield from shown.each(tensors)


def _compare_merged(
    manifest: Manifest, read: Callable[[str], Tensor], name: str, expert: int | None, theirs: Tensor, scaling: float
) -> None:
    """Compares a weight with base and adapter merged in one operation; the export merges a few rows at a time."""
    weight, stack = read(name), theirs if expert is None else theirs.unsqueeze(0)
    adapter = {role: read(full) for role, full in name_adapter_tensors(name).items() if full in manifest.tensors}
    rows = slice(0, len(weight)) if expert is None else slice(expert, expert + 1)
    merged = merge_rows({"weight": weight[rows], **cut_adapter(name, adapter, rows)}, scaling)
    eps = torch.finfo(theirs.dtype).eps
    if not torch.allclose(stack.double(), merged, rtol=eps, atol=eps * float(merged.abs().max())):
        raise UserError(f"the values of {name} differ from the base's with the adapter by more than one rounding")


def _read_average(recorded: Sequence[tuple[Path, Manifest]], name: str) -> Tensor:
    first, *others = (read_stored(path, manifest, [name])[name] for path, manifest in recorded)
    if not others:
        return first
    total = first.double()
    for other in others:  # in the export's order, because the last bit of a sum depends on the order
        total += other.double()
    return total / len(recorded)


# ---- tokenizer


def prove_tokenizer(directory: Path, ours: Tokenizer, is_import: bool, size: ProofSize) -> dict[str, Any]:
    """Compares transformers' tokenizer of a directory with ours, and returns the results.

    Raises:
        UserError: They differ.
    """
    # Our tokenizers read the spelling of a control symbol as text; transformers does so with this option.
    is_of_others = is_import or FAST_NAME in ours.files
    fast: Any = load_tokenizer(directory, **({"split_special_tokens": True} if is_of_others else {}))
    bos = [] if ours.bos_id is None else [ours.bos_id]
    framed, plain = fast.encode("a"), fast.encode("a", add_special_tokens=False)
    # Without a tokenizer.json, versions of transformers differ in the ids that they add before a text.
    if (directory / FAST_NAME).exists() and framed[: len(bos) + len(plain)] != bos + plain:
        raise UserError(f"the text 'a' is {bos + plain} here, with bos, and {framed} in transformers")
    left_out = ours.altered_characters if is_of_others else ""
    remedy = {}
    if is_import:
        remedy = {"remedy": "import the weights alone by --no_tokenizer"}
    elif type(fast).__name__ not in _GENERAL_TOKENIZERS:
        remedy = {
            "remedy": f"transformers opens every tokenizer of this family as {type(fast).__name__}, which splits texts "
            "in its own way: train with a tokenizer of that class, or export as --format safetensors"
        }
    counts = compare_tokenizers(
        ours,
        lambda text: fast.encode(text, add_special_tokens=False),
        lambda ids: fast.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        left_out=left_out,
        num_pieces=size.num_pieces,
        num_runs=size.num_runs,
        **remedy,
    )
    without = "".join(f", without U+{ord(character):04X}" for character in left_out)
    compared = f"ids and decoded text{without}"
    return {"compared": compared, "num_texts": counts, "num_different": 0}


# ---- logits and generation


def _compare_models(
    directory: Path,
    names: dict[str, str],
    config: DecoderConfig,
    family: Family,
    tokenizer: Tokenizer | None,
    size: ProofSize,
) -> dict[str, Any]:
    sequences = build_sequences(config, tokenizer, size)
    if config.num_scores is not None:
        return {"logits": _compare_scores(directory, names, config, family, sequences)}
    prompt = sequences[0][:_PROMPT_TOKENS]
    num_new = min(size.num_new_tokens, config.max_seq_len - len(prompt))
    kept = [min(len(sequence), size.sequence_tokens) for sequence in sequences]
    their_logits, their_text = _ask_transformers(directory, sequences, kept, prompt, num_new, family)
    gc.collect()  # one model at a time
    decoder = _build_decoder(directory, names, config, family)
    largest = difference = 0.0
    num_same_choice = num_tokens = 0
    with torch.no_grad(), stage("logits of genesis", len(sequences), "sequences") as shown:
        for sequence, num_kept, theirs in shown.each(zip(sequences, kept, their_logits, strict=True)):
            last = torch.arange(len(sequence) - num_kept, len(sequence))
            ours = decoder(torch.tensor([sequence]), logits_to_keep=last)
            largest = max(largest, float(theirs.abs().max()))
            difference = max(difference, float((ours - theirs).abs().max()))
            num_same_choice += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
            num_tokens += num_kept
    tolerance = RELATIVE_TOLERANCE * max(1.0, largest)
    if not difference <= tolerance:
        raise UserError(f"logits differ by {difference:.3g}, more than the rounding tolerance {tolerance:.3g}")
    options = GenerateOptions(num_new, SamplingOptions(temperature=0.0))
    with stage("greedy text of genesis", num_new, "tokens") as shown:
        our_text = [token.id for token in shown.each(generate(decoder, [prompt], options, frozenset()))]
    num_equal = count_equal(decoder, prompt, our_text, their_text, tolerance)
    return {
        "logits": {
            "compared": "transformers and genesis in float32, from the weights in this directory",
            "num_sequences": len(sequences),
            "num_tokens": num_tokens,
            "longest_context": max(map(len, sequences)),
            "has_long_sequence": size.has_long_sequence or not find_long_length(config),
            "left_out_tokens": 0 if size.has_long_sequence else find_long_length(config),
            "num_same_choice": num_same_choice,
            "largest_logit": largest,
            "largest_difference": difference,
            "tolerance": tolerance,
        },
        "generation": {
            "compared": "greedy, with a cache",
            "num_tokens": num_new,
            "num_equal": num_equal,
            "parted_at_a_tie": num_equal < num_new,
        },
    }


def _compare_scores(
    directory: Path, names: dict[str, str], config: DecoderConfig, family: Family, sequences: list[list[int]]
) -> dict[str, Any]:
    """Compares the scores that a reward model gives to each sequence, and to its first half."""
    halves = [part for one in sequences for part in (one, one[: (len(one) + 1) // 2])]
    pad = read_json(directory / CONFIG_NAME).get("pad_token_id")
    texts = [one for one in halves if one[-1] != pad]  # where transformers would look for another last token
    model = _open_theirs(directory, family)
    with torch.no_grad(), stage("scores of transformers", len(texts), "sequences") as shown:
        theirs = [float(model(input_ids=torch.tensor([one])).logits) for one in shown.each(texts)]
    del model
    gc.collect()  # one model at a time
    decoder = _build_decoder(directory, names, config, family)
    with stage("scores of genesis", len(texts), "sequences") as shown:
        ours = [score_text(decoder, one) for one in shown.each(texts)]
    return {
        "compared": "scores of transformers and genesis in float32, from the weights in this directory",
        "num_sequences": len(texts),
        "longest_context": max(map(len, texts)),
        **measure_scores(ours, theirs),
    }


def measure_scores(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Returns the largest score of transformers, the largest difference of ours, and the tolerance.

    Raises:
        UserError: A score is not finite, or two differ by more than the tolerance.
    """
    if not all(map(math.isfinite, (*ours, *theirs))):  # max() may leave out NaN
        raise UserError("a score is not finite: the weights have diverged; take an earlier checkpoint")
    largest = max(map(abs, theirs))
    difference = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    tolerance = RELATIVE_TOLERANCE * max(1.0, largest)
    if not difference <= tolerance:
        raise UserError(f"scores differ by {difference:.3g}, more than the rounding tolerance {tolerance:.3g}")
    return {"largest_logit": largest, "largest_difference": difference, "tolerance": tolerance}


def _compare_nf4(
    checkpoint: Path,
    directory: Path,
    names: dict[str, str],
    family: Family,
    tokenizer: Tokenizer | None,
    size: ProofSize,
) -> dict[str, Any]:
    """Measures how far the logits of quantised weights are from those of the weights: a figure, and no bound."""
    quantised = load_decoder(checkpoint, dtype=torch.float32, allows_scores=True).decoder
    config = quantised.config
    decoder = _build_decoder(directory, names, config, family)
    sequences = build_sequences(config, tokenizer, size)
    largest = difference = 0.0
    num_same_choice = num_tokens = 0
    with torch.no_grad(), stage("logits of the quantised weights", len(sequences), "sequences") as shown:
        for sequence in shown.each(sequences):
            ours, theirs = quantised(torch.tensor([sequence])), decoder(torch.tensor([sequence]))
            largest = max(largest, float(theirs.abs().max()))
            difference = max(difference, float((ours - theirs).abs().max()))
            num_same_choice += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
            num_tokens += len(sequence)
    plain, rounded = decoder.state_dict(), read_plain_state(quantised)
    errors = {
        name: float((rounded[name] - plain[name]).norm() / plain[name].norm().clamp(min=1e-38))
        for name in plain.keys() & rounded.keys() - quantised.state_dict().keys()
    }
    worst = max(errors, key=errors.__getitem__)
    return {
        "compared": "logits of the weights in 4 bits and of the weights in this directory, both in float32",
        "num_tokens": num_tokens,
        "num_same_choice": num_same_choice,
        "largest_logit": largest,
        "largest_difference": difference,
        "largest_relative_error": {"name": worst, "error": errors[worst]},
        "relative_errors": dict(sorted(errors.items())),
    }


def _compare_adapters(checkpoint: Path, tokenizer: Tokenizer | None, size: ProofSize) -> dict[str, Any]:
    """Compares the logits of the base with separate adapters with those of merged weights before rounding."""
    adapted = load_decoder(checkpoint, dtype=torch.float32, allows_scores=True).decoder
    adapter_config = read_adapter_config(read_manifest(checkpoint).recipe, where=str(checkpoint))
    assert adapter_config is not None, "the checkpoint has adapters"
    with torch.device("meta"):
        merged = Decoder(adapted.config)
    held = read_plain_state(adapted)
    state = {name: tensor for name, tensor in held.items() if not is_adapter_tensor(name)}
    for name, weight in state.items():
        adapter = {role: held[full] for role, full in name_adapter_tensors(name).items() if full in held}
        if adapter:
            whole = cut_adapter(name, adapter, slice(0, len(weight)))
            state[name] = merge_rows({"weight": weight, **whole}, adapter_config.scaling).float()
    merged.load_state_dict(state, assign=True)
    largest = difference = 0.0
    sequences = build_sequences(adapted.config, tokenizer, size)
    with torch.no_grad(), stage("logits of the adapters", len(sequences), "sequences") as shown:
        for sequence in shown.each(sequences):
            ours, theirs = adapted(torch.tensor([sequence])), merged(torch.tensor([sequence]))
            largest = max(largest, float(ours.abs().max()))
            difference = max(difference, float((ours - theirs).abs().max()))
    tolerance = RELATIVE_TOLERANCE * max(1.0, largest)
    if not difference <= tolerance:
        raise UserError(f"merged logits differ from the adapters' by {difference:.3g}, more than {tolerance:.3g}")
    return {
        "compared": "logits of the merged weights before the cast, and of the base beside its adapters, in float32",
        "largest_logit": largest,
        "largest_difference": difference,
        "tolerance": tolerance,
    }


def build_sequences(config: DecoderConfig, tokenizer: Tokenizer | None, size: ProofSize) -> list[list[int]]:
    """Returns the sequences of ids whose logits are compared: real text, or random ids without a tokenizer."""
    length = min(size.sequence_tokens, config.max_seq_len - 1)
    long_length = find_long_length(config) if size.has_long_sequence else 0
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        stream = torch.randint(
            config.vocab_size, (size.num_sequences * length + long_length,), generator=generator
        ).tolist()
    else:
        ids = [encode_prompt(tokenizer, text) for text in SCRIPTS.values()]
        stream = [token for text in ids for token in text]
    short = [stream[start : start + length] for start in range(0, len(stream), length)][: size.num_sequences]
    repeated = stream * (1 + long_length // len(stream))
    return short if long_length <= length else [*short, repeated[:long_length]]


def find_long_length(config: DecoderConfig) -> int:
    """Returns the length of a sequence that exceeds the window and the unscaled context by as many tokens again."""
    attention, latents = config.parts.attention, latents_of(config)
    scaling = getattr(latents or attention, "rope_scaling", None)
    bounds = [0 if attention is None else attention.sliding_window or 0]
    bounds.append(0 if scaling is None else scaling.original_seq_len or 0)
    return min(max(bounds) + SEQUENCE_TOKENS, config.max_seq_len - 1) if any(bounds) else 0


def _open_theirs(directory: Path, family: Family) -> Any:
    """Returns transformers' model, after checking that the directory has all tensors and no others."""
    with stage("loading transformers' model"):
        model, loading = load_model(directory)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = [name for name in sorted(map(str, loading[kind])) if not family.is_dropped(name)]
        if names:
            raise UserError(f"transformers reports {kind.replace('_', ' ')}: {', '.join(names)}")
    return model.eval()


def _ask_transformers(
    directory: Path, sequences: list[list[int]], kept: list[int], prompt: list[int], num_new: int, family: Family
) -> tuple[list[Tensor], list[int]]:
    model = _open_theirs(directory, family)
    build: Any = GenerationConfig
    greedy = build(max_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generation_config = greedy  # or transformers would fill in the eos of the directory, and end there
    with torch.no_grad(), stage("logits of transformers", len(sequences), "sequences") as shown:
        logits = [
            model(input_ids=torch.tensor([sequence]), logits_to_keep=num_kept).logits[0].float()
            for sequence, num_kept in shown.each(zip(sequences, kept, strict=True))
        ]
    with torch.no_grad(), stage("greedy text of transformers"):
        text = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=greedy,
        )
    return logits, text[0, len(prompt) :].tolist()


def _build_decoder(directory: Path, names: dict[str, str], config: DecoderConfig, family: Family) -> Decoder:
    tensors = _shown(iterate_tensors(directory, names, family), len(names), "loading genesis's model")
    state = {name: tensor.float() for name, tensor in tensors}
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(family.to_ours(state, config), assign=True)
    return decoder.eval()


def count_equal(decoder: Decoder, prompt: list[int], ours: list[int], theirs: list[int], tolerance: float) -> int:
    """Returns the number of equal new tokens, after checking that the first different tokens are equally likely."""
    if ours == theirs:
        return len(ours)
    pairs = zip(ours, theirs, strict=False)
    place = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    if place < min(len(ours), len(theirs)):
        with torch.no_grad():
            logits = decoder(torch.tensor([[*prompt, *ours[:place]]]))[0, -1]
        if abs(float(logits[ours[place]] - logits[theirs[place]])) <= 2 * tolerance:
            return place
    raise UserError(f"greedy text differs at new token {place + 1}, and not because two are equally likely")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
