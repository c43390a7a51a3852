"""What many tests start from."""

from pathlib import Path

import pytest

from genesis.tokenizer.train import TokenizerOptions, train_tokenizer
from tests.data.corpora import make_documents, write_corpus


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a corpus of two sources with a real tokenizer of 320 ids."""
    text = "".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(200))
    model = train_tokenizer([text], TokenizerOptions(vocab_size=320), tmp_path_factory.mktemp("tokenizer"))
    return write_corpus(
        tmp_path_factory.mktemp("corpus"),
        {"web": make_documents(120, 12, seed=1), "code": make_documents(60, 12, seed=2)},
        {"web": make_documents(9, 6, seed=3)},
        weights={"web": 2, "code": 1},
        tokenizer=model.read_bytes(),
    )
