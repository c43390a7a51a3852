"""Recognises what is no text by how it begins: compressed and binary files, and text in other encodings."""

import re
from typing import Final

_DECOMPRESS: Final = "decompress it, or compress it with gzip or Zstandard and name it .gz or .zst"
_EXTRACT: Final = "extract its files and give their paths"
_EXPORT: Final = "save its text as .txt or .jsonl, and give that file"
_RENAME: Final = "name it {0}, or set format: {1}"
_WEIGHTS: Final = "a model's weights are not text: remove the path"
_MEDIA: Final = "it has no text that can be read: remove the path"

_MAGIC: Final[tuple[tuple[int, bytes, str, str], ...]] = (
    (0, b"\x1f\x8b", "compressed with gzip", "name it .gz"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with Zstandard", "name it .zst"),
    (0, b"\xfd7zXZ\0", "compressed with xz", _DECOMPRESS),
    (0, b"BZh", "compressed with bzip2", _DECOMPRESS),
    (0, b"\x04\x22\x4d\x18", "compressed with LZ4", _DECOMPRESS),
    (0, b"\xff\x06\0\0sNaPpY", "compressed with Snappy", _DECOMPRESS),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _EXTRACT),
    (0, b"Rar!\x1a\x07", "a RAR archive", _EXTRACT),
    (257, b"ustar", "a tar archive", _EXTRACT),
    (0, b"PK\x05\x06", "an empty zip archive", _EXTRACT),
    (0, b"%PDF-", "a PDF document", _EXPORT),
    (0, b"{\\rtf", "an RTF document", _EXPORT),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an old Office program (.doc, .xls)", _EXPORT),
    (0, b"PAR1", "a Parquet file", _RENAME.format(".parquet", "parquet")),
    (0, b"ARROW1\0\0", "an Arrow file (Feather)", _RENAME.format(".arrow", "arrow")),
    (0, b"\xff\xff\xff\xff", "an Arrow stream", _RENAME.format(".arrow", "arrow")),
    (0, b"ORC", "an ORC table", "write it as Parquet"),
    (0, b"Obj\x01", "an Avro file", "write it as Parquet"),
    (0, b"SQLite format 3\0", "an SQLite database", "write its table as Parquet, CSV or JSON lines"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", "write its text as JSON lines"),
    (0, b"\x93NUMPY", "a NumPy array", "for tokens see `genesis data adopt`; for text write JSON lines"),
    (0, b"GGUF", "GGUF", _WEIGHTS),
    (0, b"\x89PNG\r\n", "a PNG image", _MEDIA),
    (0, b"\xff\xd8\xff", "a JPEG image", _MEDIA),
    (0, b"GIF8", "a GIF image", _MEDIA),
    (0, b"II*\0", "a TIFF image", _MEDIA),
    (0, b"MM\0*", "a TIFF image", _MEDIA),
    (0, b"RIFF", "a WAV, WebP or AVI file", _MEDIA),
    (0, b"ID3", "an MP3 file", _MEDIA),
    (0, b"OggS", "an Ogg file", _MEDIA),
    (0, b"fLaC", "a FLAC file", _MEDIA),
    (4, b"ftyp", "an MP4 file", _MEDIA),
    (0, b"\x7fELF", "a program", _MEDIA),
    (0, b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS, not the file itself", "run `git lfs pull`"),
)
"""Offset, bytes, what the file is, and the remedy."""

_ZIP: Final = b"PK\x03\x04"
_ZIP_CONTENT: Final = (
    (b"word/", "a Word document (.docx)", _EXPORT),
    (b"xl/", "an Excel workbook (.xlsx)", "save its sheet as CSV"),
    (b"ppt/", "a PowerPoint presentation (.pptx)", _EXPORT),
    (b"mimetypeapplication/epub", "an EPUB book", _EXPORT),
    (b"mimetypeapplication/vnd.oasis", "an OpenDocument file", _EXPORT),
    (b"data.pkl", "a file of torch.save", _WEIGHTS),
    (b".npy", "a NumPy archive (.npz)", "write its text as JSON lines"),
)
_WORDS_OF_TEXT: Final = (
    b"ORC",
    b"ID3",
    b"BZh",
    b"RIFF",
    b"GIF8",
    b"GGUF",
    b"OggS",
    b"PAR1",
    b"Obj\x01",
    b"fLaC",
    b"ftyp",
)
"""Signatures that may also begin a text, so that a byte that text does not have must follow."""
_CONTROL: Final = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_HEAD_BYTES: Final = 4096
_MAX_HEADER_BYTES: Final = 100_000_000
_MIN_ZERO_SHARE: Final = 0.1
_MIN_CONTROL_SHARE: Final = 0.05  # compressed or random bytes have a tenth, text in any encoding hardly one
_MIN_WRONG_SHARE: Final = 0.1
"""Of bytes that are not UTF-8: random ones have four tenths, Western languages in one byte a character under one."""
_MIN_NOISE_BYTES: Final = 64
_UNICODE_MARKS: Final = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_CODE_PAGES: Final = ("gb18030", "big5", "shift_jis", "euc_jp", "euc_kr")


def find_binary(head: bytes) -> str | None:
    """Returns what a file is that begins with `head`, with a remedy; None if it may be text in UTF-8.

    Example:
        >>> find_binary(b"%PDF-1.7")
        'a PDF document; save its text as .txt or .jsonl, and give that file'
    """
    head = head[:_HEAD_BYTES]
    for mark, name in _UNICODE_MARKS:
        if head.startswith(mark):
            return f"text in {name}; {convert(name)}"
    if head.startswith(_ZIP):
        known = next(((what, remedy) for part, what, remedy in _ZIP_CONTENT if part in head), None)
        return "; ".join(known or ("a zip archive", _EXTRACT))
    for offset, mark, what, remedy in _MAGIC:
        if head.startswith(mark, offset) and (mark not in _WORDS_OF_TEXT or not _is_text(head)):
            return f"{what}; {remedy}"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"a pickle, as old versions of torch.save write; {_WEIGHTS}"
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") < _MAX_HEADER_BYTES:
        return f"safetensors; {_WEIGHTS}"
    return _find_zeros(head) or _find_noise(head)


def guess_encodings(data: bytes) -> str:
    """Returns by which encodings bytes that are not UTF-8 can be read, the most likely first, and a remedy."""
    runs = [len(run) for run in re.findall(rb"[\x80-\xff]+", data)]
    is_alone = runs.count(1) > sum(runs) / 2  # as letters with accents in western languages
    names = [name for name in _CODE_PAGES if not is_alone and _decodes(data, name)]
    if names:
        return f"it can be read as {' or '.join(names)}: {convert(names[0])}"
    if _decodes(data, "cp1252"):
        return f"it can be read as cp1252, or another encoding with one byte for each character: {convert('cp1252')}"
    return "fix it"


def convert(encoding: str) -> str:
    """Returns the remedy for a file in another encoding."""
    return f"convert the file by `iconv -f {encoding} -t UTF-8`"


def _decodes(data: bytes, encoding: str) -> bool:
    """Returns whether bytes are text in an encoding; one of several bytes must give characters of its language."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if error.reason != "incomplete multibyte sequence":
            return False
        text = data[: error.start].decode(encoding)
    if encoding == "cp1252":
        return True
    foreign = [character for character in text if character > "\x7f"]
    usual = sum("\u3000" <= character <= "\u9fff" or "\uac00" <= character <= "\ud7a3" for character in foreign)
    return bool(foreign) and usual > 0.7 * len(foreign)


def _is_text(head: bytes) -> bool:
    return _is_utf8(head) and _CONTROL.search(head) is None


def _is_utf8(head: bytes) -> bool:
    """Returns whether bytes are UTF-8, but for a last character that the end of the head cuts."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end >= len(head)
    return True


def _find_zeros(head: bytes) -> str | None:
    """Returns what a file is that has many zero bytes: UTF-16 without a mark, or no text."""
    num_zeros = head.count(0)
    if len(head) < 4 or num_zeros < _MIN_ZERO_SHARE * len(head):
        return None
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        if head[first::2].count(0) == num_zeros and num_zeros > 0.8 * len(head[first::2]):
            return f"text in {name}; {convert(name)}"
    return f"no text: {num_zeros:,} of its first {len(head):,} bytes are zero; remove the path, or restore the file"


def _find_noise(head: bytes) -> str | None:
    """Returns what a file is that is not UTF-8 and full of control characters, as data of any unknown format."""
    num_control = len(_CONTROL.findall(head))
    if len(head) < _MIN_NOISE_BYTES or num_control < _MIN_CONTROL_SHARE * len(head):
        return None
    # Text in one byte a character has some, and control characters that mark fields or bold letters.
    if head.decode(errors="replace").count("\ufffd") < _MIN_WRONG_SHARE * len(head):
        return None
    return (
        f"no text: it is not UTF-8, and {num_control:,} of its first {len(head):,} bytes are control characters; "
        "remove the path, or convert the file to UTF-8"
    )
