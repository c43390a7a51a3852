"""Writes the card of a release: the export's card with repository, version, licence and the results of the proof."""

import re
from typing import Any, Final

import yaml
from huggingface_hub import ModelCard, ModelCardData

from genesis.base.errors import UserError, numbered
from genesis.export.card import PLACE
from genesis.export.proof import UNPROVED_TOKENIZER
from genesis.operations.release.folder import SUMS_NAME
from genesis.operations.release.options import OTHER, ReleaseOptions

LICENSE_NAME: Final = "LICENSE"


def write_release_card(text: str, proof: dict[str, Any], options: ReleaseOptions) -> str:
    """Returns the text of `README.md`, with a head that `huggingface_hub` reads.

    Args:
        text: The export's card.
        proof: The export's proof.
        options: The options of the release.

    Raises:
        UserError: The head of the export's card is invalid.
    """
    card, data = _parse(text)
    data.license = options.license
    if options.license == OTHER:
        data.license_name, data.license_link = f"{options.name.lower()}-license", LICENSE_NAME
    if options.languages:
        data.language = list(options.languages)
    if data.eval_results:
        data.model_name = options.name
    body = re.sub(r"\A\s*# .*", f"# {options.name}", card.text, count=1)
    body = body.replace(f'"{PLACE}"', f'"{options.repo}", revision="{options.tag}"')
    opening, heading, rest = body.partition("\n## ")
    sections = "\n\n".join((opening.rstrip(), _describe_release(options), _describe_proof(proof)))
    card.text = f"\n{sections}\n{heading}{rest}"
    written = str(card)
    _parse(written)
    return written


def _parse(text: str) -> tuple[ModelCard, ModelCardData]:
    try:
        card = ModelCard(text)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"the head of the export's card is invalid: {' '.join(str(error).split())}") from None
    assert isinstance(card.data, ModelCardData)
    return card, card.data


def _describe_release(options: ReleaseOptions) -> str:
    text = f" Its text is in `{LICENSE_NAME}`." if options.license_file else ""
    return (
        f"## Release\nVersion {options.version}, tag `{options.tag}`, under the licence `{options.license}`.{text} "
        f"`sha256sum --check {SUMS_NAME}` compares every file."
    )


def _describe_proof(proof: dict[str, Any]) -> str:
    """Returns the comparisons of `genesis export` with the checkpoint, one line for each kind."""
    lines = [f"- weights: {numbered(proof['weights']['num_values'], 'values')}, each bit for bit"]
    if tokenizer := proof.get("tokenizer"):
        lines.append(f"- tokenizer: {numbered(sum(tokenizer['num_texts'].values()), 'texts')}, ids and decoded text")
    if proof.get("tokenizer_origin") == "unproved":
        lines.append(f"- unproved: {UNPROVED_TOKENIZER}")
    if logits := proof.get("logits"):
        lines.append(
            f"- logits of {numbered(logits['num_tokens'], 'tokens')}: differ by at most "
            f"{logits['largest_difference']:.2g}; the largest is {logits['largest_logit']:.3g}"
        )
    if generation := proof.get("generation"):
        lines.append(
            f"- greedy text: {generation['num_equal']} of {numbered(generation['num_tokens'], 'tokens')} equal"
        )
    head = "## Proof\nCompared with the checkpoint, by a process that loaded these files with transformers "
    return f"{head}(`proof.json`):\n\n" + "\n".join(lines)
