"""Weights that a trainer writes while the server runs."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from genesis.base.errors import UserError
from genesis.cli.serve import main
from genesis.generate.batch import Batch, Request
from genesis.generate.load import load_decoder
from genesis.generate.stream import derive_seed
from genesis.huggingface.directory import PROOF_NAME
from genesis.huggingface.peft import fingerprint, read_adapters
from genesis.huggingface.shape import find_names
from genesis.model.adapter import AdapterConfig, attach_adapters, init_adapters
from genesis.model.decoder import Decoder
from genesis.model.recipe import DECODER_PREFIX
from genesis.tokenizer.open import open_tokenizer
from genesis.train import served_weights
from genesis.train.served_weights import Texts, Weights, find_weights, remove_weights, write_weights
from genesis_callbacks.checkpoint import list_committed
from tests.mixtures import MIXTURES, mix
from tests.serve.support import Running, start
from tests.tiny_runs import build_decoder, save

TOKEN = "a-token-of-a-trainer"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
PROMPT = [1, 5, 9]


@pytest.fixture(scope="module")
def base(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, and a tokenizer."""
    directory = tmp_path_factory.mktemp("weights") / "base"
    shutil.copytree(run, directory, ignore=shutil.ignore_patterns("checkpoints"))
    save(directory / "checkpoints", 1, build_decoder(1), {})
    return directory


def load(server: Running, path: str, digest: str | None) -> tuple[int, Any]:
    status, content, _ = server.ask("/v1/load_weights", {"path": path, "digest": digest}, HEADERS)
    return status, content


def ask(server: Running, model: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "seed": 3, "logprobs": 0, "return_token_ids": True}
    status, content, _ = server.ask("/v1/completions", body | fields, HEADERS)
    return status, content


def alone(decoder: Decoder, seed: int, stop_ids: frozenset[int]) -> tuple[list[int], list[float]]:
    """Returns the tokens that the decoder itself samples, with their log-probabilities."""
    batch = Batch(decoder, 1, stop_ids, has_blocks=True)
    batch.add(Request(PROMPT, 6, seed=derive_seed(seed, PROMPT, 0)))
    tokens = []
    while found := batch.step():
        tokens += found
    return [token.id for token in tokens], [token.log_prob for token in tokens]


@pytest.mark.slow
def test_loaded_weights_answer_as_the_model_that_was_written(base: Path, tmp_path: Path) -> None:
    texts = Texts(open_tokenizer(base), None)
    adapter = AdapterConfig(rank=2, alpha=4.0)
    whole, adapted = build_decoder(2), build_decoder(1)
    attach_adapters(adapted, adapter)
    init_adapters(adapted, 5)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    first = write_weights(tmp_path, 3, whole, None, texts)
    second = write_weights(tmp_path, 6, adapted.eval(), adapter, texts)
    assert write_weights(tmp_path, 3, whole, None, texts) == first
    assert first.name == f"{3:010d}-{str(first.digest)[:32]}"
    with start(base, "--weights", tmp_path, GENESIS_TOKEN=TOKEN) as server:
        for written, decoder in ((first, whole), (second, adapted)):
            assert ask(server, written.name)[0] == 404
            status, content = load(server, *written)
            assert (status, content["id"], content["digest"]) == (200, *written)
            status, content = ask(server, written.name)
            assert (status, content["model"]) == (200, written.name)
            (choice,) = content["choices"]
            ids, log_probs = alone(decoder, 3, open_tokenizer(base).stop_ids)
            assert choice["token_ids"] == ids
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(log_probs, abs=1e-5)
        assert ask(server, first.name, echo=True)[1]["error"]["message"] == (
            "return_token_ids gives the new tokens alone: remove echo"
        )
        shutil.rmtree(tmp_path / first.name)
        assert ask(server, first.name)[0] == 404


