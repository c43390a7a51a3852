import json
from pathlib import Path

import pytest
import torch

from benchmarks.experts import choose_contenders, main
from benchmarks.workers.experts_loop import build_own
from genesis.base.errors import UserError
from genesis.model.describe import describe
from genesis.model.recipe import build_decoder_config
from genesis.model.router import find_routers


@pytest.mark.bench
@pytest.mark.usefixtures("forked_contenders")
@pytest.mark.parametrize(
    ("ranks", "rows", "peers"), [("1", "2", ["grouped_mm", "eager"]), ("2", "4", [])], ids=["1", "2"]
)
def test_a_run_measures_every_contender_and_writes_imbalance_and_its_cost(
    tmp_path: Path, ranks: str, rows: str, peers: list[str]
) -> None:
    out = tmp_path / "experts.json"
    arguments = ["--model", "tiny", "--ranks", ranks, "--rows", rows, "--pairs", "2"]
    arguments += ["--burst_steps", "2", "--warmup_steps", "1"]
    assert main([*arguments, "--threads", "2", "--mixtral", ",".join(peers), "--out", str(out)]) == 0
    contenders = json.loads(out.read_text(encoding="utf-8"))["contenders"]
    even = "even" if ranks == "1" else "shared-even"
    others = ["even"] if ranks == "1" else ["shared", "shared-even"]
    assert list(contenders) == ["mixture", "dense", *others, *(f"mixtral-{peer}" for peer in peers)]
    assert all(contender["loss"] == pytest.approx(4.852, abs=0.2) for contender in contenders.values())
    assert contenders["mixture"]["imbalance"] > 1.0
    assert contenders[even]["imbalance"] == 1.0
    assert contenders["dense"]["imbalance"] is None
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert f"| {even} |" in page
    assert str(tmp_path) not in page


class Options:
    model, experts, top_k, ranks, mixtral = "34m", 8, 2, 1, ""
    rows = 8
    pairs = burst_steps = warmup_steps = threads = 1


def test_the_dense_model_has_the_active_flops_of_the_mixture_without_its_routers() -> None:
    (_, mixed), (_, dense), _ = choose_contenders(Options())  # type: ignore[arg-type]
    assert mixed.flops_per_token - dense.flops_per_token == 6 * 6 * 8 * 256
    assert describe(build_decoder_config(mixed.decoder, "test")).num_parameters == 34_094_384


def test_even_routers_give_every_expert_the_same_number_of_tokens() -> None:
    options = Options()
    options.model = "tiny"
    _, _, (_, even) = choose_contenders(options)  # type: ignore[arg-type]
    trained = build_own(even, ["even"])
    (router, _) = find_routers(trained.model).values()
    routing = router(torch.randn(4, 8, 32))
    assert routing.experts.flatten().bincount(minlength=8).tolist() == [8] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "--ranks is 3, which does not divide the 8 rows"),
        (["--top_k", "9"], "top_k is 9: it must be at most num_experts, 8"),
        (["--pairs", "0"], "--pairs is 0: it must be at least 1"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        main(arguments)
    assert message in str(caught.value)
