"""Forged checkpoints from a seed, and every command that opens one, each call watched: time, memory, output, code run.

    python -m tests.forgeries RUN DIRECTORY SEED COUNT [FIRST]

RUN is a run's directory with two good checkpoints and its tokenizer. The process prints one JSON object: how many calls
it made, and every call that ran code, raised, printed more than a line of error, or took too long or too much memory.
"""

import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import genesis.export.export
from genesis.cli.main import main
from genesis_callbacks.base.hashing import hash_bytes
from genesis_callbacks.checkpoint import CheckpointError, find_latest
from tests.planted import Payload

LIMIT_SECONDS = 10.0
"""Of this process's own time: how busy the machine is must not count."""
HANG_SECONDS = 60.0
LIMIT_BYTES = 1 << 30
_ALIEN = "\x1b[2J\x1b]0;title\x07\u202e\r\ngenesis: error: none\x00\ud800"
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**400, -0.5, 1e308),
    *("", "x" * 5000, _ALIEN, "../../etc/passwd", "/dev/zero", "step-00000001", "0" * 16),
    *([], [[]], [None], [2**62] * 3, {}, {"a": {}}, {"!": "tensor", "name": 5}, {"!": "enum"}, {"!": []}),
)


class TimeLimitError(BaseException):
    """A call took longer than it may."""


# ---- forgeries


def reseal(path: Path, manifest: Any = None) -> None:
    """Makes manifest and marker vouch for whatever files there are."""
    if manifest is None:
        manifest = json.loads((path / "manifest.json").read_bytes())
        for record in manifest["files"]:
            file = path / record["name"]
            if file.is_file() and file.stat().st_size < 1 << 28:
                record["num_bytes"], record["hash"] = file.stat().st_size, hash_bytes(file.read_bytes(), "blake3")
            elif file.is_file():
                record["num_bytes"] = file.stat().st_size
    data = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_bytes(f"blake3:{hash_bytes(data, 'blake3')}".encode())


def change_somewhere(content: Any, chooser: random.Random) -> None:
    """Puts an odd value, or an odd key, at a place of a JSON document that is drawn."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        # Of many alike, some: else every draw would hit a chunk.
        for key in chooser.sample(list(keys), min(len(keys), 12)):
            places.append((value, key))
            walk(value[key])

    walk(content)
    holder, key = chooser.choice(places)
    act = chooser.randrange(5)
    if act == 0 and isinstance(holder, dict):
        holder[chooser.choice((_ALIEN, "", "extra", "step"))] = holder.pop(key)
    elif act == 1:
        del holder[key]
    else:
        holder[key] = chooser.choice(_VALUES)


def forge_manifest(path: Path, chooser: random.Random) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    for _ in range(chooser.choice((1, 1, 1, 3))):
        change_somewhere(manifest, chooser)
    reseal(path, manifest)


def forge_field(path: Path, chooser: random.Random) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest[chooser.choice(list(manifest))] = chooser.choice(_VALUES)
    reseal(path, manifest)


def forge_state(path: Path, chooser: random.Random) -> None:
    state = json.loads((path / "state.json").read_bytes())
    tags = (
        "float",
        "complex",
        "set",
        "Size",
        "numpy",
        "bytes",
        "range",
        "timedelta",
        "device",
        "dtype",
        "deque",
        "enum",
    )
    tag = {
        "!": chooser.choice(tags),
        "items": [chooser.choice(_VALUES)],
        "value": chooser.choice(_VALUES),
        "parts": [1],
    }
    data_state = {"tokens_drawn": chooser.choice(_VALUES), "epochs_drawn": {"web": "x"}, "ledger_of_lanes": [1]}
    section = {"trainer": {"CorpusDataModule": data_state}, "optimizers": chooser.choice(_VALUES), "odd": tag}
    state["sections"] = chooser.choice((state["sections"] * 3, [section], [tag], [data_state], chooser.choice(_VALUES)))
    if chooser.random() < 0.5:
        change_somewhere(state, chooser)
    (path / "state.json").write_bytes(json.dumps(state).encode())
    reseal(path)


def forge_depth(path: Path, chooser: random.Random) -> None:
    depth = chooser.choice((101, 5_000, 200_000))
    left, right = chooser.choice((("[", "]"), ('{"a":', "}")))
    deep = (left * depth + ("1" if left != "[" else "") + right * depth).encode()
    name = chooser.choice(("manifest.json", "state.json", "recipe", "best.json"))
    if name == "recipe":
        data = (path / "manifest.json").read_bytes().replace(b'"recipe": {', b'"recipe": {"deep": ' + deep + b",", 1)
        reseal(path, data)
    elif name == "manifest.json":
        reseal(path, deep)
    else:
        (path.parent / name if name == "best.json" else path / name).write_bytes(deep)
        reseal(path)


def forge_file(path: Path, chooser: random.Random) -> None:
    """Puts something that is no plain file at a file's place."""
    names = ("manifest.json", "COMMITTED", "state.json", ".metadata", "__0_0.distcp", "best.json")
    name = chooser.choice(names)
    file = path.parent / name if name == "best.json" else path / name
    file.unlink(missing_ok=True)
    act = chooser.randrange(6)
    if act == 0:
        os.mkfifo(file)
    elif act == 1:
        file.mkdir()
    else:
        file.symlink_to((name, "/dev/zero", "/proc/self/mem", "/nowhere/at/all")[act - 2])