@pytest.mark.slow
def test_only_directories_below_the_one_of_weights_are_loaded(base: Path, tmp_path: Path) -> None:
    texts, weights = Texts(open_tokenizer(base), None), tmp_path / "weights"
    written = write_weights(weights, 3, build_decoder(2), None, texts)
    outside = write_weights(tmp_path / "elsewhere", 3, build_decoder(2), None, texts)
    (weights / "link").symlink_to(tmp_path / "elsewhere" / outside.name)
    shutil.copytree(weights / written.name, weights / "damaged")
    with (weights / "damaged" / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\1\2\3")
    with start(base, "--weights", weights, GENESIS_TOKEN=TOKEN) as server:
        for path in (f"../elsewhere/{outside.name}", str(tmp_path / "elsewhere" / outside.name), "link", ".", "none"):
            status, content = load(server, path, written.digest)
            assert status == 400, path
            assert content["error"]["message"].startswith(f"no weights {path[:100]!r} in the server's --weights")
        status, content = load(server, written.name, "0" * 64)
        assert (status, content["error"]["param"]) == (400, "digest")
        status, content = load(server, "damaged", written.digest)
        assert status == 500
        assert "has changed since it was proved" in content["error"]["message"]
        assert load(server, written.name, None)[1]["error"]["param"] == "digest"
        body = {"path": written.name, "digest": written.digest}
        assert server.ask("/v1/load_weights", body, {"Authorization": "Bearer wrong"})[0] == 401


@pytest.mark.slow
def test_weights_need_an_option_and_a_token(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENESIS_TOKEN", raising=False)
    with pytest.raises(
        UserError, match="--weights lets a trainer load weights below a directory, and there is no token"
    ):
        main([str(base), "--weights", str(tmp_path)])
    monkeypatch.setenv("GENESIS_TOKEN", TOKEN)
    with pytest.raises(UserError, match="and there is no such directory: "):
        main([str(base), "--weights", str(tmp_path / "none")])
    with start(base, GENESIS_TOKEN=TOKEN) as server:
        status, content = load(server, "anything", "0")
    assert status == 403
    assert "start it with --weights DIR" in content["error"]["message"]


@pytest.mark.parametrize("mixture", [None, *MIXTURES])
def test_weights_are_read_as_they_were_written(base: Path, tmp_path: Path, mixture: str | None) -> None:
    config = build_decoder(1).config if mixture is None else mix(build_decoder(1).config, mixture)
    decoder = Decoder(config)
    decoder.init_weights(4)
    written = write_weights(tmp_path, 1, decoder, None, Texts(open_tokenizer(base), None))
    assert isinstance(written, Weights)
    assert (tmp_path / written.name / PROOF_NAME).is_file()
    found = load_decoder(tmp_path / written.name).decoder.state_dict()
    expected = decoder.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == [written.name]


def test_weights_replace_those_of_their_name_and_go_at_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(open_tokenizer(base), None)
    written = write_weights(tmp_path, 1, build_decoder(2), None, texts)
    path = tmp_path / written.name / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"damaged")
    assert write_weights(tmp_path, 1, build_decoder(2), None, texts) == written
    assert path.read_bytes() == whole
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # as if it was killed there
    remove_weights(tmp_path, 2)
    assert find_weights(tmp_path, written.name) is None
    monkeypatch.undo()
    remove_weights(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_adapters_name_their_base(base: Path, tmp_path: Path) -> None:
    adapter, decoder = AdapterConfig(rank=2, alpha=4.0), build_decoder(1)
    attach_adapters(decoder, adapter)
    init_adapters(decoder, 5)
    ((_, manifest),) = list_committed(base)
    written = write_weights(tmp_path, 1, decoder, adapter, Texts(open_tokenizer(base), None), base=manifest)
    shapes = {name: tuple(one.shape) for name, one in decoder.named_parameters() if "lora" in name}
    read = partial(read_adapters, tmp_path / written.name, adapter, find_names(decoder.config), shapes=shapes)
    assert read(base_fingerprint=fingerprint(manifest, DECODER_PREFIX)).keys() == shapes.keys()
    with pytest.raises(UserError, match=r"were trained beside a base with fingerprint .* \(not in NF4\)"):
        read(base_fingerprint="0" * 64)


def test_a_full_disk_is_an_error_of_the_system(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(served_weights, "save_file", fail)
    with pytest.raises(OSError, match=r"model.safetensors cannot be written: I/O error: No space left on device"):
        write_weights(tmp_path, 1, build_decoder(2), None, Texts(open_tokenizer(base), None))
