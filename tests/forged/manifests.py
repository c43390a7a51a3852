"""Forged mirrors, checkpoints and corpora, for the commands that restore and read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from genesis_callbacks.base.hashing import hash_bytes
from tests.forged.operators import ALIEN, Case, Forge, forge_files, forge_json, rewrite

STEP: Final = "step-00000000"
_RESTORE: Final = ("mirror", "restore", "../in/mirror", "../out/run")
_PATHS: Final = ("../../outside", "/tmp", "..", ".", "", "a/../../..", ALIEN, "x" * 5000)


def seal(folder: Path) -> Forge:
    """Returns an act that makes the marker vouch for a manifest that was changed."""

    def write(root: Path) -> None:
        data = (root / folder / "manifest.json").read_bytes()
        (root / folder / "COMMITTED").write_bytes(f"blake3:{hash_bytes(data, 'blake3')}".encode())

    return write


def _both(*acts: Forge) -> Forge:
    return lambda root: [act(root) for act in acts] and None


def iterate_cases(seed: int, mark: Path) -> Iterator[Case]:
    """Yields the cases."""
    folder = Path("mirror/checkpoints") / STEP
    names = ("manifest.json", "COMMITTED", "state.json")
    for name, forge in forge_files(["mirror/mirror.json", *(f"{folder}/{name}" for name in names)], seed):
        yield Case("manifest", name, forge, _RESTORE, ("mirror",))
    for name, forge in forge_json([f"{folder}/manifest.json"], seed, num_changed=12):
        yield Case("manifest", name, _both(forge, seal(folder)), _RESTORE, ("mirror",))
    for number, path in enumerate(_PATHS):
        for key in ("path", "relative_path", "file"):
            forge = _both(_lead(folder / "manifest.json", key, path), seal(folder))
            yield Case("manifest", f"mirror: {key} {number}", forge, _RESTORE, ("mirror",))
    for name, forge in forge_files(["corpus/manifest.json", "corpus/train/a/00000.ds"], seed):
        yield Case("manifest", f"verify {name}", forge, ("data", "verify", "../in/corpus"))
    for name, forge in forge_json(["corpus/manifest.json"], seed, num_changed=12):
        yield Case("manifest", f"inspect {name}", forge, ("data", "inspect", "../in/corpus"))
    for number in range(4):
        forge = rewrite(Path("run/recipe.yaml"), lambda data, n=number: _RECIPES[n] + data)  # type: ignore[misc]
        yield Case("manifest", f"recipe {number}", forge, ("plan", "--config", "../in/run/recipe.yaml"))


_RECIPES: Final = (
    b"a: &a [*a]\n",
    f"{ALIEN}: 1\n".encode(),
    b"[" * 100_000,
    b"!!python/object/apply:os.system ['true']\n",
)


def _lead(path: Path, key: str, value: str) -> Forge:
    """Makes a manifest name a base, or a file, at a path that leads elsewhere."""

    def change(data: bytes) -> bytes:
        content: dict[str, Any] = json.loads(data)
        if key == "file":
            content["files"][0]["name"] = value
        else:
            base = {"path": "/nowhere", "relative_path": STEP, "manifest_hash": f"blake3:{'0' * 64}", "tensors": {}}
            content["base"] = {**base, key: value}
            content["schema_version"] = 3
        return json.dumps(content).encode()

    return rewrite(path, change)
