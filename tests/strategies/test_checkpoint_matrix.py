"""Every layout restores what others have saved, tensor by tensor, and trains on as one process does."""

import shutil
from dataclasses import replace
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from genesis.model.decoder import DecoderConfig
from genesis.model.mixture import MixtureConfig
from genesis_callbacks.checkpoint import read_manifest, read_tensors
from genesis_callbacks.testing import run_ranks
from tests.strategies.test_pipeline_runs import DECODER, HALF, join_weights, train, train_each
from tests.train.support import run_in_turn, whole

pytestmark = [pytest.mark.slow, pytest.mark.process]

CP: dict[str, Any] = {"context_parallel": 2}
PP: dict[str, Any] = {"pipeline_parallel": 2, "stages_per_rank": 2}
TP: dict[str, Any] = {"tensor_parallel": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None, dict[str, int]]] = {
    "one": (1, None, {}),
    "dp2": (2, {}, {"dp_shard": 2}),
    "cp2": (2, CP, {"cp": 2}),
    "tp2": (2, TP, {"tp": 2}),
    "pp2x2": (2, PP, {"pp": 2}),
    "hybrid": (4, {"shard": "hybrid", "ranks_per_shard_group": 2}, {"dp_replicate": 2, "dp_shard": 2}),
    "dp2cp2": (4, CP, {"dp_shard": 2, "cp": 2}),
    "cp2pp2": (4, CP | PP, {"cp": 2, "pp": 2}),
    "dp2tp2": (4, TP, {"dp_shard": 2, "tp": 2}),
    "cp2tp2": (4, CP | TP, {"cp": 2, "tp": 2}),
    "tp2pp2": (4, TP | {"pipeline_parallel": 2}, {"tp": 2, "pp": 2}),
    "dp2pp2": (4, {"pipeline_parallel": 2}, {"dp_shard": 2, "pp": 2}),
}
"""By name: the number of ranks, the options of `Sharded`, and the degrees in the manifest."""
NAMES = list(LAYOUTS)
CHAIN = [*zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True), *((name, "one") for name in NAMES[1:-1])]
"""Pairs in which each layout restores what the one before has saved, and one process what each has: for every CI."""
COMBINED = {*NAMES[8:]}
OTHERS = [
    pair for pair in permutations(NAMES, 2) if pair not in CHAIN and ("one" in pair or not COMBINED.intersection(pair))
]
"""All other pairs, but of combined layouts only those with one process."""
STEPS = HALF + 2

EP: dict[str, Any] = {"expert_parallel": 2}
MIXED: dict[str, tuple[int, dict[str, Any] | None, dict[str, int]]] = {
    "one of a mixture": (1, None, {}),
    "ep2tp2": (2, EP | TP, {"tp": 2, "ep": 2}),
    "dp2ep2tp2": (4, EP | TP, {"dp_shard": 2, "tp": 2, "ep": 2}),
}
"""Layouts of a mixture: ranks that share matrices share the experts, too."""
MIXTURE = replace(DECODER, ffn_dim=None, feed_forward=MixtureConfig(4, 2, 24, shared_ffn_dim=16, balance_loss=0.01))


class KeepRestored(pl.Callback):
    """Keeps the weights and the optimizer's state as the first step of this process finds them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.tensors:
            return
        (optimizer,) = trainer.optimizers
        for name, parameter in pl_module.named_parameters():
            self.tensors[f"model.{name}"] = whole(parameter)
            for key, value in optimizer.state[parameter].items():
                self.tensors[f"optimizer.0.{name}.{key}"] = whole(value)


def resume(directory: Path, corpus: Path, layout: str) -> dict[str, Any]:
    keep = KeepRestored()
    found = train(directory, corpus, find_options(layout), STEPS, keep, decoder=find_decoder(layout))
    return {**found, "restored": keep.tensors}


def find_options(layout: str) -> dict[str, Any] | None:
    return (LAYOUTS | MIXED)[layout][1]


def find_decoder(layout: str) -> DecoderConfig:
    return MIXTURE if layout in MIXED else DECODER


def save(directory: Path, corpus: Path, layout: str, max_steps: int) -> dict[str, Any]:
    return train(directory, corpus, find_options(layout), max_steps, decoder=find_decoder(layout))


def save_each(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return run_in_turn(save, cases)


def resume_each(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return run_in_turn(resume, cases)


def by_size() -> list[tuple[int, list[str]]]:
    """Returns the layouts of each number of ranks, whose fits share processes."""
    return [(size, list(names)) for size, names in groupby(LAYOUTS, key=lambda name: LAYOUTS[name][0])]


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Returns whether two runs are the same but for rounding, which Adam magnifies near zero."""
    return bool((found - expected).abs().max() <= 2e-3 * expected.abs().max())


