"""Which kernels of linear layers a fit has proved is in the manifest of its checkpoints."""

import json
from pathlib import Path
from typing import Final

import pytest

from genesis.model import delta_kernel, delta_proof
from genesis_callbacks.checkpoint import device_proof, read_manifest
from tests.cli.conftest import Genesis
from tests.model.test_device_proofs import Kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernels:
    """An installed package, on a CPU whose proofs run as those of an accelerator do."""
    kernels = Kernels()
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(tmp_path / "cache"))
    for module in (delta_kernel, delta_proof):
        monkeypatch.setattr(module, "find_version", lambda: "1.2.3")
    monkeypatch.setattr(delta_kernel, "import_module", lambda name: kernels)
    monkeypatch.setattr(delta_kernel, "_distrusted_devices", set())
    monkeypatch.setattr(device_proof, "is_host", lambda device: False)
    # What saves need of a device is no matter here.
    for name in ("_prove_digests", "_prove_copies"):
        monkeypatch.setattr(device_proof, name, lambda device: None)
    return kernels


LINEAR: Final = {"num_key_heads": 1, "num_value_heads": 2, "key_dim": 8, "value_dim": 8, "attention_every": 2}


def fit(genesis: Genesis, recipe: Path, *, is_linear: bool = True) -> str | None:
    """Returns what the manifest of a fit's last checkpoint has about linear layers."""
    arguments = [f"--model.decoder.linear_attention={json.dumps(LINEAR)}"] if is_linear else []
    outcome = genesis("fit", "--config", str(recipe), *arguments)
    assert outcome.status == 0, outcome.err
    return read_manifest(recipe.parent / "run/checkpoints/step-00000004").versions.get("device.linear_attention")


def test_a_model_without_linear_layers_starts_without_their_proof(
    genesis: Genesis, recipe: Path, kernels: Kernels
) -> None:
    kernels.factor = 1.5  # a proof would fail
    assert fit(genesis, recipe, is_linear=False) is None
    assert kernels.names == []


@pytest.mark.usefixtures("kernels")
def test_the_manifest_has_the_version_of_the_kernels_whose_proof_held(genesis: Genesis, recipe: Path) -> None:
    assert fit(genesis, recipe) == "flash-linear-attention 1.2.3"
    assert delta_kernel._distrusted_devices == set()


def test_the_manifest_has_chunks_where_the_proof_of_the_kernels_failed(
    genesis: Genesis, recipe: Path, kernels: Kernels
) -> None:
    kernels.factor = 1.5
    with pytest.warns(UserWarning, match="chunks instead of flash-linear-attention 1.2.3"):
        assert fit(genesis, recipe) == "chunks"
    assert delta_kernel._distrusted_devices == {"cpu"}
