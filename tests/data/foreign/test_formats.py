"""Files that are not what they should be: each is refused in one line that says what to do."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from genesis.base.errors import UserError
from genesis.data.foreign.datatrove import read_datatrove
from genesis.data.foreign.find import FoundFile, find_token_files, read_token_file
from genesis.data.foreign.flat import read_flat
from genesis.data.foreign.huggingface import list_arrow_files, read_arrow
from genesis.data.foreign.megatron import read_megatron
from genesis.data.sources import SourceOptions, find_files, plan_spans, read_rows
from tests.data.foreign.files import (
    write_bin,
    write_dataset,
    write_datatrove_file,
    write_llmc,
    write_megatron,
    write_npy,
)

DOCUMENTS = [[2, 40, 41, 3], [2, 3], [2, *range(100, 160), 3], [2, 7, 3]]
NUM_TOKENS = 71

Damage = Callable[[Path], object]


def refused(read: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read()
    assert "\n" not in str(error.value)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def overwrite(path: Path, offset: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:offset] + data + old[offset + len(data) :])


# datatrove


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda ds: cut(ds, 140), r"a\.ds has 140 bytes, but its index lists 71 tokens"),
        (lambda ds: cut(Path(f"{ds}.index"), 30), r"a\.ds\.index has 30 bytes, not a multiple of 8"),
        (lambda ds: cut(Path(f"{ds}.index"), 24), r"a\.ds has 142 bytes, but its index lists 68 tokens"),
        (lambda ds: Path(f"{ds}.index").unlink(), r"a\.ds has no a\.ds\.index; tokenize with save_index"),
        (lambda ds: Path(f"{ds}.metadata").write_text("gpt2|4\n71"), "of 2 or 4 bytes, 4 by its metadata"),
        (lambda ds: Path(f"{ds}.metadata").write_text("gpt2\n71"), r"a\.ds\.metadata does not end its first line"),
        (lambda ds: ds.unlink(), r"a\.ds cannot be read"),
    ],
)
def test_a_datatrove_file_that_contradicts_itself_is_refused(tmp_path: Path, damage: Damage, message: str) -> None:
    path = write_datatrove_file(tmp_path / "a.ds", DOCUMENTS, 2)
    damage(path)
    refused(lambda: read_datatrove(path), message)


def test_a_datatrove_file_with_a_loss_mask_is_refused_by_name(tmp_path: Path) -> None:
    path = write_datatrove_file(tmp_path / "a.ds", DOCUMENTS, 2, loss=True)
    refused(lambda: read_datatrove(path), r"a\.ds\.loss masks the loss of some tokens")


@pytest.mark.parametrize("token_size", [2, 4])
def test_a_datatrove_file_without_metadata_tells_its_width_by_its_index(tmp_path: Path, token_size: int) -> None:
    path = write_datatrove_file(tmp_path / "a.ds", DOCUMENTS, token_size)
    Path(f"{path}.metadata").unlink()
    file = read_datatrove(path)
    assert (file.dtype, file.num_tokens) == (f"uint{8 * token_size}", NUM_TOKENS)


# Megatron


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda text: cut(text.with_suffix(".bin"), 140),
            r"text\.bin has 140 bytes, but text\.idx lists 71 tokens of 2",
        ),
        (lambda text: cut(text.with_suffix(".idx"), 100), r"text\.idx has 100 bytes, but its header requires 122"),
        (lambda text: cut(text.with_suffix(".idx"), 20), r"text\.idx is not an index of Megatron's"),
        (lambda text: overwrite(text.with_suffix(".idx"), 0, b"TNTIDX\0\0"), r"old format \(TNTIDX\)"),
        (lambda text: overwrite(text.with_suffix(".idx"), 0, b"RIFF"), "is not an index of Megatron's"),
        (
            lambda text: overwrite(text.with_suffix(".idx"), 9, b"\2"),
            "has version 2, but this version of genesis reads 1",
        ),
        (lambda text: overwrite(text.with_suffix(".idx"), 17, b"\6"), "of the type with code 6; convert them"),
        (lambda text: overwrite(text.with_suffix(".idx"), 34, b"\5"), "sequence 1 at byte 8, which is not the end"),
        (lambda text: overwrite(text.with_suffix(".idx"), 114, b"\3"), "documents that do not cover its 4 sequences"),
        (lambda text: text.with_suffix(".idx").unlink(), r"text\.idx cannot be read"),
    ],
)
def test_a_megatron_pair_that_contradicts_itself_is_refused(tmp_path: Path, damage: Damage, message: str) -> None:
    prefix = write_megatron(tmp_path / "text", DOCUMENTS)
    damage(prefix)
    refused(lambda: read_megatron(prefix.with_suffix(".bin")), message)


def test_a_multimodal_index_is_refused_by_name(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "text", DOCUMENTS)
    index = prefix.with_suffix(".idx")
    index.write_bytes(index.read_bytes() + bytes(len(DOCUMENTS)))
    refused(lambda: read_megatron(prefix.with_suffix(".bin")), "multimodal")


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_megatron_pair_is_found_by_either_name_or_its_prefix(tmp_path: Path, suffix: str) -> None:
    prefix = write_megatron(tmp_path / "text_document", DOCUMENTS)
    (found,) = find_token_files((f"{prefix}{suffix}",), "auto")
    assert (found.path, found.format) == (prefix.with_suffix(".bin"), "megatron")


# Flat files


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(4, np.float32), r"has the type <f4 \(float32\), but tokens must be little-endian integers"),
        (np.zeros(4, ">u2"), r"has the type >u2 \(uint16\)"),
        (np.zeros(4, bool), r"\(bool\)"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), "Fortran order"),
    ],
)
def test_a_npy_of_a_wrong_type_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    refused(lambda: read_flat(tmp_path / "a.npy", None), message)


def test_flat_files_that_are_cut_short_or_of_unknown_width_are_refused(tmp_path: Path) -> None:
    npy, llmc = write_npy(tmp_path / "a.npy", DOCUMENTS), write_llmc(tmp_path / "a.bin", DOCUMENTS, 20240520, "H")
    plain = write_bin(tmp_path / "b.bin", DOCUMENTS)
    assert read_flat(npy, None).num_tokens == read_flat(llmc, None).num_tokens == NUM_TOKENS
    refused(lambda: read_flat(plain, None), r"b\.bin has no header with the type of its tokens; give dtype")
    for path in (npy, llmc, plain):
        cut(path, path.stat().st_size - 1)
    refused(lambda: read_flat(npy, None), r"a\.npy has \d+ bytes, but its header requires \d+; it is truncated")
    refused(lambda: read_flat(llmc, None), r"a\.bin has 1165 bytes, but its header requires 1166; it is truncated")
    refused(lambda: read_flat(plain, "uint16"), r"b\.bin has 141 bytes, not a multiple of 2 \(uint16\)")
    npy.write_bytes(b"not numpy")
    refused(lambda: read_flat(npy, None), r"a\.npy is not a \.npy file")


def test_a_table_of_rows_is_read_as_its_rows_one_after_another(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    assert read_flat(tmp_path / "a.npy", None).num_tokens == 12


# Hugging Face


def test_a_dataset_without_usable_ids_is_refused(tmp_path: Path) -> None:
    saved = write_dataset(tmp_path / "dataset", DOCUMENTS, text=["a", "b", "c", "d"])
    (first, _) = list_arrow_files(saved)
    refused(lambda: read_arrow(first, "tokens"), r"has no column 'tokens'; columns of ids: input_ids; give one")
    refused(lambda: read_arrow(first, "text"), r"has string in 'text'; columns of ids: input_ids")
    table = pa.table({"text": ["a"]})
    write_stream(tmp_path / "text.arrow", table)
    refused(
        lambda: read_arrow(tmp_path / "text.arrow", "input_ids"),
        r"has no column 'input_ids' and no column of ids .*`genesis data prepare` tokenizes its text \(text\)",
    )


def test_rows_that_are_padded_masked_or_null_are_refused(tmp_path: Path) -> None:
    def one_file(name: str, **columns: list[list[int]]) -> Path:
        return list_arrow_files(write_dataset(tmp_path / name, DOCUMENTS, **columns))[-1]

    ones = [[1] * len(document) for document in DOCUMENTS]
    assert read_arrow(one_file("whole", attention_mask=ones, labels=DOCUMENTS), "input_ids").num_tokens == 65
    refused(
        lambda: read_arrow(one_file("padded", attention_mask=[*ones[:-1], [1, 1, 0]]), "input_ids"),
        "attention_mask is 0 for some ids: rows are padded",
    )
    refused(
        lambda: read_arrow(one_file("masked", labels=[*DOCUMENTS[:-1], [-100, 7, 3]]), "input_ids"),
        "labels is negative for some ids: their loss is masked",
    )
    for rows in ([[1, 2], None], [[1, None]]):
        write_stream(tmp_path / "null.arrow", pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}))
        refused(lambda: read_arrow(tmp_path / "null.arrow", "input_ids"), "rows or ids that are null")


def test_a_stream_that_is_cut_compressed_or_no_stream_is_refused(tmp_path: Path) -> None:
    path = list_arrow_files(write_dataset(tmp_path / "dataset", DOCUMENTS))[0]
    size = path.stat().st_size
    for num_bytes in (size - 8, *range(size - 10, -1, -100)):  # 8: the end of the stream alone
        cut(path, num_bytes)
        refused(lambda: read_arrow(path, "input_ids"), "is not an Arrow stream or is damaged")
    assert num_bytes < 100
    table = pa.table({"input_ids": pa.array([[1] * 5000], pa.list_(pa.int32()))})
    write_stream(tmp_path / "compressed.arrow", table, compression="zstd")
    refused(lambda: read_arrow(tmp_path / "compressed.arrow", "input_ids"), "is compressed")
    (tmp_path / "text.arrow").write_bytes(b"text, not arrow, and long enough to look like something")
    refused(lambda: read_arrow(tmp_path / "text.arrow", "input_ids"), "is not an Arrow stream or is damaged")


def test_a_dataset_of_several_splits_or_a_damaged_state_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "splits" / "train", DOCUMENTS)
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    refused(lambda: find_token_files((str(tmp_path / "splits"),), "auto"), r"holds the splits train, test; name one")
    state = tmp_path / "splits" / "train" / "state.json"
    for content, message in (("{", "is damaged"), ("{}", "names no data files")):
        state.write_text(content)
        refused(lambda: find_token_files((str(state.parent),), "auto"), message)
    state.unlink()
    refused(lambda: find_token_files((str(state.parent),), "auto"), r"has no file of tokens")


def test_large_lists_and_rows_of_a_sliced_table_are_located(tmp_path: Path) -> None:
    rows = pa.array(DOCUMENTS, pa.large_list(pa.int64()))
    write_stream(tmp_path / "a.arrow", pa.table({"ids": rows}).slice(1, 2))
    file = read_arrow(tmp_path / "a.arrow", "ids")
    found = np.memmap(file.path, "<i8", "r", file.runs[0].byte_offset, file.runs[0].num_tokens)
    assert found.tolist() == [*DOCUMENTS[1], *DOCUMENTS[2]]
    assert file.read_ends is not None
    assert next(file.read_ends()).tolist() == [2, 64]
    # Other writers of Arrow need not let the first row begin at the first value.
    data = (tmp_path / "a.arrow").read_bytes()
    place = data.index(struct.pack("<3q", 0, 2, 64))
    overwrite(tmp_path / "a.arrow", place, struct.pack("<3q", 1, 2, 64))
    shifted = read_arrow(tmp_path / "a.arrow", "ids")
    assert (shifted.runs[0].byte_offset, shifted.num_tokens) == (file.runs[0].byte_offset + 8, file.num_tokens - 1)
    assert shifted.read_ends is not None
    assert next(shifted.read_ends()).tolist() == [1, 63]


def write_stream(path: Path, table: pa.Table, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table)


def write_offsets(path: Path, rows: pa.Array, column: str, offsets: list[int]) -> None:
    """Writes two rows of 31 and 33 values, with other offsets."""
    write_stream(path, pa.table({column: rows}))
    overwrite(path, path.read_bytes().index(struct.pack("<3i", 0, 31, 64)), struct.pack("<3i", *offsets))


@pytest.mark.parametrize("offsets", [[0, 2**30, 2**31 - 1], [0, 64, 3], [-(2**31), 0, 64], [2**30] * 3])
def test_arrow_offsets_that_lead_elsewhere_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    path = tmp_path / "a.arrow"
    write_offsets(path, pa.array([[1] * 31, [1] * 33], pa.list_(pa.int32())), "input_ids", offsets)
    refused(lambda: read_arrow(path, "input_ids"), r"a\.arrow is not an Arrow stream or is damaged")
    write_offsets(path, pa.array(["a" * 31, "a" * 33]), "text", offsets)
    source = SourceOptions("a", (str(path),))

    def read() -> list[object]:
        return [row for span in plan_spans(source, find_files(source), 1 << 20) for row in read_rows(source, span)]

    refused(read, r"a\.arrow")


# Directories


@pytest.mark.parametrize("name", ["../a.npy", "/etc/passwd", "/dev/zero", 5, "a\n"])
def test_a_dataset_whose_state_leads_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    refused(lambda: list_arrow_files(tmp_path), r"state\.json lists .* only a file below")


@pytest.mark.parametrize("text", ["[]", '{"_data_files": 5}', "[" * 100_000, '{"_data_files": [[]]}'])
def test_a_state_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    refused(lambda: list_arrow_files(tmp_path), "save the dataset again")
    (tmp_path / "dataset_dict.json").write_text(text.replace("_data_files", "splits"))
    refused(lambda: list_arrow_files(tmp_path), "save the dataset again|name one")


@pytest.mark.parametrize(
    "header", ["{'descr': '''", "{[]: 1}", "(" * 5000, "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"]
)
def test_a_header_of_numpy_that_is_none_is_refused(tmp_path: Path, header: str) -> None:
    data = header.encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x02\x00" + len(data).to_bytes(4, "little") + data + bytes(8))
    refused(lambda: read_token_file(FoundFile(tmp_path / "a.npy", "flat"), "", None), r"a\.npy ")


def test_a_document_before_the_first_sequence_is_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "text", DOCUMENTS)
    overwrite(path.with_suffix(".idx"), path.with_suffix(".idx").stat().st_size - 16, struct.pack("<q", -100))
    ends = read_megatron(path.with_suffix(".bin")).read_ends
    assert ends is not None
    refused(lambda: list(ends()), r"text\.idx has a document that begins before the first sequence")


def test_a_directory_of_several_formats_is_refused_until_one_is_named(tmp_path: Path) -> None:
    write_datatrove_file(tmp_path / "a" / "a.ds", DOCUMENTS, 2)
    write_megatron(tmp_path / "b" / "text", DOCUMENTS)
    write_npy(tmp_path / "c.npy", DOCUMENTS)
    refused(lambda: find_token_files((str(tmp_path),), "auto"), r"several formats \(1 datatrove, 1 flat, 1 megatron\)")
    (found,) = find_token_files((str(tmp_path),), "megatron")
    assert found.path == tmp_path / "b" / "text.bin"
    shutil.rmtree(tmp_path / "b")
    refused(lambda: find_token_files((str(tmp_path),), "megatron"), "has no file of megatron")


def test_paths_that_lead_to_nothing_or_tell_no_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.dat").write_bytes(struct.pack("<4H", 1, 2, 3, 4))
    refused(
        lambda: find_token_files((str(tmp_path / "nothing"),), "auto"),
        "no such file or directory: .*nothing; correct the path",
    )
    refused(
        lambda: find_token_files((str(tmp_path / "tokens.dat"),), "auto"), "the format of .* is unknown by its name"
    )
    (found,) = find_token_files((str(tmp_path / "tokens.dat"),), "flat")
    assert read_flat(found.path, "uint16").num_tokens == 4
