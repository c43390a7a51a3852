"""Property tests: the readers of what strangers wrote give a value or a `UserError`, whatever the bytes are."""

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.data.foreign.find import ForeignFormat, FoundFile, read_token_file
from genesis.data.manifest import read_manifest as read_corpus_manifest
from genesis.huggingface import peft
from genesis.huggingface.directory import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from genesis.huggingface.llama import LLAMA
from genesis.huggingface.shape import read_shape
from genesis.huggingface.weights import read_index, read_weights
from genesis.model.decoder import DecoderConfig
from genesis.operations.mirror.listing import decode_listing
from genesis.serve.request import parse_chat, parse_completion, parse_score
from genesis.tokenizer.huggingface import HuggingFaceTokenizer
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.base.manifest import decode_manifest
from tests.chat.support import write_tokenizer

MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
ALIEN = "\x1b[2J\u202e\u2028\r\n\x00"
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**400, 1e308, ALIEN, "x" * 5000, "../../x", "/dev/zero"])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CONFIG = DecoderConfig(dim=8, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=11, max_seq_len=16, ffn_dim=12)
SHAPE = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
SHAPE |= {"intermediate_size": 12, "max_position_embeddings": 16}
TENSOR = {"dtype": "F32", "shape": [11, 8], "data_offsets": [0, 352]}
PEFT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
PEFT_TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BODIES: tuple[dict[str, Any], ...] = (
    {"model": "a", "prompt": "b", "stop": ["c"]},
    {"model": "a", "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]},
    {"model": "a", "text_1": ["b", "c"], "text_2": ["d", "e"]},
)


IDS = st.none() | st.integers(-3, 5) | st.sampled_from([300_000, 10**400, ALIEN, "x" * 5000]) | st.text(max_size=8)


@st.composite
def changed(draw: st.DrawFn, sound: Any, values: st.SearchStrategy[Any] = VALUES) -> bytes:
    """Draws the bytes of a JSON document in which values and keys are replaced, or any bytes."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
    content = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        place, key = content, None
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or draw(st.booleans()):
                break
            place = place[key]
        if key is None or not place:
            break
        if isinstance(place, dict) and draw(st.booleans()):
            place[draw(st.sampled_from(["", ALIEN, "extra"]))] = place.pop(key)
        else:
            place[key] = draw(values)
    data = json.dumps(content).encode()
    return draw(st.sampled_from([data, data, data[: len(data) // 2], b"[" * 100_000, data[:-1] + b',"a":1,"a":2}']))


def check(read: Callable[[], Any]) -> None:
    """Calls a reader; anything but a value or an error of one short line fails the test."""
    try:
        read()
    except UserError as error:
        text = str(error)
        assert text.isprintable()
        assert len(text) <= 2100


@MANY
@given(
    header=changed({"model.embed_tokens.weight": TENSOR, "__metadata__": {"format": "pt"}}), claimed=st.none() | VALUES
)
def test_any_header_of_weights(header: bytes, claimed: Any, tmp_path: Path) -> None:
    length = claimed if isinstance(claimed, int) and 0 <= claimed < 2**64 else len(header)
    (tmp_path / WEIGHTS_NAME).write_bytes(length.to_bytes(8, "little") + header + bytes(352))
    check(lambda: read_weights(tmp_path, CONFIG, LLAMA))


@MANY
@given(data=changed({"metadata": {"total_size": 352}, "weight_map": {"model.embed_tokens.weight": "a.safetensors"}}))
def test_any_index_of_weights(data: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_bytes(data)
    check(lambda: read_index(tmp_path))
    check(lambda: read_weights(tmp_path, CONFIG, LLAMA))


@MANY
@given(data=changed(SHAPE))
def test_any_shape_of_a_model(data: bytes, tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_bytes(data)
    check(lambda: read_shape(tmp_path))


@MANY
@given(data=st.data())
def test_any_manifest_of_a_checkpoint(data: st.DataObject, checkpoint: Path) -> None:
    manifest = data.draw(changed(json.loads((checkpoint / "manifest.json").read_bytes())))
    check(lambda: decode_manifest(manifest))
    marker = f"blake3:{blake3.blake3(manifest).hexdigest()}"
    check(lambda: decode_listing(marker, manifest, "a mirror"))


@MANY
@given(data=st.data())
def test_any_manifest_of_a_corpus(data: st.DataObject, tiny_corpus: Path, tmp_path: Path) -> None:
    manifest = data.draw(changed(json.loads((tiny_corpus / "manifest.json").read_bytes())))
    (tmp_path / "manifest.json").write_bytes(manifest)
    check(lambda: read_corpus_manifest(tmp_path))


def read_tokens(path: Path, kind: ForeignFormat) -> None:
    read_ends = read_token_file(FoundFile(path, kind), "input_ids", None).read_ends
    assert read_ends is not None
    for _ in read_ends():
        pass


@MANY
@given(
    sizes=st.lists(st.integers(-2, 5) | st.sampled_from([2**31 - 1, -(2**31)]), max_size=4),
    places=st.lists(st.integers(-2, 12) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=8),
    counts=st.none() | st.tuples(*[st.sampled_from([0, 1, 4, 255]), *[st.integers(0, 5) | st.just(2**64 - 1)] * 2]),
    tail=st.binary(max_size=9),
)
def test_any_index_of_tokens(
    sizes: list[int], places: list[int], counts: tuple[int, int, int] | None, tail: bytes, tmp_path: Path
) -> None:
    """A stream of tokens of other tools: an index of Megatron's, and datatrove's ends of documents."""
    (tmp_path / "a.bin").write_bytes(bytes(2 * sum(size for size in sizes if 0 < size < 9)))
    code, *claimed = counts or (8, len(sizes), len(places) - len(sizes))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, *(max(0, count) for count in claimed))
    array = np.array(sizes, "<i4").tobytes() + np.array(places, "<i8").tobytes()
    (tmp_path / "a.idx").write_bytes(head + array + tail)
    check(lambda: read_tokens(tmp_path / "a.bin", "megatron"))
    (tmp_path / "a.bin").rename(tmp_path / "a.ds")
    (tmp_path / "a.ds.index").write_bytes(np.array(places, "<i8").tobytes() + tail)
    (tmp_path / "a.ds.metadata").write_bytes(b"a|2\n" if len(tail) % 2 else tail)
    check(lambda: read_tokens(tmp_path / "a.ds", "datatrove"))


@MANY
@given(config=changed(PEFT), header=changed({PEFT_TENSOR: TENSOR}))
def test_any_file_of_an_adapter(config: bytes, header: bytes, tmp_path: Path) -> None:
    (tmp_path / peft.CONFIG_NAME).write_bytes(config)
    (tmp_path / peft.WEIGHTS_NAME).write_bytes(len(header).to_bytes(8, "little") + header + bytes(352))
    check(lambda: peft.read_peft_config(tmp_path, LLAMA))


@MANY
@given(data=st.data())
def test_any_body_of_a_request(data: st.DataObject) -> None:
    sound = data.draw(st.sampled_from(BODIES))
    body = data.draw(changed(sound))
    check(lambda: parse_completion(body, 8))
    check(lambda: parse_chat(body, 8))
    check(lambda: parse_score(body))


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return dict(open_tokenizer(directory).files)


@settings(MANY, max_examples=30)
@given(data=st.data())
def test_any_file_of_a_tokenizer(data: st.DataObject, tokenizer_files: dict[str, bytes], tmp_path: Path) -> None:
    name = data.draw(st.sampled_from(sorted(tokenizer_files)))
    sound = json.loads(tokenizer_files[name]) if name.endswith(".json") else {}
    for other, content in tokenizer_files.items():
        (tmp_path / other).write_bytes(data.draw(changed(sound, IDS)) if other == name else content)
    check(lambda: open_tokenizer(tmp_path))


def test_the_change_that_gives_sound_bytes_is_read(tokenizer_files: dict[str, bytes]) -> None:
    """Without it the tests above would pass if everything was refused."""
    assert HuggingFaceTokenizer(tokenizer_files).vocab_size > 256
    assert parse_completion(json.dumps(BODIES[0]).encode(), 8).model == "a"
    assert parse_chat(json.dumps(BODIES[1]).encode(), 8).is_chat
    assert parse_score(json.dumps(BODIES[2]).encode()).is_score
