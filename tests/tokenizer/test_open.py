"""Which tokenizer lies in a directory, and that nothing outside of the package knows its kind."""

import re
from pathlib import Path

import pytest

from genesis.base.errors import UserError
from genesis.tokenizer.files import hash_files, write_files
from genesis.tokenizer.open import build_tokenizer, has_tokenizer, open_tokenizer

SOURCES = Path(__file__).parents[2] / "genesis"


def test_nothing_outside_of_the_package_knows_the_kind_of_a_tokenizer() -> None:
    wrong = re.compile(r"(?i:sentencepiece)|tokenizer\.model\b|\bMODEL_NAME\b|piece_to_id|model_proto")
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if not path.is_relative_to(SOURCES / "tokenizer") and wrong.search(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_a_directory_without_a_tokenizer_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer: it has no tokenizer\.model \(SentencePiece\)") as error:
        open_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert not has_tokenizer(tmp_path, "")


def test_a_tokenizer_is_the_same_from_its_directory_its_file_and_its_contents(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(tokenizer_file.parent)
    other_name = tmp_path / "mine.spm"
    other_name.write_bytes(tokenizer_file.read_bytes())
    copies = (open_tokenizer(tokenizer_file), open_tokenizer(other_name), build_tokenizer(tokenizer.files))
    assert {copy.hash for copy in copies} == {tokenizer.hash}
    assert has_tokenizer(tokenizer_file.parent, tokenizer.hash)
    write_files(tokenizer.files, tmp_path)
    assert has_tokenizer(tmp_path, tokenizer.hash)


def test_the_hash_of_several_files_follows_from_names_and_contents() -> None:
    files = {"a": b"1", "b": b"2"}
    hashes = [hash_files(files), hash_files({"b": b"2", "a": b"1"}), hash_files({"a": b"2", "b": b"1"})]
    assert hashes[0] == hashes[1] != hashes[2]
    assert len({*hashes, hash_files({"a": b"1"}), hash_files({"a": b"1", "c": b"2"})}) == 4
