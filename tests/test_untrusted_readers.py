"""Files are opened by `genesis_callbacks.base.untrusted` alone: elsewhere a FIFO blocks, and a device has no end."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
OPENS = frozenset(
    {"open", "io.open", "os.open", "gzip.open", "safe_open", "load_file", "torch.load", "np.memmap", "np.fromfile"}
    | {"np.load", "pq.ParquetFile", "pa.memory_map", "pa.input_stream"}
)
METHODS = frozenset({"read_text", "read_bytes", "update_mmap", "copyfile", "copy2", "copytree"})
MAY_OPEN = re.compile("|".join(rf"\b{name.rpartition('.')[2]}\(" for name in sorted(OPENS | METHODS)))
OPEN_KEYWORDS = frozenset({"mode", "buffering", "encoding", "errors", "newline"})
OWN_WORK = ("genesis/operations/demo/", "genesis/operations/doctor/", "genesis/operations/rehearse/")
"""Packages that read what they have made in directories of their own."""

OF_THE_KERNEL = "of the kernel: /proc, /sys"
INSTALLED = "a file of an installed package"
CREATES = "creates or locks a file of ours, and writes through no link"
CHECKED = "the kind was checked before, or the library gets an open file"
MADE_HERE = "this process, or a child of it, has just made the file"
EXCEPTIONS = {
    "callbacks/src/genesis_callbacks/_gloo.py::_find_ipv6_interface": OF_THE_KERNEL,
    "callbacks/src/genesis_callbacks/memory_watch.py::_find_children": OF_THE_KERNEL,
    "callbacks/src/genesis_callbacks/memory_watch.py::read_disk_bytes": OF_THE_KERNEL,
    "callbacks/src/genesis_callbacks/memory_watch.py::read_resident_bytes": OF_THE_KERNEL,
    "callbacks/src/genesis_callbacks/checkpoint/writer.py::read_own_memory_bytes": OF_THE_KERNEL,
    "callbacks/src/genesis_callbacks/checkpoint/writer_start.py::take_channel": OF_THE_KERNEL,
    "genesis/base/available_memory.py::_read_container_limit": OF_THE_KERNEL,
    "genesis/base/available_memory.py::available_memory": OF_THE_KERNEL,
    "genesis/base/limited_workers.py::serve": OF_THE_KERNEL,
    "genesis/base/limited_workers.py::serve_texts": OF_THE_KERNEL,
    "genesis/cli/main.py::_end_unread": OF_THE_KERNEL,
    "genesis/data/clean/execute.py::_run_task": OF_THE_KERNEL,
    "genesis/model/proof_memory.py::_describe": OF_THE_KERNEL,
    "genesis/base/processes.py::_read_environment": OF_THE_KERNEL,
    "genesis/base/processes.py::_read_process": OF_THE_KERNEL,
    "genesis/base/processes.py::_read_stat": OF_THE_KERNEL,
    "genesis/operations/supervise/attempt.py::_count_oom_kills": OF_THE_KERNEL,
    "genesis/operations/supervise/attempt.py::_is_stopped": OF_THE_KERNEL,
    "genesis/chat/training.py::_read_bodies": INSTALLED,
    "genesis/cli/command_record.py::read_record": INSTALLED,
    "genesis/recipe/options.py::_read_record": INSTALLED,
    "genesis/recipe/options.py::_is_in_sources": INSTALLED,
    "genesis/recipe/shipped.py::_list_named_files": INSTALLED,
    "genesis/recipe/shipped.py::copy_recipe": INSTALLED,
    "genesis/recipe/shipped.py::read_summary": INSTALLED,
    "genesis/operations/release/wheels.py::_iterate_metadata": INSTALLED,
    "genesis/operations/release/wheels.py::_iterate_package": INSTALLED,
    "genesis/operations/report/page.py::render_page": INSTALLED,
    "genesis/serve/server.py::_read_page": INSTALLED,
    "genesis/operations/supervise/service_files.py::render_file": INSTALLED,
    "callbacks/src/genesis_callbacks/_rank_watch.py::_find_lost": CREATES,
    "callbacks/src/genesis_callbacks/base/locks.py::__init__": CREATES,
    "callbacks/src/genesis_callbacks/base/events.py::_open": CREATES,
    "callbacks/src/genesis_callbacks/base/files.py::__init__": CREATES,
    "callbacks/src/genesis_callbacks/base/files.py::_sync": CREATES,
    "callbacks/src/genesis_callbacks/hang_watch.py::_report": CREATES,
    "callbacks/src/genesis_callbacks/base/locks.py::_become_stand_in": CREATES,
    "callbacks/src/genesis_callbacks/base/locks.py::open_lock": CREATES,
    "genesis/data/cache.py::_download": CREATES,
    "genesis/data/cache.py::_make_room": CREATES,
    "genesis/data/cache.py::_try_lock": CREATES,
    "genesis/operations/supervise/forked_writer.py::run_writer": CREATES,
    "genesis/operations/supervise/launcher.py::become": CREATES,
    "genesis/operations/supervise/launcher_client.py::start_launcher": CREATES,
    "genesis/operations/mirror/history.py::_restore_file": CREATES,
    "genesis/operations/supervise/space.py::has_space": CREATES,
    "genesis/train/csv_log.py::_write_last_row": CREATES,
    "callbacks/src/genesis_callbacks/checkpoint/contents/torch_format.py::load_plain": CHECKED,
    "genesis/data/sources/blocks.py::_read_gz_blocks": CHECKED,
    "genesis/data/corpus.py::_stat_files": CHECKED,
    "genesis/data/foreign/huggingface.py::read_arrow": CHECKED,
    "genesis/data/shards.py::hash_file": CHECKED,
    "genesis/data/sources/table_files.py::begin": CHECKED,
    "genesis/data/sources/table_files.py::open_arrow": CHECKED,
    "genesis/data/sources/table_files.py::open_parquet": CHECKED,
    "genesis/evaluate/rows.py::hash_own": CHECKED,
    "genesis/huggingface/weights.py::open_tensors": CHECKED,
    "genesis/operations/release/folder.py::_link_or_copy": CHECKED,
    "genesis/operations/mirror/history_files.py::find_row_end": CHECKED,
    "callbacks/src/genesis_callbacks/checkpoint/lightning_file.py::_check_loads": MADE_HERE,
    "genesis/export/prove_adapter.py::_compare_weights": MADE_HERE,
    "genesis/base/processes.py::run_limited": MADE_HERE,
    "genesis/base/processes.py::without_input": OF_THE_KERNEL,
    "genesis/operations/release/leaks.py::read": "the user's own token of the Hub, at its own place",
}
"""`path::function` of the calls that do not go through the one place, with the reason."""


def list_bare_opens(source: str) -> set[str]:
    """Returns the functions in which a file is opened by another call than `genesis_callbacks.base.untrusted`'s."""
    if not MAY_OPEN.search(source):
        return set()
    return {function for function, call, held in _walk(ast.parse(source), "", frozenset()) if _is_bare(call, held)}


