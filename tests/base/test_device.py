"""The device layer: no other module asks torch for a kind of accelerator, and what it answers where torch has none."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from genesis.base import device
from genesis.base.errors import UserError

REPOSITORY = Path(__file__).parents[2]
LAYERS = {"genesis/base/device.py", "callbacks/src/genesis_callbacks/checkpoint/device.py"}
KINDS = ("cuda", "xpu", "mps")


def find_kinds(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) for each place that names one kind of accelerator: `torch.cuda`, its import, `x.cuda()`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in KINDS:
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                yield node.lineno, f"torch.{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name.split(".")[:2] in (["torch", kind] for kind in KINDS)
            )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = node.module.split(".")
            if parts[0] == "torch" and (parts[1:2] or [""])[0] in KINDS:
                yield node.lineno, node.module
            elif node.module == "torch":
                yield from ((node.lineno, f"torch.{alias.name}") for alias in node.names if alias.name in KINDS)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
            yield node.lineno, f".{node.func.attr}()"


@pytest.mark.slow
def test_only_the_device_layers_name_a_kind_of_accelerator() -> None:
    files = [*(REPOSITORY / "genesis").rglob("*.py"), *(REPOSITORY / "callbacks/src").rglob("*.py")]
    assert len(files) > 250
    assert {str(file.relative_to(REPOSITORY)) for file in files} >= LAYERS
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}: {text}"
        for file in files
        if str(file.relative_to(REPOSITORY)) not in LAYERS
        for line, text in find_kinds(file.read_text(encoding="utf-8"))
    ]
    assert not found, "use genesis.base.device, or genesis_callbacks.checkpoint.device in the callbacks"


@pytest.mark.parametrize(
    "source",
    [
        *("import torch.cuda", "from torch import cuda", "from torch.cuda import Event", "torch.cuda.synchronize()"),
        *("def f(x):\n    return x.cuda()", "import torch.xpu as xpu"),
    ],
)
def test_every_spelling_is_found(source: str) -> None:
    assert list(find_kinds(source))


@pytest.mark.parametrize("source", ["torch.backends.cuda.enable_cudnn_sdp(False)", "torch.device('cuda')"])
def test_settings_and_names_of_devices_are_not(source: str) -> None:
    assert not list(find_kinds(source))


def test_the_cpu_answers_every_question() -> None:
    assert device.is_available("cpu")
    assert device.count_devices("cpu") == 1
    assert device.name_device("cpu") == "cpu"
    assert not device.has_bfloat16("cpu")
    assert device.read_capability(torch.device("cpu")) is None
    assert device.read_peak_memory("cpu") is None
    assert device.read_properties("cpu") is None
    assert device.can_access_peer("cpu", 0, 1) is None
    assert device.name_collectives("cpu") == "gloo"
    device.synchronize("cpu")
    device.select_device("cpu", 0)
    device.reset_peak_memory("cpu")
    with device.warning_of_waits("cpu") as can_warn:
        assert not can_warn


@pytest.mark.parametrize("kind", ["cudaa", "hpu", "privateuseone", ""])
def test_a_kind_that_torch_does_not_have_is_refused_in_one_line(kind: str) -> None:
    with pytest.raises(UserError, match=f"no {kind} device was found; remove --device {kind}, or give --device cpu"):
        device.check_available(kind)


def test_a_backend_that_lacks_functions_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_capability=lambda d: "new")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert device.is_available("npu")
    assert device.count_devices("npu") == 2
    assert device.name_device("npu") == "npu"
    assert device.read_capability(torch.device("cuda")) is None
    assert device.read_peak_memory("npu") is None
    assert not device.has_bfloat16("npu")
    with device.warning_of_waits("npu") as can_warn:
        assert not can_warn


def test_waits_are_warned_of_within_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(set_sync_debug_mode=modes.append))
    with device.warning_of_waits("cuda") as can_warn:
        assert can_warn
        assert modes == ["warn"]
    assert modes == ["warn", "default"]


def test_a_wait_is_seen_and_torchs_note_on_the_mode_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note names synchronizing operations, too, and torch prints it from whichever call is the first."""

    def set_mode(mode: str) -> None:
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=2,
        )

    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(set_sync_debug_mode=set_mode))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with device.warning_of_waits("cuda"):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["called a synchronizing CUDA operation"]