def forge_holes(path: Path, chooser: random.Random) -> None:
    name = chooser.choice(("manifest.json", "COMMITTED", "state.json", ".metadata", "__0_0.distcp", "best.json"))
    file = path.parent / name if name == "best.json" else path / name
    file.touch()
    os.truncate(file, chooser.choice((1 << 33, 1 << 43)))
    if name not in ("manifest.json", "COMMITTED", "best.json"):
        reseal(path)


def forge_size(path: Path, chooser: random.Random) -> None:
    """Claims a large tensor for a small file, a hole, or the same bytes many times."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    name = chooser.choice(list(manifest["tensors"]))
    record = manifest["tensors"][name]
    chunk = dict(record["chunks"][0])
    act = chooser.randrange(4)
    if act == 0:
        record["shape"] = [1 << 40]
        record["chunks"] = [{**chunk, "offsets": [0], "sizes": [1 << 40]}]
    elif act == 1:
        os.truncate(path / chunk["file"], 1 << 42)
        record["shape"] = [1 << 39]
        record["chunks"] = [{**chunk, "offsets": [0], "sizes": [1 << 39], "num_bytes": (1 << 42) - (1 << 20)}]
        for file in manifest["files"]:
            if file["name"] == chunk["file"]:
                file["num_bytes"] = 1 << 42
    elif act == 2:
        count = 5_000
        record["shape"] = [count, 4]
        record["chunks"] = [{**chunk, "offsets": [row, 0], "sizes": [1, 4]} for row in range(count)]
    else:
        # No chunk lies side by side with another, so that nothing simple tells whether they overlap.
        side = 80
        record["shape"], record["dtype"] = [side, side], "uint8"
        place = {"byte_offset": 0, "num_bytes": 0, "data_offset": 0}
        record["chunks"] = [
            {**chunk, **place, "offsets": [row, column], "sizes": [1, 1]}
            for row in range(side)
            for column in range(side)
        ]
    reseal(path, manifest)


def forge_best(path: Path, chooser: random.Random) -> None:
    marker = (path / "COMMITTED").read_text()
    mark = {"name": path.name, "manifest_hash": marker, "monitor": "loss", "mode": "min", "value": 1.0}
    for _ in range(chooser.randrange(3)):
        change_somewhere(mark, chooser)
    (path.parent / "best.json").write_text(json.dumps(chooser.choice((mark, mark, mark, *_VALUES))))


def forge_names(path: Path, chooser: random.Random) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    for part in chooser.sample(("tensors", "counters", "versions", "recipe", "identity", "mesh"), 3):
        manifest[part] = {f"{key}{_ALIEN}": value for key, value in manifest[part].items()} or {_ALIEN: 1}
    manifest["versions"][_ALIEN] = _ALIEN
    manifest["recipe"] = {**manifest["recipe"], _ALIEN: {_ALIEN: [_ALIEN]}}
    reseal(path, manifest)


def forge_recipe(path: Path, chooser: random.Random) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    decoder = manifest["recipe"]["model"]["decoder"]
    decoder[chooser.choice(list(decoder))] = chooser.choice((10**9, 2**62, *_VALUES))
    manifest["recipe"]["data"] = {"corpus": chooser.choice(("/dev/zero", "/proc/self/mem", *_VALUES))}
    if chooser.random() < 0.5:
        (path.parent.parent / "tokenizer.model").unlink()
        if chooser.random() < 0.5:
            os.mkfifo(path.parent.parent / "tokenizer.model")
    reseal(path, manifest)


def forge_lineage(path: Path, chooser: random.Random) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    loop = path.parent / "loop"
    loop.symlink_to("loop")
    directory = chooser.choice(("loop", ".", "../" * 400, "x" * 3000, "/dev", "loop/loop", _ALIEN))
    previous = {"name": "step-00000002", "manifest_hash": "blake3:" + "0" * 64}
    manifest["previous"] = {**(manifest["previous"] or previous), "directory": directory}
    manifest["step"] = chooser.choice((manifest["step"], manifest["step"] + 1))
    reseal(path, manifest)


def forge_base(path: Path, chooser: random.Random) -> None:
    """Leaves tensors to the checkpoint before, or to whatever the forged record of it leads to."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    before = min(path.parent.glob("step-*"))
    held = json.loads((before / "manifest.json").read_bytes())["tensors"]
    names = [name for name in manifest["tensors"] if name.startswith("model.") and name in held]
    for name in names:
        del manifest["tensors"][name]
    in_base = {name: {key: held[name][key] for key in ("shape", "dtype", "digest")} for name in names}
    marker = chooser.choice((before, path)) / "COMMITTED"
    base = {"path": str(before), "relative_path": before.name, "manifest_hash": marker.read_text(), "tensors": in_base}
    act = chooser.randrange(4)
    if act == 0:
        change_somewhere(base, chooser)
    elif act == 1:
        leads = ("/dev/zero", "/proc/self", "/", "/" + "x" * 3000, "/" + _ALIEN.replace("\x00\ud800", ""))
        base["path"], base["relative_path"] = (
            chooser.choice(leads),
            chooser.choice(("../" * 400, "", path.name, "/dev")),
        )
    elif act == 2:
        base["tensors"][chooser.choice(names)]["digest"] = "0" * 16
    else:
        fifo = path.parent / "step-00009999"
        fifo.mkdir()
        os.mkfifo(fifo / "COMMITTED")
        base["path"], base["relative_path"] = str(fifo), fifo.name
    reseal(path, manifest | {"base": base, "schema_version": 3})


