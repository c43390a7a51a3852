"""The tokenizer of bytes that lies beside the tests as an installed distribution, and text for it."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent / "plugin"
EOS, END_OF_TURN = 258, 259
WORDS = ("alpha", "beta\n", "\u00e9t\u00e9", " 12 ", "\n", "\n\n", "omega ")


@contextmanager
def installed() -> Iterator[None]:
    """Makes the distribution known to this process and to those that it starts, as an installation does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH")))))
        yield


def write_tokenizer(directory: Path, *, has_bos: bool = True, has_eos: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "alphabet.txt").write_bytes(b"bytes\n")
    (directory / "symbols.json").write_text(json.dumps({"has_bos": has_bos, "has_eos": has_eos}))
    return directory


def make_texts(num_texts: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [f"{number}:" + "".join(draw.choices(WORDS, k=draw.randrange(1, 25))) for number in range(num_texts)]
