"""Forged mirrors, checkpoints and corpora, for the commands that restore and read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.forged.checkpoints import reseal
from tests.forged.operators import ALIEN, Case, Forge, forge_files, forge_json, rewrite

STEP: Final = "step-00000000"
_RESTORE: Final = ("mirror", "restore", "../in/mirror", "../out/run")
_PATHS: Final = ("../../outside", "/tmp", "..", ".", "", "a/../../..", ALIEN, "x" * 5000)


def seal(folder: Path) -> Forge:
    """Returns an act that makes the marker vouch for a manifest that was changed."""
    return lambda root: reseal(root / folder, (root / folder / "manifest.json").read_bytes())


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
    for number in range(len(_RECIPES)):
        forge = rewrite(Path("run/recipe.yaml"), lambda data, n=number: _RECIPES[n] + data)  # type: ignore[misc]
        yield Case("manifest", f"recipe {number}", forge, ("plan", "--config", "../in/run/recipe.yaml"))


_RECIPES: Final = (
    b"a: &a [*a]\n",
    f"{ALIEN}: 1\n".encode(),
    b"[" * 100_000,
    b"!!python/object/apply:os.system ['true']\n",
    b"".join(b"k%d: %d\n" % (number, number) for number in range(30_000)),
    b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n + 1, n + 1, n, n) for n in range(40)),
    b"a0: &a0 {x: 1}\n" + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (n + 1, n + 1, n, n) for n in range(40)),
    b"\xff\xfe\x00",
    b"a: " + b"9" * 100_000 + b"\n",
    b"a: 1:" + b"1:" * 50_000 + b"1\n",
    b"? " * 5_000 + b"a\n",
    b"a: |\n" + b" " * 400_000 + b"x\n",
    b"a: !!binary " + b"A" * 100_000 + b"\n",
    b"a: 2001-99-99\nb: !!timestamp x\n",
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
