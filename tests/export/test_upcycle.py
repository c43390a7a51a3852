"""A mixture made from a dense checkpoint: the same logits, the lineage, and refusals in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from genesis.base.errors import RunEndedError, UserError
from genesis.cli.main import main
from genesis.export import upcycle as module
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import save_weights
from genesis.export.upcycle import UpcycleOptions, upcycle
from genesis.generate.load import load_decoder
from genesis.model.decoder import Decoder, DecoderConfig
from genesis.model.feed_forward import DenseConfig
from genesis.model.mixture import Mixture
from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.checkpoint import list_committed, read_manifest
from genesis_callbacks.checkpoint.inventory import trace_ancestors
from tests.commands import run_genesis
from tests.export.test_add_tokens import build_base
from tests.tiny_runs import SHAPE, build_decoder, save_adapted
from tests.tokenizer.test_huggingface import qwen

IDS = torch.randint(0, 700, (2, 48), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return save_weights(build_decoder(1).state_dict(), DecoderConfig(**SHAPE), None, tmp_path / "run/checkpoints")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": 8, "top_k": 2},
        {"num_experts": 4, "top_k": 3, "scores": "sigmoid", "balance_loss": 0.0, "has_balance_bias": True},
        {"num_experts": 4, "top_k": 2, "num_dense_layers": 1},
        {"num_experts": 4, "top_k": 2, "mixture_every": 2},
    ],
)
def test_the_mixture_gives_the_logits_of_the_dense_model(dense: Path, options: dict[str, Any], tmp_path: Path) -> None:
    report = upcycle(dense, tmp_path / "out", UpcycleOptions(**options))
    assert report["logits"]["largest_difference"] < 1e-5
    before, after = load_decoder(dense).decoder, load_decoder(tmp_path / "out").decoder
    with torch.no_grad():
        expected = before(IDS)
        torch.testing.assert_close(after(IDS), expected, rtol=1e-4, atol=1e-5)
    mixtures = [block.feed_forward for block in after.blocks if isinstance(block.feed_forward, Mixture)]
    assert len(mixtures) == (1 if "num_dense_layers" in options or "mixture_every" in options else 2)
    weight = mixtures[-1].experts.gate
    assert all(torch.equal(expert, before.blocks[1].feed_forward.gate.weight) for expert in weight)
    assert float(mixtures[-1].router.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert json.loads((tmp_path / "out/proof.json").read_text())["source"] == report["source"]


@pytest.mark.slow
def test_the_mixture_of_a_llama_is_exported_as_a_mixtral(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "out", UpcycleOptions(num_experts=4, top_k=2))
    ((checkpoint, _),) = list_committed(tmp_path / "out/checkpoints")
    export_checkpoints([checkpoint], tmp_path / "export", ExportOptions(compares_models=False))
    assert json.loads((tmp_path / "export/config.json").read_text())["model_type"] == "mixtral"


def test_noise_makes_each_expert_another_and_the_distance_is_reported(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "out", UpcycleOptions(num_experts=4, top_k=2, noise=0.05, seed=7))
    report = json.loads((tmp_path / "out/proof.json").read_text())["logits"]
    assert report["largest_difference"] < 1e-5 < report["largest_difference_with_noise"] < 0.5
    stack = load_decoder(tmp_path / "out").decoder.blocks[0].feed_forward.experts.gate.detach()
    copied = load_decoder(dense).decoder.blocks[0].feed_forward.gate.weight.detach()
    assert float((stack - copied).std()) == pytest.approx(0.05 * float(copied.std()), rel=0.1)
    assert not torch.equal(stack[0], stack[1])
    again = upcycle(dense, tmp_path / "again", UpcycleOptions(num_experts=4, top_k=2, noise=0.05, seed=7))
    assert again["logits"] == report
    assert torch.equal(load_decoder(tmp_path / "again").decoder.blocks[0].feed_forward.experts.gate, stack)


def test_a_base_in_bfloat16_stays_in_it_and_its_routers_are_float32(tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in build_decoder(1).state_dict().items()}
    (tmp_path / "run").mkdir()
    base = save_weights(state, DecoderConfig(**SHAPE), None, tmp_path / "run/checkpoints")  # type: ignore[arg-type]
    upcycle(base, tmp_path / "out", UpcycleOptions(num_experts=4, top_k=2, has_balance_bias=True))
    tensors = read_manifest(tmp_path / "out/checkpoints/step-00000000").tensors
    kinds = {name.rpartition("feed_forward.")[2]: record.torch_dtype for name, record in tensors.items()}
    assert kinds["experts.up"] == torch.bfloat16
    assert kinds["router.weight"] == kinds["router.balance_bias"] == torch.float32


def test_a_mixture_that_computes_something_else_is_not_committed(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_compare", lambda *_: float("nan"))
    with pytest.raises(RunEndedError, match=r"gives other logits: .* nothing was written"):
        upcycle(dense, tmp_path / "out", UpcycleOptions(num_experts=4, top_k=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_the_manifest_names_the_dense_checkpoint_and_the_tokenizer_goes_along(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    base = build_base(tmp_path / "base", open_tokenizer(qwen(tmp_path / "theirs")), vocab_size=640)
    upcycle(base, tmp_path / "out", UpcycleOptions(num_experts=4, top_k=2))
    made = tmp_path / "out/checkpoints/step-00000000"
    manifest = read_manifest(made)
    assert manifest.identity == read_manifest(base).identity
    ((ancestor, state),) = trace_ancestors(made, manifest)
    assert ancestor.locate(made.parent).samefile(base)
    assert state == "there"
    assert load_decoder(tmp_path / "out").text_tokenizer.hash == load_decoder(base).text_tokenizer.hash


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, "top_k is 5: it must be at most num_experts, 4"),
        ({"num_experts": 0, "top_k": 2}, "num_experts is 0: it must be at least 1"),
        ({"num_experts": 10**20, "top_k": 2}, "num_experts is 100000000000000000000: it must be at most 65,536"),
        ({"num_experts": 4, "top_k": 2, "seed": -1}, "seed is -1: it must be from 0 to 4294967295"),
        ({"num_experts": 4, "top_k": 1}, "the router learns nothing: give 2 or more"),
        ({"num_experts": 4, "top_k": 2, "noise": float("nan")}, "noise is nan: it must be at least 0 and below 1"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        UpcycleOptions(**options)
    assert message in str(caught.value)


def test_what_is_no_dense_checkpoint_is_refused_in_one_line(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--experts", "4", "--top_k", "2"]
    assert main(["upcycle", str(tmp_path / "run"), str(tmp_path / "out"), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "train on: genesis fit --config" in shown
    adapted = save_adapted(tmp_path / "adapted/checkpoints", dense, build_decoder(1), {}, rank=2)
    cases = {
        tmp_path / "out": "is no dense model: its feed-forward part is MixtureConfig; give a dense checkpoint",
        adapted: "holds adapters beside a base, which is no dense model",
        tmp_path / "nowhere": "nowhere",
    }
    for number, (path, message) in enumerate(cases.items()):
        assert main(["upcycle", str(path), str(tmp_path / f"x{number}"), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert main(["upcycle", str(tmp_path / "run"), str(tmp_path / "out"), *arguments]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_model_whose_experts_would_compute_something_else_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    config = DecoderConfig(
        **{**SHAPE, "ffn_dim": None, "feed_forward": DenseConfig(ffn_dim=48, activation="gelu_tanh")}  # type: ignore[arg-type]
    )
    decoder = Decoder(config)
    decoder.init_weights(1)
    (tmp_path / "run").mkdir()
    checkpoint = save_weights(decoder.state_dict(), config, None, tmp_path / "run/checkpoints")
    with pytest.raises(UserError, match="the activation gelu_tanh, and experts compute silu alone"):
        upcycle(checkpoint, tmp_path / "out", UpcycleOptions(num_experts=4, top_k=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_training_goes_on_from_the_mixture_by_the_printed_recipe(tiny_corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    decoder = build_decoder(1, vocab_size=320)
    config = DecoderConfig(**{**SHAPE, "vocab_size": 320})  # type: ignore[arg-type]
    save_weights(decoder.state_dict(), config, None, directory / "checkpoints")
    options = ("--experts", "4", "--top_k", "2", "--noise", "0.01", "--balance_bias")
    done = run_genesis("upcycle", directory, tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    fitted = run_genesis(
        *("fit", "--config", tmp_path / "out/recipe.yaml", "--data.corpus", tiny_corpus, "--data.seq_len", "16"),
        *("--trainer.max_steps", "2", "--trainer.accelerator", "cpu", "--data.global_batch_size", "2"),
        *("--trainer.log_every_n_steps", "1"),
    )
    assert fitted.returncode == 0, fitted.stderr
    trained = load_decoder(tmp_path / "out-continued").decoder
    assert isinstance(trained, Decoder)
    assert bool(trained.blocks[0].feed_forward.router.balance_bias.ne(0).any())
