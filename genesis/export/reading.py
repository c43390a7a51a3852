"""Writes the files that read and end texts as a model learned: tokenizer, chat template and stops of an export."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genesis.base.errors import UserError, numbered
from genesis.chat.learned import find_stop_ids
from genesis.export.proof import Layout, TokenizerForm, TokenizerOrigin
from genesis.export.tokenizer import compare_fast_tokenizer
from genesis.generate.load import find_learned_template, load_tokenizer
from genesis.huggingface.directory import GENERATION_CONFIG_NAME, read_json
from genesis.model.decoder import DecoderConfig
from genesis.tokenizer.fast_form import CONFIG_NAME, FAST_NAME, SPECIAL_NAME
from genesis.tokenizer.files import write_files
from genesis.tokenizer.huggingface import TEMPLATE_NAME
from genesis.tokenizer.open import has_hash, open_tokenizer
from genesis.tokenizer.tokenizer import Tokenizer
from genesis_callbacks.base.json_text import load_json
from genesis_callbacks.base.untrusted import read_file
from genesis_callbacks.checkpoint import Manifest


@dataclass(frozen=True)
class Reading:
    """How a model reads and ends texts.

    Attributes:
        tokenizer: The tokenizer; None for a model of ids.
        origin: Whether the checkpoint's hash confirms the tokenizer.
        learned: The file of the chat template that the model has learned, if any.
    """

    tokenizer: Tokenizer | None
    origin: TokenizerOrigin
    learned: Path | None

    @property
    def ids(self) -> dict[str, int | None]:
        """Returns the ids of the named tokens. For a missing key transformers would use its default."""
        names = ("bos", "eos", "pad")
        return {f"{name}_token_id": getattr(self.tokenizer, f"{name}_id", None) for name in names}

    @property
    def ids_of_scores(self) -> dict[str, int | None]:
        """Returns the same for a reward model, which transformers asks for the last token that is no padding.

        A tokenizer may pad with the token that ends its texts, which must be found, or with none: then with bos, or
        with another control symbol.
        """
        tokenizer, ids = self.tokenizer, self.ids
        if tokenizer is None:
            return ids
        ends = find_stop_ids(tokenizer, self.learned)
        named = range(tokenizer.vocab_size)
        controls = (
            token for token in named if tokenizer.is_control(token) and tokenizer.spell([token], has_controls=True)
        )
        known = (token for token in (tokenizer.pad_id, tokenizer.bos_id) if token is not None)
        return {**ids, "pad_token_id": next((token for token in (*known, *controls) if token not in ends), None)}


def check_choice(tokenizer: Path | None, *, may_be_unproved: bool) -> None:
    """Refuses the permission of an unproved tokenizer without a tokenizer.

    Raises:
        UserError: That is so.
    """
    if may_be_unproved and tokenizer is None:
        raise UserError("--allow_unproved_tokenizer needs --tokenizer: give both, or neither")


def find_reading(
    checkpoint: Path, manifest: Manifest, vocab_size: int, given: Path | None, *, may_be_unproved: bool
) -> Reading:
    """Returns how the model of a checkpoint reads and ends texts.

    Args:
        checkpoint: The checkpoint's directory.
        manifest: Its manifest.
        vocab_size: Number of ids of the model.
        given: Tokenizer file or directory; None for the checkpoint's own tokenizer.
        may_be_unproved: Whether a tokenizer whose hash differs from the run's is accepted.

    Raises:
        UserError: The checkpoint does not confirm the tokenizer, and the options do not allow that; the tokenizer is
            not found, or has more ids than the model.
    """
    tokenizer, origin = _find_tokenizer(checkpoint, manifest, given, may_be_unproved=may_be_unproved)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(f"the tokenizer has {numbered(tokenizer.vocab_size, 'ids')}, but the model only {vocab_size:,}")
    return Reading(tokenizer, origin, find_learned_template(checkpoint, manifest))


def _find_tokenizer(
    checkpoint: Path, manifest: Manifest, given: Path | None, *, may_be_unproved: bool
) -> tuple[Tokenizer | None, TokenizerOrigin]:
    wanted = manifest.identity.get("tokenizer_hash")
    if may_be_unproved and given is not None:
        opened = open_tokenizer(given)
        return opened, "run" if wanted and has_hash(opened, wanted) else "unproved"
    tokenizer = load_tokenizer(given, manifest, checkpoint)
    if tokenizer is None:
        return None, "none"
    if not wanted:
        raise UserError(
            f"{checkpoint} has no tokenizer hash, so that no tokenizer can be proved to be the run's; export one with "
            "--tokenizer and --allow_unproved_tokenizer, which proof.json and the card report"
        )
    return tokenizer, "run"


def write_tokenizer(reading: Reading, config: DecoderConfig, layout: Layout, directory: Path) -> TokenizerForm:
    """Writes the tokenizer's own files, if possible those for transformers, and the template that was learned.

    Returns:
        Which files were written.

    Raises:
        UserError: The fast form for transformers gives other ids.
    """
    tokenizer = reading.tokenizer
    if tokenizer is None:
        return "none"
    write_files(tokenizer.files, directory)
    files = tokenizer.huggingface_files(config.max_seq_len) if layout == "huggingface" else None
    if files is not None:
        # Before the weights, so that a tokenizer that cannot be exported is refused at once.
        compare_fast_tokenizer(tokenizer, files[FAST_NAME], left_out=_left_out(tokenizer))
        write_files(files if config.num_scores is None else _name_padding(files, reading), directory)
    if reading.learned is not None:
        (directory / TEMPLATE_NAME).write_bytes(read_file(reading.learned))
    return "own" if files is None else "huggingface"


def _name_padding(files: Mapping[str, bytes], reading: Reading) -> dict[str, bytes]:
    """Returns the files of a reward model's tokenizer, which pads as the model's configuration has it."""
    pad, changed = reading.ids_of_scores["pad_token_id"], dict(files)
    if reading.tokenizer is not None and pad not in (None, reading.tokenizer.pad_id):
        spelling = reading.tokenizer.spell([pad], has_controls=True)
        for name in (CONFIG_NAME, *({SPECIAL_NAME} & files.keys())):
            content = {**load_json(files.get(name, b"{}")), "pad_token": spelling}
            changed[name] = json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
    return changed


def _left_out(tokenizer: Tokenizer) -> str:
    """Returns the characters that an imported tokenizer changes."""
    return tokenizer.altered_characters if FAST_NAME in tokenizer.files else ""


def write_generation_config(reading: Reading, directory: Path) -> None:
    """Writes `generation_config.json` with every token that ends a text, behind `write_tokenizer`."""
    tokenizer, path = reading.tokenizer, directory / GENERATION_CONFIG_NAME
    stops = frozenset() if tokenizer is None else find_stop_ids(tokenizer, reading.learned)
    generation: dict[str, Any] = {**reading.ids, "do_sample": True, "temperature": 1.0, "top_k": 0}
    if tokenizer is not None and GENERATION_CONFIG_NAME in tokenizer.files:  # an imported tokenizer has the file
        generation = read_json(path)
        if isinstance(generation.get("eos_token_id"), list) and stops <= set(generation["eos_token_id"]):
            return
    first = [] if tokenizer is None or tokenizer.eos_id is None else [tokenizer.eos_id]
    ordered = [*first, *sorted(stops.difference(first))]
    if len(ordered) > 1:  # transformers stops at each of them
        generation["eos_token_id"] = ordered
    path.write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
