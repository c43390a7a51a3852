"""Reads flat files of tokens: numpy's `.npy`, and the `.bin` files of nanoGPT (no header) and llm.c (with a header).

Flat files have no index of documents: an end-of-document id marks the ends.
"""

import struct
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from genesis.base.errors import UserError
from genesis.data.foreign.token_file import TOKEN_DTYPES, TokenFile, file_size, one_run
from genesis_callbacks.base.untrusted import open_file

_LLMC_HEADER: Final = struct.Struct("<256i")
_LLMC_DTYPES: Final = {20240520: "uint16", 20240801: "uint32"}
"""Token types by magic number, the first number of the header; the third is the number of tokens."""


def read_flat(path: Path, dtype: str | None) -> TokenFile:
    """Returns the content of a `.npy` or `.bin` file.

    Args:
        path: The file.
        dtype: The type of tokens in a file without a header.

    Raises:
        UserError: The file is truncated, or the type of its tokens is unknown or not an integer.
    """
    return _read_npy(path) if path.suffix == ".npy" else _read_bin(path, dtype)


def _read_npy(path: Path) -> TokenFile:
    num_bytes = file_size(path)
    with open_file(path) as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, is_fortran, dtype = read_header(file)
        except ValueError as error:
            raise UserError(f"{path} is not a .npy file ({str(error).splitlines()[0]}); write it again") from None
        byte_offset = file.tell()
    if dtype.name not in TOKEN_DTYPES or dtype.byteorder == ">":
        wanted = "little-endian integers, preferably uint16 or uint32"
        raise UserError(f"{path} has the type {dtype.str} ({dtype.name}), but tokens must be {wanted}; convert it")
    if is_fortran and len(shape) > 1:
        raise UserError(f"{path} is stored in Fortran order; write it again in C order")
    return _with_header(path, num_bytes, byte_offset, prod(shape), dtype.name)


def _read_bin(path: Path, dtype: str | None) -> TokenFile:
    num_bytes = file_size(path)
    with open_file(path) as file:
        header = file.read(_LLMC_HEADER.size)
    if len(header) == _LLMC_HEADER.size:
        magic, _, num_tokens, *rest = _LLMC_HEADER.unpack(header)
        if magic in _LLMC_DTYPES and not any(rest):
            return _with_header(path, num_bytes, _LLMC_HEADER.size, num_tokens, _LLMC_DTYPES[magic])
    if dtype is None:
        raise UserError(
            f"{path} has no header with the type of its tokens; give dtype (uint16 for nanoGPT's, or uint32)"
        )
    item_bytes = np.dtype(dtype).itemsize
    if num_bytes % item_bytes:
        raise UserError(
            f"{path} has {num_bytes} bytes, not a multiple of {item_bytes} ({dtype}); correct dtype or the file"
        )
    return TokenFile(path, num_bytes, dtype, one_run(0, num_bytes // item_bytes), None)


def _with_header(path: Path, num_bytes: int, byte_offset: int, num_tokens: int, dtype: str) -> TokenFile:
    """Returns the content of a file with a header of `byte_offset` bytes, which gives the number of tokens."""
    expected_bytes = byte_offset + num_tokens * np.dtype(dtype).itemsize
    if num_bytes != expected_bytes:
        raise UserError(
            f"{path} has {num_bytes} bytes, but its header requires {expected_bytes}; it is truncated: copy it again"
        )
    return TokenFile(path, num_bytes, dtype, one_run(byte_offset, num_tokens), None)
