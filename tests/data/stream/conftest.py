from pathlib import Path

import pytest

from tests.data.stream.streams import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the model file of a real tokenizer of 320 ids."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
