"""The recipes of large mixtures are built for eight ranks, on fake tensors: nothing of them exists in memory."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from genesis.model.decoder import Decoder
from genesis.model.describe import describe
from genesis.model.experts import Experts
from genesis.model.mixture import MixtureConfig
from genesis.model.recipe import read_decoder_config
from genesis.operations.plan.recipe import read_recipe
from genesis.operations.plan.state import build_model, count_state
from genesis.operations.plan.timeline import play_step
from genesis.optim import AdamW, build_optimizer
from genesis.recipe.resolved import ResolvedRecipe
from tests.fakecuda.memory import LiveBytes
from tests.fakecuda.watch import Watch
from tests.operations.plan.measure import build_on_meta, build_window, fake_group, train

CONFIGS: Final = Path(__file__).parents[3] / "configs"
GOLDEN: Final = Path(__file__).parents[2] / "golden" / "plan" / "finetune"


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of a rank's shards."""
    return sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in tensors)


def fake_parameters(decoder: Decoder) -> None:
    """Replaces each parameter on the meta device by a fake one on the CPU."""
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert isinstance(parameter, DTensor), "every parameter is sharded"
            local = parameter._local_tensor
            held = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            shard = DTensor.from_local(held, parameter.device_mesh, parameter.placements, run_check=False,
                                       shape=parameter.shape, stride=parameter.stride())  # fmt: skip
            setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture-8x1b", "finetune/qwen3.5-397b-lora", "finetune/qwen3.5-397b-to-35b-distill"])
