"""Which kernels of linear layers a fit has proved is in the manifest of its checkpoints."""

from pathlib import Path

import pytest

from genesis.model import delta_kernel, device_proofs
from genesis_callbacks.checkpoint import device_proof, read_manifest
from tests.cli.conftest import Genesis
from tests.model.test_device_proofs import Kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """An installed package, on a CPU whose proofs run as those of an accelerator do."""
    kernels = Kernels()
    for module in (delta_kernel, device_proofs):
        monkeypatch.setattr(module, "find_version", lambda: "1.2.3")
    monkeypatch.setattr(delta_kernel, "import_module", lambda name: kernels)
    monkeypatch.setattr(delta_kernel, "_distrusted_devices", set())
    monkeypatch.setattr(device_proof, "is_host", lambda device: False)
    # What saves need of a device is no matter here.
    for name in ("_prove_digests", "_prove_copies"):
        monkeypatch.setattr(device_proof, name, lambda device: None)
    return kernels


def fit(genesis: Genesis, recipe: Path) -> str:
    """Returns what the manifest of a fit's last checkpoint has about linear layers."""
    outcome = genesis("fit", "--config", str(recipe))
    assert outcome.status == 0, outcome.err
    return read_manifest(recipe.parent / "run/checkpoints/step-00000004").versions["device.linear_attention"]


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
