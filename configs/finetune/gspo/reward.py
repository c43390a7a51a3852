"""The reward of configs/finetune/gspo-tiny.yaml: an answer that begins with the wanted digits and a full stop."""


def score_format(messages: list[dict[str, str]], text: str, columns: dict[str, int]) -> float:
    """Returns the share of right characters; what follows the full stop does not count."""
    wanted = ["0123456789"] * columns["digits"] + ["."]
    return sum(character in allowed for character, allowed in zip(text, wanted, strict=False)) / len(wanted)
