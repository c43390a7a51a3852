"""No code of a model runs, and no program reads what a user types for another one: who may open and start what."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import genesis
import genesis_callbacks

PACKAGES = [Path(package.__file__ or "").parent for package in (genesis, genesis_callbacks)]
STARTS = (
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output", "getoutput")),
    *("subprocess.getstatusoutput", "os.system", "os.popen", "os.posix_spawn", "os.spawn", "os.fork", "pty.", "runpy."),
    *("asyncio.create_subprocess", "concurrent.futures.ProcessPoolExecutor"),
)
MAY_START = {
    "genesis/base/processes.py": {"subprocess.Popen", "subprocess.run", "os.fork"},
    "genesis/operations/supervise/launcher.py": {"os.fork"},  # of a process that `start_launcher` has started
    "genesis_callbacks/checkpoint/forked_writer.py": {"os.fork"},
    "genesis_callbacks/checkpoint/writer_start.py": {"subprocess.Popen"},
}
"""Children of multiprocessing are not here: it gives each of them an empty standard input."""
MAY_OPEN = {
    "genesis/export/theirs.py": {"AutoTokenizer", "AutoModelForCausalLM", "auto"},
    "genesis/export/foreign.py": {"choose_auto(described)"},
    "genesis/model/foreign/decoder.py": {"choose_auto(config)"},
    "genesis/export/prove_adapter.py": {"PeftModel"},  # it opens weights for a given model, and has no such option
    "genesis/operations/demo/dequantise.py": {"AutoTokenizer", "AutoModelForCausalLM"},
}
OPENER = re.compile(r"\bfrom_pretrained\b|\bfrom_config\b|\bHFLM\b")
START = re.compile(r"\bsubprocess\b|\bsystem\b|popen|spawn|\bfork|\bpty\b|runpy|create_subprocess|ProcessPool")
MAY_READ = {
    "safe_open(": {"genesis/huggingface/weights.py"},
    # The second one reads in a process what the first one has compared.
    "Tokenizer.from_str(": {"genesis/tokenizer/huggingface.py", "genesis/tokenizer/limited.py"},
    "SentencePieceProcessor(model_proto": {"genesis/tokenizer/sentencepiece.py"},
}
"""Calls that follow what a file claims, and the module that compares the claims first."""
SEARCHES = re.compile(r"""(?:sys\.executable|self\.python),\s*["']-[mc]["']""")
"""The start of a Python that looks for modules in the working directory first, which has `-P` otherwise."""
FORBIDS = ("trust_remote_code=False", "'trust_remote_code': False")


def find_starts(source: str) -> set[str]:
    """Returns the functions that start programs, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "os", "concurrent.futures"):
            found |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Call | ast.keyword):
            found.add(ast.unparse(node.func if isinstance(node, ast.Call) else node.value))
    return {name for name in found if name.startswith(STARTS)}


def find_openers(source: str) -> tuple[set[str], bool]:
    """Returns the classes that open models of others, and whether each function that uses one forbids their code."""
    found: set[str] = set()
    forbids = True
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions if OPENER.search(source) else ():
        names = {
            ast.unparse(node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config")
        }
        names |= {"HFLM" for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "HFLM"}
        found |= names
        forbids &= not names - {"PeftModel"} or any(word in ast.unparse(function) for word in FORBIDS)
    return found, forbids


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_programs_are_started_and_models_opened_in_few_places(package: Path) -> None:
    files = {str(file.relative_to(package.parent)): file.read_text() for file in package.rglob("*.py")}
    sources = {
        name: text for name, text in files.items() if START.search(text) or OPENER.search(text)
    }  # to parse all takes seconds
    starts = {name: found for name, text in sources.items() if (found := find_starts(text))}
    assert starts == {name: found for name, found in MAY_START.items() if name in sources}, (
        "start programs by genesis.base.processes, which gives them an empty standard input"
    )
    openers = {name: found for name, text in sources.items() if (found := find_openers(text))[0]}
    assert openers == {name: (found, True) for name, found in MAY_OPEN.items() if name in sources}, (
        "open models by genesis.export.theirs, which runs none of their code"
    )


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_working_directory_gives_no_program_code(package: Path) -> None:
    texts = {file.name: file.read_text() for file in package.rglob("*.py")}
    assert sum("sys.executable" in text for text in texts.values()) >= 1
    assert [name for name, text in texts.items() if SEARCHES.search(text)] == []
    assert SEARCHES.search('[sys.executable, "-m", module]')


def test_what_a_file_claims_is_compared_in_one_place_before_it_is_opened() -> None:
    texts = {str(file.relative_to(PACKAGES[0].parent)): file.read_text() for file in PACKAGES[0].rglob("*.py")}
    found = {call: {name for name, text in texts.items() if call in text} for call in MAY_READ}
    assert found == MAY_READ


def test_a_start_and_an_opener_are_found_by_any_name() -> None:
    assert find_starts("import subprocess\nsubprocess.run(['ls'], input='y')") == {"subprocess.run"}
    assert find_starts("from subprocess import Popen as start") == {"subprocess.Popen"}
    assert find_starts("build(start=os.system)") == {"os.system"}
    assert find_openers("def f():\n    return AutoModel.from_pretrained(x)") == ({"AutoModel"}, False)
    assert find_openers("def f():\n    load = AutoModel.from_pretrained\n    load(x, trust_remote_code=False)")[1]


@pytest.mark.process
def test_no_program_gets_the_standard_input_of_the_one_that_starts_it() -> None:
    ask = [sys.executable, "-S", "-c", "print(repr(input()))"]
    program = f"""
import subprocess, sys
from genesis.base.processes import run_program, start_program, without_input
ask = {ask!r}
seen = [run_program(ask, stderr=-3).returncode, start_program(ask, stderr=-3).wait()]
with without_input():
    seen.append(subprocess.run(ask, stderr=-3).returncode)
print(seen, input())
"""
    done = subprocess.run([sys.executable, "-c", program], input="y\n", capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 1, 1] y\n"
