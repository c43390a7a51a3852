"""Shell completion knows every command."""

import subprocess

import pytest

from genesis.cli.table import COMMANDS
from tests.cli.conftest import Genesis


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_names_every_command(shell: str, genesis: Genesis) -> None:
    outcome = genesis("completion", shell)
    assert outcome.status == 0
    for command in COMMANDS:
        for word in command.name.split():
            assert word in outcome.out


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["data", "in"], ["inspect"]),
        (["fit", "--data.seq"], ["--data.seq_len"]),
        (["generate", "--max_n"], ["--max_new_tokens"]),
        (["export", "--dtype", "f"], ["float32", "float16"]),
        (["export", "--best", "--ad"], ["--adapter"]),
        (["mirror", "restore", "--ban"], ["--bandwidth"]),
        (["fit", "--data.packing", "p"], ["pad"]),
        # No answer: bash completes the names of files, with a slash after those of directories.
        (["generate", "t"], []),
        (["mirror", "t"], []),
        (["fit", "--config", "t"], []),
    ],
    ids=" ".join,
)
def test_bash_completes_commands_options_and_choices(words: list[str], answers: list[str], genesis: Genesis) -> None:
    script = genesis("completion", "bash").out
    ask = f"COMP_WORDS=(genesis {' '.join(words)}) COMP_CWORD={len(words)}; _shtab_genesis; echo ${{COMPREPLY[@]}}"
    answer = subprocess.run(["bash", "-c", f"{script}\n{ask}"], check=True, capture_output=True, text=True)
    assert answer.stdout.split() == answers
    assert "complete -o bashdefault -o default -F _shtab_genesis genesis" in script
