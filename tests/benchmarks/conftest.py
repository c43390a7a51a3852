"""Fixtures of the tests of benchmarks."""

import functools

import pytest

from benchmarks import processes
from tests.commands import MODULES, fork_python

PEER_MODULES = ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "transformers.models.llama.modeling_llama")


def _fork_contenders(monkeypatch: pytest.MonkeyPatch, preloaded: tuple[str, ...]) -> None:
    monkeypatch.setattr(processes, "start_program", functools.partial(fork_python, preloaded=preloaded))


@pytest.fixture
def forked_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks contenders from a process that has imported what ours need, which takes longer than they measure here."""
    _fork_contenders(monkeypatch, MODULES)


@pytest.fixture
def forked_finetuners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does the same for contenders that train with TRL, PEFT and transformers."""
    _fork_contenders(monkeypatch, (*MODULES, *PEER_MODULES))
