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


def test_bash_completes_the_commands_of_a_group(genesis: Genesis) -> None:
    script = genesis("completion", "bash").out
    ask = "COMP_WORDS=(genesis data in) COMP_CWORD=2; _shtab_genesis; echo ${COMPREPLY[@]}"
    answer = subprocess.run(["bash", "-c", f"{script}\n{ask}"], check=True, capture_output=True, text=True)
    assert answer.stdout.split() == ["inspect"]