@pytest.fixture(scope="module")
def saved(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with a run of each layout, and one of a single process that goes on to the end."""
    directory = tmp_path_factory.mktemp("saved")
    for size, names in by_size():
        cases: list[tuple[Any, ...]] = [(directory / name, tiny_corpus, LAYOUTS[name][1], HALF) for name in names]
        run_ranks(train_each, size, cases, timeout_seconds=600.0)
    return directory


@pytest.fixture(scope="module")
def straight(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that trains from the first step to the last."""
    case = (tmp_path_factory.mktemp("straight"), tiny_corpus, None, STEPS)
    found: dict[str, Any] = run_ranks(train_each, 1, [case])[0][0]
    return found


def find_checkpoint(run: Path) -> Path:
    (path,) = (run / "checkpoints").glob("step-*")
    return path


def test_every_layout_saves_every_tensor_under_its_canonical_name(saved: Path) -> None:
    expected = read_tensors(find_checkpoint(saved / "one"))
    shared = {name: tensor for name, tensor in expected.items() if not name.startswith("state.")}
    assert len([name for name in shared if name.endswith("exp_avg")]) == len(
        [name for name in shared if name.startswith("model.")]
    )
    for name, (_, _, mesh) in LAYOUTS.items():
        path = find_checkpoint(saved / name)
        found = read_tensors(path)
        assert read_manifest(path).mesh == mesh
        assert {key for key in found if not key.startswith("state.")} == shared.keys()
        for key, tensor in shared.items():
            assert is_near(found[key], tensor), (name, key)


@pytest.mark.timeout(1200)
@pytest.mark.each
@pytest.mark.parametrize("pairs", [CHAIN, pytest.param(OTHERS, marks=pytest.mark.repeat)], ids=["chain", "others"])
@pytest.mark.parametrize(("world_size", "restorers"), by_size())
def test_every_layout_restores_what_others_saved_bit_for_bit_and_trains_on(
    tmp_path: Path,
    tiny_corpus: Path,
    saved: Path,
    straight: dict[str, Any],
    world_size: int,
    restorers: list[str],
    pairs: list[tuple[str, str]],
) -> None:
    check_pairs(tmp_path, tiny_corpus, saved, straight, world_size, [pair for pair in pairs if pair[1] in restorers])


def check_pairs(
    tmp_path: Path,
    corpus: Path,
    saved: Path,
    straight: dict[str, Any],
    world_size: int,
    pairs: list[tuple[str, str]],
) -> None:
    """Checks that layouts of so many ranks restore what others saved, and train on as one process does."""
    cases = []
    for saver, restorer in pairs:
        shutil.copytree(saved / saver, tmp_path / f"{saver}-{restorer}")
        cases.append((tmp_path / f"{saver}-{restorer}", corpus, restorer))
    of_ranks = run_ranks(resume_each, world_size, cases, timeout_seconds=900.0)
    for pair, *found in zip(pairs, *of_ranks, strict=True):
        # Read from the files by this process, which was no rank of any run.
        files = read_tensors(find_checkpoint(saved / pair[0]))
        restored: dict[str, Tensor] = {}
        for one in found:
            assert one["from"] == HALF
            restored |= one["restored"]
        assert restored.keys() == {name for name in files if not name.startswith("state.")}, pair
        for one in found:
            assert all(torch.equal(tensor, files[name]) for name, tensor in one["restored"].items()), pair
        weights = join_weights(found)
        assert weights.keys() == straight["weights"].keys()
        for name, tensor in weights.items():
            assert is_near(tensor, straight["weights"][name]), (pair, name)
        assert {one["position"] for one in found} == {straight["position"]}
        assert all(one["counters"] == straight["counters"] for one in found)


def test_ranks_that_share_experts_and_matrices_restore_what_others_saved(tmp_path: Path, tiny_corpus: Path) -> None:
    saved, found = tmp_path / "saved", {}
    for name, (size, _, mesh) in MIXED.items():
        cases: list[tuple[Any, ...]] = [(saved / name, tiny_corpus, name, HALF)]
        if size == 1:
            cases.append((tmp_path / "straight", tiny_corpus, name, STEPS))
        found[name] = run_ranks(save_each, size, cases, timeout_seconds=600.0)
        assert read_manifest(find_checkpoint(saved / name)).mesh.items() >= mesh.items()
    straight, savers = found["one of a mixture"][0][1], [*MIXED][-1:] + [*MIXED][:-1]
    for saver, (name, (size, _, _)) in zip(savers, MIXED.items(), strict=True):
        check_pairs(tmp_path, tiny_corpus, saved, straight, size, [(saver, name)])
