"""The reward of configs/finetune/gspo-tiny.yaml: an answer of the kind of characters that the prompt asks for."""

KINDS = {"digits": "0123456789", "letters": "abcdefghijklmnopqrstuvwxyz"}


def score_kind(messages: list[dict[str, str]], text: str, columns: dict[str, str]) -> float:
    """Returns the share of characters that are of the wanted kind."""
    return sum(character in KINDS[columns["kind"]] for character in text) / len(text) if text else 0.0
