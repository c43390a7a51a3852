"""Shapes are compared before values are read, and values in pieces: a file may claim any size."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from genesis.base.errors import UserError
from genesis.huggingface import weights
from genesis.huggingface.directory import INDEX_NAME, WEIGHTS_NAME
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import iterate_pieces
from genesis_callbacks.base import untrusted
from tests.huggingface.test_directory import read_state, write_llama

EMBEDDING = "model.embed_tokens.weight"


def claim(directory: Path, name: str, shape: list[int]) -> None:
    """Gives a tensor another shape; the rest of the file are holes."""
    path = directory / WEIGHTS_NAME
    state = {own: tensor for own, tensor in load_file(path).items() if own != name}
    save_file(state, path)
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    end = len(data) - 8 - size
    num_bytes = 2 * int(torch.Size(shape).numel())
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + num_bytes]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    os.truncate(path, 8 + len(text) + end + num_bytes)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (EMBEDDING, [93_750_000, 32], "of which only"),
        (EMBEDDING, [900_000, 32], r"embed_tokens.weight is \[900000, 32\], but config.json requires \[90, 32\]"),
        ("model.layers.0.extra.weight", [900_000, 32], "'model.layers.0.extra.weight' is unknown"),
        ("model.layers.7.mlp.up_proj.weight", [900_000, 32], "layers.7.mlp.up_proj.weight is not a tensor"),
        ("model.norm.weight", [28_800_000], r"norm.weight is \[28800000\], but"),
    ],
)
def test_no_value_is_read_of_a_file_with_another_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: list[int], words: str
) -> None:
    write_llama(tmp_path)
    claim(tmp_path, name, shape)
    monkeypatch.setattr(untrusted, "HOLE_BYTES", 1 << 30)  # so that the smaller ones reach the comparison
    monkeypatch.setattr(weights, "iterate_pieces", lambda _: pytest.fail("a value was read"))
    with pytest.raises(UserError, match=words):
        read_state(tmp_path)


def test_the_number_of_values_is_known_before_the_first_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path)
    monkeypatch.setattr(weights, "iterate_pieces", lambda _: pytest.fail("a value was read"))
    family, config = read_shape(tmp_path)

    def refuse(num_values: int) -> None:
        raise UserError(f"{num_values} values")

    state = load_file(tmp_path / WEIGHTS_NAME)
    with pytest.raises(UserError, match=f"^{sum(tensor.numel() for tensor in state.values())} values$"):
        weights.read_weights(tmp_path, config, family, check_size=refuse)


def test_a_header_and_an_index_beyond_any_model_are_refused_unread(tmp_path: Path) -> None:
    write_llama(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    data = path.read_bytes()
    for num_bytes in (17 << 20, 2**62, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", num_bytes) + data[8:])
        with pytest.raises(UserError, match=f"has a header of {num_bytes:,} bytes: at most"):
            read_state(tmp_path)
    path.rename(tmp_path / "model-1.safetensors")
    (tmp_path / INDEX_NAME).write_bytes(b"{" + b" " * (65 << 20))
    with pytest.raises(UserError, match="has more than 67,108,864 bytes"):
        read_state(tmp_path)


def test_values_are_looked_at_in_pieces_whatever_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE_VALUES", 100)
    for shape in ((), (7,), (1_001,), (3, 500), (1, 1_001), (2, 3, 70), (0, 5)):
        tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
        pieces = list(iterate_pieces(tensor))
        assert max(piece.numel() for piece in pieces) <= 100
        assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), tensor.flatten())


def test_a_value_that_is_not_finite_is_found_in_the_last_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    state = load_file(tmp_path / WEIGHTS_NAME)
    state[EMBEDDING][-1, -1] = torch.inf
    save_file(state, tmp_path / WEIGHTS_NAME)
    monkeypatch.setattr(weights, "_PIECE_VALUES", 100)
    with pytest.raises(UserError, match=f"{EMBEDDING} has values that are NaN or infinite"):
        read_state(tmp_path)


def test_a_list_beyond_any_configuration_is_refused_before_a_library_reads_it(tmp_path: Path) -> None:
    write_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [[1] * 70_000]}))
    with pytest.raises(UserError, match=r"config.json has a list of 70,000 values; at most 65,536 are read"):
        read_shape(tmp_path)