def _walk(node: ast.AST, function: str, held: frozenset[str]) -> Iterator[tuple[str, ast.Call, frozenset[str]]]:
    """Yields each call with its function and the names of files that `with open_file(...)` has opened around it."""
    for child in ast.iter_child_nodes(node):
        inner, names = function, held
        if isinstance(child, ast.FunctionDef):
            inner = child.name
        if isinstance(child, ast.With):
            names |= {
                item.optional_vars.id
                for item in child.items
                if isinstance(item.optional_vars, ast.Name)
                and isinstance(item.context_expr, ast.Call)
                and _name(item.context_expr.func) == "open_file"
            }
        if isinstance(child, ast.Call):
            yield inner, child, names
        yield from _walk(child, inner, names)


def _name(node: ast.expr) -> str:
    """Returns `a.b` of a name or an attribute; of other expressions only the last part."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_bare(call: ast.Call, held: frozenset[str]) -> bool:
    name = _name(call.func)
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Name) and first.id in held:
        return False
    if name == "os.open":
        flags = ast.unparse(call.args[1])
        return not any(safe in flags for safe in ("O_DIRECTORY", "O_EXCL", "O_NOFOLLOW"))
    if name in OPENS:
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "open":
        has_mode = isinstance(first, ast.Constant) and isinstance(first.value, str)
        return has_mode or not OPEN_KEYWORDS.isdisjoint(keyword.arg for keyword in call.keywords)
    return call.func.attr in METHODS


def test_files_are_opened_at_one_place_apart_from_the_listed_exceptions() -> None:
    files = [*REPOSITORY.glob("genesis/**/*.py"), *REPOSITORY.glob("callbacks/src/**/*.py")]
    assert len(files) > 500
    found = {
        f"{name}::{function}"
        for file in files
        if not (name := str(file.relative_to(REPOSITORY))).startswith(OWN_WORK) and file.name != "untrusted.py"
        for function in list_bare_opens(file.read_text(encoding="utf-8"))
    }
    new, old = sorted(found - EXCEPTIONS.keys()), sorted(EXCEPTIONS.keys() - found)
    assert new == [], "read by genesis_callbacks.base.untrusted, or name it here with the reason"
    assert old == [], "these exceptions are not needed any more"


def test_each_way_around_the_one_place_is_found() -> None:
    for line in (
        "open(path)",
        "path.open('rb')",
        "path.open(encoding='utf-8')",
        "json.loads(path.read_bytes())",
        "path.read_text()",
        "os.open(path, os.O_RDONLY)",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "safe_open(path, framework='pt')",
        "torch.load(path)",
        "np.memmap(path)",
    ):
        assert list_bare_opens(f"def f(path):\n    return {line}\n") == {"f"}, line
    for line in ("read_text(path)", "self.open(ranks)", "os.open(path, os.O_CREAT | os.O_EXCL)"):
        assert list_bare_opens(f"def f(path):\n    return {line}\n") == set(), line
    assert list_bare_opens("def f(path):\n    with open_file(path) as file:\n        return np.memmap(file)\n") == set()
