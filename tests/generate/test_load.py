"""An export is loaded as its checkpoint is, and refused where it is not what was proved."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from genesis.base.errors import UserError
from genesis.cli.generate import main
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.generate import load
from genesis.generate.checkpoint_reference import find_checkpoint
from genesis.generate.load import load_decoder
from genesis.model import delta_proof
from genesis.model.delta import GatedDeltaConfig
from genesis.model.device_proofs import list_mixer_proofs
from genesis_callbacks.checkpoint.device_proof import DeviceProof
from tests.tiny_runs import build_decoder, save


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "model")
    return tmp_path / "model"


def test_an_export_gives_the_decoder_and_the_tokenizer_of_its_checkpoint(exported: Path, checkpoint: Path) -> None:
    ours, theirs = load_decoder(checkpoint), load_decoder(exported)
    before, after = ours.decoder.state_dict(), theirs.decoder.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert theirs.decoder.config == ours.decoder.config
    assert not theirs.decoder.training
    assert theirs.tokenizer.hash == ours.tokenizer.hash
    assert theirs.checkpoint == exported


def test_the_command_writes_the_same_text_from_either(
    exported: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for path in (exported, checkpoint):
        assert main([str(path), "--prompt", "class alpha", "--max_new_tokens", "30", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("class alpha\n")


def test_a_card_may_be_written_in(copy: Path) -> None:
    (copy / "README.md").write_text("mine")
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")
    load_decoder(copy)


def flip_weights(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def turn_faster(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(path.read_text().replace("500000.0", "500001.0"))


def drop_weights(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[0].unlink()


def add_weights(directory: Path) -> None:
    shutil.copy(sorted(directory.glob("*.safetensors"))[0], directory / "model.safetensors")


def drop_proof(directory: Path) -> None:
    (directory / "proof.json").unlink()


def age_proof(directory: Path) -> None:
    proof = json.loads((directory / "proof.json").read_bytes())
    del proof["files"]
    (directory / "proof.json").write_text(json.dumps(proof))


def leave_the_directory(directory: Path) -> None:
    proof = json.loads((directory / "proof.json").read_bytes())
    proof["files"]["../elsewhere"] = {"num_bytes": 0, "sha256": ""}
    (directory / "proof.json").write_text(json.dumps(proof))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_weights, r"model-\d{5}-of-\d{5}\.safetensors has changed since it was proved; export"),
        (turn_faster, r"config\.json has changed since"),
        (drop_weights, r"has no file model-00001-of-\d{5}\.safetensors, which proof\.json lists"),
        (add_weights, r"model\.safetensors did not exist when the export was proved"),
        (drop_proof, r"has no proof\.json.*`genesis import`"),
        (age_proof, r"has no hashes of files.*export the checkpoint again"),
        (leave_the_directory, "which leads upwards"),
    ],
)
def test_an_export_that_is_not_what_was_proved_is_refused(
    change: Callable[[Path], None], message: str, copy: Path
) -> None:
    load_decoder(copy)
    change(copy)
    with pytest.raises(UserError, match=message) as error:
        load_decoder(copy)
    assert "\n" not in str(error.value)


def test_another_tokenizer_than_the_exports_is_refused(exported: Path, tiny_corpus: Path) -> None:
    load_decoder(exported, exported / "tokenizer.model")
    with pytest.raises(UserError, match=f"{re.escape(str(tiny_corpus))} holds tokenizer .* was trained with"):
        load_decoder(exported, tiny_corpus)


def test_what_needs_a_checkpoint_says_that_an_export_is_none(exported: Path) -> None:
    with pytest.raises(UserError, match="is an export, not a checkpoint; convert it with `genesis import`"):
        find_checkpoint(exported)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn_dim": 2**62}, "does not match the decoder in its recipe"),
        ({"num_layers": 10**9}, "has a recipe of 1,000,000,000 layers, but 20 tensors"),
    ],
)
def test_a_recipe_that_claims_what_no_memory_holds_is_refused(
    change: dict[str, int], message: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, build_decoder(1), {}, **change)
    with pytest.raises(UserError, match=message):
        load_decoder(path)
    with pytest.raises(UserError, match=message):
        export_checkpoints([path], tmp_path / "out", ExportOptions(layout="safetensors"))


def test_a_kernel_that_fails_its_proof_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError(f"wrong on {device}\nwith a second line")

    distrusted: list[torch.device] = []
    monkeypatch.setattr(
        load, "TORCH_ATTENTION_PROOF", DeviceProof("a", "fast", "slow", lambda device: None, distrusted.append)
    )
    monkeypatch.setattr(load, "CACHED_ATTENTION_PROOF", DeviceProof("b", "fast", "slow", fail, distrusted.append))
    with caplog.at_level(logging.WARNING):
        load._prove_attention.__wrapped__("cpu", has_flash=True)
    assert distrusted == [torch.device("cpu")]
    assert caplog.messages == ["cpu: slow instead of fast for attention: wrong on cpu"]


@pytest.mark.parametrize(("capability", "proved"), [((7, 5), []), ((9, 0), ["flash", "cached"])])
def test_kernels_of_attention_are_proved_once_and_on_cards_that_have_them(
    capability: tuple[int, int], proved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def build_proof(name: str) -> DeviceProof:
        return DeviceProof(name, "fast", "slow", lambda device: found.append(name))

    monkeypatch.setattr(load, "TORCH_ATTENTION_PROOF", build_proof("flash"))
    monkeypatch.setattr(load, "CACHED_ATTENTION_PROOF", build_proof("cached"))
    monkeypatch.setattr(load, "read_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    load._prove_attention.cache_clear()
    load.prepare_device(torch.device("cuda"))
    load.prepare_device(torch.device("cuda"))
    load._prove_attention.cache_clear()
    assert found == proved


def test_the_kernels_of_linear_layers_are_asked_for_with_the_model_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        load,
        "prepare_kernels",
        lambda config, device: asked.append(([proof.name for proof in list_mixer_proofs(config)], device.type)),
    )
    monkeypatch.setattr(delta_proof, "find_version", lambda: "1.2.3")
    run = save(tmp_path, 1, build_decoder(1), {})
    load_decoder(run)
    linear = GatedDeltaConfig(1, 2, 8, 8, attention_every=2)
    decoder = build_decoder(1, linear_attention=linear)
    load_decoder(save(tmp_path / "linear", 1, decoder, {}, linear_attention=asdict(linear)))
    assert asked == [([], "cpu"), (["linear_attention"], "cpu")]