def test_one_rank_of_eight_holds_what_the_plan_counts(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    recipe = read_recipe(ResolvedRecipe.read([path]))
    assert recipe.layout.num_ranks == recipe.layout.expert_parallel == 8
    with fake_group(8):
        decoder, _ = build_on_meta(recipe.workload, recipe.layout)
        with FakeTensorMode():
            fake_parameters(decoder)
            optimizer = build_optimizer(decoder, AdamW())
            trained = [one for one in decoder.parameters() if one.requires_grad]
            frozen = [one for one in decoder.parameters() if not one.requires_grad]
            for one in trained:
                one.grad = torch.zeros_like(one)
            optimizer.step()
            moments = [value for states in optimizer.state.values() for value in states.values()]
            held = [count_bytes(tensors) for tensors in (trained, frozen, moments)]
    layout = replace(recipe.layout, optimizer_offload=0.0)  # the optimizer's states, wherever they lie
    state = count_state(build_model(recipe.workload), recipe.workload, layout, rounded_to=1)
    assert [state.weights, state.frozen, state.optimizer] == held


@pytest.mark.parametrize(
    "num_layers",
    [pytest.param(8, marks=[pytest.mark.slow, pytest.mark.early]), pytest.param(60, marks=pytest.mark.long)],
)
def test_a_step_of_one_rank_of_eight_of_the_397b_run_takes_what_the_plan_counts(
    num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, recomputation, backward and update, on fake tensors; other ranks send as many rows as this one."""
    path = CONFIGS / "finetune" / "qwen3.5-397b-lora.yaml"
    recipe = read_recipe(ResolvedRecipe.read([path]))
    workload = replace(
        recipe.workload, decoder=replace(recipe.workload.decoder, num_layers=num_layers), has_documents=False
    )
    layout = replace(recipe.layout, optimizer_offload=0.0)  # fake tensors have no other memory
    assert layout.blocks_per_recomputation == 3
    with fake_group(8), monkeypatch.context() as patched:
        decoder, _ = build_on_meta(workload, layout)
        for module in decoder.modules():
            if isinstance(module, Experts):
                module.products = "grouped"  # as on CUDA: a loop would read the numbers of rows, which have no values
        patched.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)  # undoes `watch_resizes`
        with FakeTensorMode():
            window = [replace(one, document_ids=None) for one in build_window(workload, 1)]
            watch = Watch()
            watch.live = LiveBytes("cpu", rounded_to=1)
            watch.live.watch_resizes()
            with watch:
                fake_parameters(decoder)
                optimizer = build_optimizer(decoder, AdamW())
                for one in decoder.parameters():
                    one.grad = torch.zeros_like(one) if one.requires_grad else None
                optimizer.step()  # makes the states
                states = [value for state in optimizer.state.values() for value in state.values()]
                for state in states:
                    watch.live.note(state.to_local() if isinstance(state, DTensor) else state)
                train(workload, layout, decoder, optimizer, decoder, window)
    predicted = play_step(workload, layout)
    assert predicted.peak_phase == "backward"
    assert watch.live.peak == pytest.approx(predicted.peak_bytes, rel=0.01)


def test_the_weights_of_the_397b_mixture_are_92_gib_a_rank() -> None:
    """Authors of a published run give about 50 GiB; docs/how-to/plan.md has both."""
    path = CONFIGS / "finetune" / "qwen3.5-397b-lora.yaml"
    recipe = read_recipe(ResolvedRecipe.read([path]))
    parameters = build_model(recipe.workload).parameters
    assert sum(one.num_elements for one in parameters if not one.is_trained) == pytest.approx(396.3e9, rel=1e-3)
    state = count_state(build_model(recipe.workload), recipe.workload, recipe.layout)
    assert state.frozen / 2**30 == pytest.approx(92.3, abs=0.1)


def test_the_page_has_the_published_figures_beside_those_that_the_plan_prints() -> None:
    page = (CONFIGS.parent / "docs" / "how-to" / "plan.md").read_text(encoding="utf-8")
    printed = (GOLDEN / "qwen3.5-397b-lora.txt").read_text(encoding="utf-8").splitlines()
    shown = page[page.index("configs/finetune/qwen3.5-397b-lora.yaml: ") :]
    shown, rest = shown.split("```", 1)
    assert len(shown.splitlines()) > 10
    assert [line for line in shown.splitlines() if line not in printed] == []
    figures = {line.split("  ")[1].strip(): line.split() for line in printed if line.startswith("  ") and line.strip()}
    frozen_bytes, adapters, tensors = (
        figures[name][index] for name, index in (("frozen parameters", 2), ("parameters", 1), ("tensors", 3))
    )
    frozen_gib = float(frozen_bytes) * 1e9 / 2**30
    for row in (
        f"| weights in bfloat16 | about 50 GiB | {frozen_gib:.1f} GiB |",
        f"| adapters | 3.8 GB | {float(adapters):.1f} GB |",
        f"| all | 132.9 of 141.1 | {float(tensors):.1f} GB, {float(figures['with workspaces and margin'][6]):.1f} with",
    ):
        assert row in rest


def test_a_token_sees_17_billion_weights_of_the_397b_mixture_with_ten_experts_and_11_with_two() -> None:
    config = read_decoder_config(CONFIGS / "model" / "qwen3.5-397b-a17b.yaml")
    assert isinstance(config.feed_forward, MixtureConfig)
    two = replace(config, feed_forward=replace(config.feed_forward, top_k=2))
    assert config.feed_forward.top_k == 10
    assert describe(config).num_active_parameters == pytest.approx(17.3e9, rel=5e-3)
    assert describe(two).num_active_parameters == pytest.approx(11.3e9, rel=5e-3)


def test_the_adapters_of_the_397b_mixture_are_those_of_peft_for_stacked_experts() -> None:
    path = CONFIGS / "finetune" / "qwen3.5-397b-lora.yaml"
    recipe = read_recipe(ResolvedRecipe.read([path]))
    adapters = [one for one in build_model(recipe.workload).trained if one.is_expert]
    of_one = 32 * ((4096 + 2 * 1024) + (1024 + 4096))
    assert sum(one.num_elements for one in adapters) == 60 * 512 * of_one
    assert sum(one.local_elements(recipe.layout) for one in adapters) == 60 * 512 * of_one // 8


def test_the_student_has_35_billion_parameters_of_which_a_token_sees_3() -> None:
    shape = describe(read_decoder_config(CONFIGS / "model" / "qwen3.5-35b-a3b.yaml"))
    assert shape.num_parameters == pytest.approx(34.7e9, rel=2e-3)
    assert shape.num_active_parameters == pytest.approx(3.5e9, rel=0.05)
