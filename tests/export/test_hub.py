"""`genesis import ORG/NAME` downloads what it needs from a Hub on loopback, and nothing of a model that it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from genesis.base.available_memory import available_memory
from genesis.base.errors import UserError
from genesis.cli.import_ import main as import_main
from genesis.cli.main import main
from genesis.export.hub import HubModel, download_model, read_hub_model
from genesis.huggingface.directory import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from genesis_callbacks.checkpoint import read_manifest, read_tensors
from tests.export.reading_hub import ReadingHub, serve_models
from tests.huggingface.test_directory import read_state, write_llama

NAME = "some-lab/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadingHub]:
    with serve_models() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    write_llama(tmp_path / "llama")
    return {path.name: path.read_bytes() for path in (tmp_path / "llama").iterdir()}


def _names(hub: ReadingHub) -> set[str]:
    return {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}


def test_only_what_transformers_would_load_is_downloaded(hub: ReadingHub, files: dict[str, bytes]) -> None:
    others = {"model.gguf": b"0", "consolidated.safetensors": b"0", "pytorch_model.bin": b"0", "onnx/model.json": b"{}"}
    hub.models[NAME] = {**files, **others, "README.md": b"# A model"}
    said: list[str] = []
    download = download_model(HubModel(NAME), said.append)
    assert {path.name for path in download.directory.iterdir()} == {*files} - {"README.md"}
    assert (download.repository, download.commit) == (NAME, hub.commit_of(NAME))
    assert len(said) == 1
    assert _names(hub).isdisjoint(name.rpartition("/")[2] for name in others)
    assert read_state(download.directory)["embedding.weight"].dtype == torch.bfloat16


@pytest.mark.slow
def test_an_import_names_repository_and_commit_in_its_proof(
    hub: ReadingHub, files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.models[NAME] = files
    out = tmp_path / "run"
    assert main(["import", f"{NAME}@main", str(out), "--no_tokenizer", "--proof", "weights"]) == 0
    printed = capsys.readouterr().out
    assert "logits and greedy text: not compared" in printed
    proof = json.loads((out / "proof.json").read_text())
    assert proof["source"] == {"repository": NAME, "commit": hub.commit_of(NAME)}
    assert "logits" not in proof
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "proof.json", "recipe.yaml"]
    checkpoint = out / "checkpoints/step-00000000"
    names = list(read_manifest(checkpoint).tensors)
    state = read_state(tmp_path / "llama")
    for name, tensor in read_tensors(checkpoint, names).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, state[name.removeprefix("model.decoder.")].float())


def test_a_model_that_the_decoder_cannot_represent_costs_its_configuration(
    hub: ReadingHub, files: dict[str, bytes]
) -> None:
    config = {**json.loads(files[CONFIG_NAME]), "model_type": "gpt2"}
    hub.models[NAME] = {**files, CONFIG_NAME: json.dumps(config).encode()}
    with pytest.raises(UserError, match="model_type is 'gpt2'"):
        download_model(HubModel(NAME), pytest.fail)
    assert _names(hub) == {CONFIG_NAME}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny.Q4_K_M.gguf", r"tiny.Q4_K_M.gguf is GGUF, which is not read: convert some-lab/tiny with transformers"),
        ("pytorch_model.bin", r"pytorch_model.bin is pickle, which is not read"),
        ("adapter_config.json", r"is an adapter \(adapter_config.json\), not a model"),
        ("notes.md", r"has neither model.safetensors nor model.safetensors.index.json; other formats"),
    ],
)
def test_a_repository_without_safetensors_is_refused_with_the_way_to_convert_it(
    name: str, message: str, hub: ReadingHub
) -> None:
    hub.models[NAME] = {name: b"{}"} if name == "adapter_config.json" else {name: b"{}", CONFIG_NAME: b"{}"}
    with pytest.raises(UserError, match=message):
        download_model(HubModel(NAME), pytest.fail)
    assert not _names(hub)


def test_an_index_cannot_lead_out_of_the_repository(hub: ReadingHub, files: dict[str, bytes]) -> None:
    index = json.dumps({"weight_map": {"model.embed_tokens.weight": "../../etc/passwd"}}).encode()
    hub.models[NAME] = {CONFIG_NAME: files[CONFIG_NAME], INDEX_NAME: index}
    with pytest.raises(UserError, match="leads upwards"):
        download_model(HubModel(NAME), pytest.fail)
    assert _names(hub) == {CONFIG_NAME, INDEX_NAME}


def test_what_the_hub_refuses_is_one_line_with_the_remedy(hub: ReadingHub, files: dict[str, bytes]) -> None:
    hub.models = {NAME: files, "some-lab/gated": files}
    hub.gated = {"some-lab/gated"}
    for model, message in (
        (HubModel("some-lab/none"), r"some-lab/none is neither a directory nor a model at http.*HF_TOKEN"),
        (HubModel(NAME, "v9"), r"some-lab/tiny has no revision v9: give a branch, a tag or a commit"),
        (HubModel("some-lab/gated"), r"its owner gives access on request.*hf auth login"),
    ):
        with pytest.raises(UserError, match=message) as error:
            download_model(model, pytest.fail)
        assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_one_line(hub: ReadingHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"no directory some-lab/tiny.*cannot be downloaded from http") as error:
        download_model(HubModel(NAME), pytest.fail)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["./model", "model", "/a/b", "../a/b", "a/b/c", "a/", "a/b@", ""])
def test_other_words_are_directories(text: str) -> None:
    assert read_hub_model(text) is None


def test_available_memory_is_a_plausible_number() -> None:
    available = available_memory()
    assert available is None or 0 < available < 1 << 50


def test_a_proof_that_needs_more_memory_than_there_is_is_refused_before_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "llama")
    monkeypatch.setattr("genesis.export.proof.available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"takes .* GB of memory, and 0.0 GB are available: .*--proof weights"):
        import_main([str(tmp_path / "llama"), str(tmp_path / "run"), "--no_tokenizer"])
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "llama" / WEIGHTS_NAME).exists()
