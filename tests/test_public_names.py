"""What the application may import of `genesis_callbacks`: public names, and names of the engine from their modules."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PUBLIC_MODULES = (
    "genesis_callbacks",
    "genesis_callbacks.base.errors",
    "genesis_callbacks.base.event_reader",
    "genesis_callbacks.base.events",
    "genesis_callbacks.base.files",
    "genesis_callbacks.base.json_text",
    "genesis_callbacks.base.local_shards",
    "genesis_callbacks.base.locks",
    "genesis_callbacks.base.run_directory",
    "genesis_callbacks.base.untrusted",
    "genesis_callbacks.checkpoint",
    "genesis_callbacks.device_peaks",
    "genesis_callbacks.gradient_health",
    "genesis_callbacks.gradients",
    "genesis_callbacks.heartbeats",
    "genesis_callbacks.host_group",
    "genesis_callbacks.phases",
    "genesis_callbacks.schedule",
    "genesis_callbacks.step_parts",
    "genesis_callbacks.symptoms",
    "genesis_callbacks.testing",
)
ENGINE = (
    "genesis_callbacks.base.checkpoint_errors",
    "genesis_callbacks.base.hashing",
    "genesis_callbacks.base.manifest",
    "genesis_callbacks.checkpoint.",
)
"""What the commands for checkpoints need beyond the public names, from the module that defines it."""


def list_imports(file: Path) -> list[tuple[str, str]]:
    """Returns (module, name) for every name that a file imports from `genesis_callbacks`."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(name.name, "") for name in node.names if name.name.split(".")[0] == "genesis_callbacks"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "genesis_callbacks":
            found += [(str(node.module), name.name) for name in node.names]
    return found


def is_of_engine(module: str, name: str) -> bool:
    """Returns whether a name without an underscore is defined in a module of the engine that has no `__all__`."""
    if not module.startswith(ENGINE) or "._" in module or name.startswith("_") or not name:
        return False
    loaded = importlib.import_module(module)
    return not hasattr(loaded, "__all__") and getattr(getattr(loaded, name), "__module__", module) == module


def find_private(imports: list[tuple[str, str]]) -> list[str]:
    """Returns the imports of a name that no public module lists, and that the engine's module does not own."""
    return [
        f"{module}.{name}"
        for module, name in imports
        if (module not in PUBLIC_MODULES or (name and name not in importlib.import_module(module).__all__))
        and not is_of_engine(module, name)
    ]


def test_the_application_imports_public_names_or_those_of_the_engine_from_their_owners():
    files = list(REPOSITORY.glob("genesis/**/*.py"))
    assert len(files) > 200
    private = {
        str(file.relative_to(REPOSITORY)): names for file in files if (names := find_private(list_imports(file)))
    }
    assert not private


def test_a_private_name_is_found(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text(
        "import genesis_callbacks._triggers\nfrom genesis_callbacks.checkpoint import Manifest, step_of\n"
        "from genesis_callbacks.checkpoint.lineage import find_holder, verify\n"
    )
    assert find_private(list_imports(file)) == [
        "genesis_callbacks._triggers.",
        "genesis_callbacks.checkpoint.step_of",
        "genesis_callbacks.checkpoint.lineage.verify",
    ]


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_exists_and_has_a_docstring(module: str):
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    for name in loaded.__all__:
        value = getattr(loaded, name)
        assert value.__doc__ or not (inspect.isroutine(value) or inspect.isclass(value)), f"{module}.{name}"
