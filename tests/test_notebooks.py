"""Every notebook runs from its first cell to its last, and is committed with its outputs.

`GENESIS_UPDATE_GOLDEN=1` writes the outputs of a run into the notebooks.
"""

import gc
import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
CHEAPEST = "look_into_a_checkpoint.ipynb"
"""The first, which CI runs."""
DEADLINE_SECONDS = 240
# What a notebook must have said, in this order.
SAID = {
    "callbacks_in_your_own_project.ipynb": (
        "starts from scratch",
        "killed by signal 9",
        "starts from step-000000",
        "ended with step-00000120 {'step': 120, 'tokens_seen': 1920",
        "4 tensors are equal, bit for bit",
        "steps trained twice",
        "restored",
        "ended",
    ),
    "export_and_evaluate.ipynb": (
        "saved step-00000150",
        "values bit-equal",
        "model.safetensors",
        "the same tokens: True",
        "def loads(",
        "results by checkpoint",
    ),
    "look_into_a_checkpoint.ipynb": (
        "step-00000060",
        "'tokens_seen': 480",
        "of two parts",
        "verify: ",
        "does not have the hash that was saved",
        "read_tensors: ",
        "model.net.0.weight has digest",
        "step 60 is whole",
        "4 tensors, the same bits",
        "model.net.2.weight      changed",
        "state.0.rng.torch       same",
    ),
    "train_a_tiny_model.ipynb": ("documents", "tokens to train on", "saved step-00000120", "def loads("),
    "your_own_assistant.ipynb": (
        "300 conversations",
        "values bit-equal",
        "killed by signal 9",
        "starts from step-",
        "ended with step-00000090",
        "merged: logits differ from the adapters' by at most",
        "adapter/adapter_model.safetensors",
        "merged/model.safetensors",
    ),
}


def read(name: str) -> NotebookNode:
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def execute(name: str, directory: str, monkeypatch: pytest.MonkeyPatch) -> NotebookNode:
    """Returns the notebook with its outputs, run by this interpreter in `directory`; the sockets are files there."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, directory)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = read(name)
    manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{directory}/kernel")
    resources = {"metadata": {"path": directory}}
    client = NotebookClient(notebook, km=manager, timeout=DEADLINE_SECONDS, resources=resources, coalesce_streams=True)
    client.execute()
    del manager, client
    # It leaves sockets open; they go here, where nobody minds.
    gc.collect()
    return notebook


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def check_said(name: str, shown: list[NotebookNode]) -> None:
    assert any("image/png" in output.get("data", {}) for output in shown)
    text = "".join(output.text for output in shown if output.output_type == "stream" and output.name == "stdout")
    for words in SAID[name]:
        _, found, text = text.partition(words)
        assert found, f"{words!r} is not there, or too early"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_with_its_outputs_which_name_no_place_of_a_machine(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    shown = outputs(notebook)
    check_said(name, shown)
    assert [output for output in shown if output.output_type == "error" or output.get("name") == "stderr"] == []
    texts = [output.text if output.output_type == "stream" else str(output.data.get("text/plain")) for output in shown]
    assert [text for text in texts if re.search(r"(?:^|[\s'\"(])/(?:tmp|home|root|work|Users)/", text)] == []


# What Jupyter's own packages warn of is theirs to fix.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(NAMES, key=CHEAPEST.__ne__))
@pytest.mark.slow
@pytest.mark.early
def test_a_notebook_runs_and_shows_a_picture_and_what_it_teaches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Names of sockets must be short, and pytest's directories are not.
    with tempfile.TemporaryDirectory() as directory:
        notebook = execute(name, directory, monkeypatch)
        left = [path.name for path in Path(directory).glob("results-*")]
    shown = outputs(notebook)
    assert len(left) == 1, "a notebook leaves its results in a directory of its own"
    if os.environ.get("GENESIS_UPDATE_GOLDEN") == "1":
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.metadata.pop("execution", None)  # times of the clock
            # Warnings of packages that are installed here are none of the reader's.
            cell.outputs = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
        nbformat.write(notebook, NOTEBOOKS / name)
    check_said(name, shown)