def forge_metadata(path: Path, chooser: random.Random) -> None:
    proof = path.parent.parent / "it-ran"
    good = (path / ".metadata").read_bytes()
    bombs = (
        pickle.dumps(Payload(proof)),
        good[:-1] + pickle.dumps(Payload(proof))[2:],
        b"\x80\x04]r\xff\xff\xff\x7f.",  # a place of the memo that would take 16 GB
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".",
        b"]" * 300_000 + b"a" * 299_999 + b".",
        good.replace(b"model.", b"medel."),
        good[: len(good) // 2],
        b"cos\nsystem\n(S'true'\ntR.",
    )
    (path / ".metadata").write_bytes(chooser.choice(bombs))
    reseal(path)


def forge_bytes(path: Path, chooser: random.Random) -> None:
    file = chooser.choice([file for file in sorted(path.iterdir()) if file.stat().st_size])
    data = bytearray(file.read_bytes())
    for _ in range(chooser.choice((1, 50))):
        data[chooser.randrange(len(data))] = chooser.randrange(256)
    file.write_bytes(data[: chooser.choice((len(data), len(data) // 2))])
    if chooser.random() < 0.7 and file.name not in ("manifest.json", "COMMITTED"):
        reseal(path)


def forge_foreign(path: Path, chooser: random.Random) -> Path:
    """Writes a checkpoint of another format beside the run and returns its path."""
    place = path.parent.parent / "foreign"
    place.mkdir()
    file = place / "model.ckpt"
    act = chooser.randrange(8)
    if act == 0:  # a gigabyte and more of zeros in a megabyte
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a/data.pkl", "w") as stream:
            for _ in range(300):
                stream.write(bytes(1 << 20))
    elif act == 1:
        torch.save({"state_dict": {}, "x": Payload(path.parent.parent / "it-ran")}, file)
    elif act == 2:
        odd = {"state_dict": chooser.choice(_VALUES), "optimizer_states": chooser.choice(_VALUES), "global_step": "x"}
        torch.save({**odd, _ALIEN: 1}, file)
    elif act == 3:
        torch.save({"state_dict": {"w": torch.ones(3).expand(1 << 40, 3)}}, file)
    elif act == 4:
        os.mkfifo(file)
    elif act == 5:
        header = chooser.choice(
            (b"[" * 100_000, b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[9,1]}}', b"{}", b"[[]]")
        )
        file = place / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    elif act == 6:
        shutil.copy(path / ".metadata", place)
        (place / ".metadata").write_bytes(b"\x80\x04]r\xff\xff\xff\x7f.")
        return place
    else:
        file.touch()
        os.truncate(file, 1 << 43)
    return file


def forge_pickle(path: Path, chooser: random.Random) -> Path | None:
    """Writes a pickle of many megabytes, each byte of which takes far more in memory."""
    record = b"ctorch.distributed.checkpoint.metadata\nMetadata\n\x94"
    unit = chooser.choice((b"]", b"}", b"(", b"\x8f", b"}\x94", b")\x85", b"h\x00)\x81", b"h\x00)R"))
    data = record + unit * (chooser.choice((4 << 20, 12 << 20, 31 << 20, 63 << 20)) // len(unit)) + b"."
    place = path.parent.parent / "foreign"
    act = chooser.randrange(3)
    if act == 0:
        (path / ".metadata").write_bytes(b"\x80\x04" + data)
        reseal(path)
        return None
    place.mkdir()
    if act == 1:
        (place / ".metadata").write_bytes(b"\x80\x04" + data)
        return place
    with zipfile.ZipFile(place / "model.ckpt", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02" + data.replace(record, b"ccollections\nOrderedDict\nq\x00"))
        archive.writestr("model/version", "3\n")
    return place / "model.ckpt"


FORGERIES: tuple[Callable[[Path, random.Random], Path | None], ...] = (
    *(forge_manifest, forge_field, forge_state, forge_depth, forge_file, forge_holes, forge_size),
    *(forge_best, forge_names, forge_recipe, forge_lineage, forge_metadata, forge_bytes, forge_foreign, forge_pickle),
    forge_base,
)


# ---- calls


def commands(run: Path, older: Path, forged: Path, foreign: Path | None) -> Iterator[tuple[str, ...]]:
    """Yields the arguments of each command that opens checkpoints."""
    for target in (run, forged):
        yield "checkpoint", "show", str(target)
        yield "checkpoint", "verify", str(target), "--level", "deep", "--finite"
    if foreign is not None:
        yield "checkpoint", "verify", str(foreign), "--finite"
        yield "checkpoint", "show", str(foreign)
        yield "checkpoint", "diff", str(older), str(foreign)
    yield "checkpoint", "list", str(run)
    yield "checkpoint", "list", str(run), "--json"
    yield "checkpoint", "diff", str(older), str(forged)
    yield "checkpoint", "prune", str(run), "--keep_last", "1", "--dry_run"
    yield "generate", str(forged), "--max_new_tokens", "1", "--device", "cpu"
    yield "generate", str(run), "--max_new_tokens", "1", "--device", "cpu"
    yield "export", str(forged), str(run / "exported"), "--format", "safetensors"
    yield "checkpoint", "to-lightning", str(forged), str(run / "forged.ckpt")
    yield "checkpoint", "to-lightning", str(run), str(run / "newest.ckpt")
    yield "find_latest", str(run)
    yield "checkpoint", "repair", str(run), "--apply"
    yield "checkpoint", "prune", str(run), "--keep_last", "1"


def _expire(*_: object) -> None:
    raise TimeLimitError


def _peak_bytes() -> int:
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(words["VmHWM"].split()[0]) * 1024


def _act(arguments: tuple[str, ...]) -> int:
    if arguments[0] != "find_latest":
        return main(arguments)
    try:
        find_latest(arguments[1], quarantine_bad=False)
    except CheckpointError as error:
        print(f"genesis: error: {error}", file=sys.stderr)
    return 0


def call(arguments: tuple[str, ...]) -> tuple[list[str], Any, int]:
    """Makes a call and returns what is wrong with how it ended, its exit status, and the memory that it took."""
    out, err = io.StringIO(), io.StringIO()
    problems: list[str] = []
    status: Any = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before_bytes, start_seconds = _peak_bytes(), time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            status = _act(arguments)
    except TimeLimitError:
        problems.append("hangs")
    except SystemExit as error:
        status = error.code
    except BaseException:
        problems.append(f"traceback: {traceback.format_exc()[-1500:]}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds, used_bytes = time.process_time() - start_seconds, _peak_bytes() - before_bytes
    if seconds > LIMIT_SECONDS:
        problems.append(f"took {seconds:.1f} s")
    if used_bytes > LIMIT_BYTES:
        problems.append(f"took {used_bytes} bytes")
    # What a model writes is its own text, whatever characters that has.
    text = err.getvalue() + ("" if arguments[0] == "generate" else out.getvalue())
    odd = {character for character in text if not character.isprintable() and character != "\n"}
    if odd:
        problems.append(f"printed {sorted(odd)!r}: {text[-400:]!r}")
    if not problems and status not in (0, 1, 2):
        problems.append(f"exit status {status}")
    if len(err.getvalue().splitlines()) > 1:
        problems.append(f"printed more than a line of error: {err.getvalue()[-600:]!r}")
    return problems, status, used_bytes


def check_commands(source: Path, directory: Path) -> None:
    """Makes every call on a run that is whole: one that fails there would prove nothing about forgeries."""
    run = shutil.copytree(source, directory / "whole")
    older, newest = sorted((run / "checkpoints").iterdir())[-2:]
    for arguments in commands(run, older, newest, None):
        problems, status, _ = call(arguments)
        assert (problems, status) == ([], 0), arguments
    shutil.rmtree(run)


def attack(source: Path, directory: Path, seed: int, count: int, first: int = 0) -> dict[str, Any]:
    """Forges `count` checkpoints from number `first` on, makes every call on each, and returns what was seen."""
    # A process that runs away ends itself, not the machine.
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_peak_bytes() * 4 + 16 * LIMIT_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _expire)
    genesis.export.export.run_proof = lambda *_, **__: {"weights": {"num_values": 0}}  # type: ignore[attr-defined]  # a process
    failures: list[dict[str, Any]] = []
    kinds: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    num_calls, slowest_seconds, most_bytes, num_ran = 0, 0.0, 0, 0
    check_commands(source, directory)
    for number in range(first, first + count):
        forge = FORGERIES[number % len(FORGERIES)]
        chooser = random.Random(f"{seed} {number}")
        run = directory / f"run-{number}"
        shutil.copytree(source, run)
        older, forged = sorted((run / "checkpoints").iterdir())[-2:]
        foreign = forge(forged, chooser)
        kinds[forge.__name__] += 1
        for arguments in commands(run, older, forged, foreign):
            start_seconds = time.process_time()
            problems, status, used_bytes = call(arguments)
            slowest_seconds = max(slowest_seconds, time.process_time() - start_seconds)
            most_bytes = max(most_bytes, used_bytes)
            statuses[str(status)] += 1
            num_calls += 1
            if (run / "it-ran").exists():
                num_ran += 1
                problems.append("ran code")
                (run / "it-ran").rmdir()
            if problems:
                failures.append({"forgery": f"{forge.__name__} {number}", "call": arguments, "problems": problems})
                print(json.dumps(failures[-1]), file=sys.stderr, flush=True)
        shutil.rmtree(run)
    return {
        "seed": seed,
        "num_forgeries": count,
        "num_calls": num_calls,
        "num_ran_code": num_ran,
        "slowest_cpu_seconds": round(slowest_seconds, 2),
        "largest_memory_bytes": most_bytes,
        "exit_statuses": dict(statuses),
        "kinds": dict(kinds),
        "failures": failures,
    }


if __name__ == "__main__":
    print(json.dumps(attack(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))))
