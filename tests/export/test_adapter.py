"""Exports of adapters: PEFT loads them, a merged model is the same model, and adapters of others are read strictly."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from genesis.base.errors import RunEndedError, UserError
from genesis.export.adapter import AdapterExportOptions, export_adapter
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.proof import prove_environment
from genesis.generate.load import load_decoder
from genesis.huggingface import adapter_config
from genesis.huggingface.peft import FINGERPRINT, WEIGHTS_NAME
from genesis.huggingface.shape import name_part
from genesis.model.adapter import AdapterConfig
from genesis.model.mixture import MixtureConfig
from genesis.train.adapter_base import AdapterBase, find_adapter_base, read_start
from tests.commands import run_module
from tests.tiny_runs import build_decoder, save, save_adapted

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "rslora": {**LORA, "rslora": True, "include": ["*.query", "*.up"]},
    "dora": {**LORA, "dora": True},
    "one-block": {**LORA, "include": ["blocks.1.attention.*"]},
}
IDS = torch.randint(700, (2, 40), generator=torch.Generator().manual_seed(3))
# PEFT asks transformers for a property that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("base") / "checkpoints", 0, build_decoder(1), {})


@pytest.fixture(scope="module")
def exported_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "base"
    export_checkpoints([base], out, ExportOptions())
    return out


def adapt(tmp_path: Path, base: Path, **adapter: Any) -> Path:
    return save_adapted(tmp_path / "tuned/checkpoints", base, build_decoder(1), {}, **adapter)


@pytest.mark.each
@pytest.mark.parametrize("kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:])])
def test_peft_loads_exported_adapters_with_equal_logits(
    tmp_path: Path, base: Path, exported_base: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = adapt(tmp_path, base, **KINDS[kind])
    sent: list[str] = []

    def record(request: str, module: str) -> subprocess.CompletedProcess[str]:
        done = run_module(module, request, env=prove_environment())
        sent.append(done.stdout)
        return done

    monkeypatch.setattr("genesis.export.proof.run_prove", record)
    proof = export_adapter(checkpoint, tmp_path / "out", AdapterExportOptions(base_name=str(exported_base)))
    for name in ("comparing the weights", "loading transformers' model with PEFT", "logits of PEFT"):
        assert f'genesis-stage {{"name": "{name}' in sent[0]
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    assert proof["logits"]["largest_change_by_the_adapters"] > 100 * proof["logits"]["tolerance"]
    model: Any = AutoModelForCausalLM.from_pretrained(exported_base, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(model, str(tmp_path / "out")).eval()
    ours = load_decoder(checkpoint).decoder
    with torch.no_grad():
        theirs = adapted(input_ids=IDS).logits
        torch.testing.assert_close(ours(IDS), theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("lora", "float32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("dora", "float32"), ("lora", "bfloat16")]),
    ],
)
def test_a_merged_export_gives_the_logits_of_the_adapters(tmp_path: Path, base: Path, kind: str, dtype: str) -> None:
    checkpoint = adapt(tmp_path, base, **KINDS[kind])
    proof = export_checkpoints([checkpoint], tmp_path / "out", ExportOptions(dtype=dtype, is_merged=True))
    assert proof["weights"]["num_merged"] == sum(
        layer.weight.numel() for layer in load_decoder(checkpoint).decoder.modules() if hasattr(layer, "lora_A")
    )
    assert proof["adapters"]["largest_difference"] <= proof["adapters"]["tolerance"]
    assert "merged into the weights" in (tmp_path / "out/README.md").read_text()
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert not any("lora" in name for name in names)
    if dtype == "float32":  # in bfloat16, each weight is rounded, as in any export
        adapted, merged = load_decoder(checkpoint).decoder, load_decoder(tmp_path / "out").decoder
        with torch.no_grad():
            torch.testing.assert_close(merged(IDS), adapted(IDS), rtol=0, atol=proof["adapters"]["tolerance"])


def test_adapters_are_exported_by_a_word_and_whole_models_without(tmp_path: Path, base: Path) -> None:
    checkpoint = adapt(tmp_path, base, **LORA)
    with pytest.raises(UserError, match=r"holds adapters beside a base: give --adapter .* or --merge"):
        export_checkpoints([checkpoint], tmp_path / "out", ExportOptions())
    for export in (
        lambda: export_adapter(base, tmp_path / "out", AdapterExportOptions()),
        lambda: export_checkpoints([base], tmp_path / "out", ExportOptions(is_merged=True)),
    ):
        with pytest.raises(UserError, match="holds no adapters: export it without"):
            export()
    assert not (tmp_path / "out").exists()


def test_a_proof_of_logits_beyond_the_memory_is_refused_before_anything_is_written(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = adapt(tmp_path, base, **LORA), tmp_path / "out"
    num_bytes = 4 * sum(parameter.numel() for parameter in build_decoder(1).parameters())
    available = 2 * num_bytes - 1
    monkeypatch.setattr("genesis.export.proof.available_memory", lambda: available)
    refused = pytest.raises(UserError, match=r"the proof of the logits takes .* --proof weights")
    with refused:
        export_checkpoints([checkpoint], out, ExportOptions(is_merged=True))
    with refused:
        export_adapter(checkpoint, out, AdapterExportOptions())
    available = num_bytes - 1
    with refused:
        export_checkpoints([base], out, ExportOptions())
    assert not out.exists()


@pytest.mark.slow
def test_weights_alone_are_proved_on_request_in_any_memory(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = adapt(tmp_path, base, **LORA)
    monkeypatch.setattr("genesis.export.proof.available_memory", lambda: 0)
    merged = export_checkpoints([checkpoint], tmp_path / "out", ExportOptions(is_merged=True, compares_models=False))
    adapter = export_adapter(checkpoint, tmp_path / "adapter", AdapterExportOptions(compares_models=False))
    for proof in (merged, adapter):
        assert proof["weights"]["num_values"] > 0
        assert not proof.keys() & {"logits", "generation", "adapters"}


def start_from(directory: Path, base: AdapterBase, **adapter: Any) -> dict[str, torch.Tensor]:
    config = AdapterConfig(**{**LORA, **adapter, "start": str(directory)})
    return read_start(config, build_decoder(1).config, base)


@pytest.mark.slow
def test_training_starts_from_adapters_in_pefts_format_and_refuses_those_that_do_not_fit(
    tmp_path: Path, base: Path
) -> None:
    checkpoint = adapt(tmp_path, base, **LORA)
    out = tmp_path / "out"
    export_adapter(checkpoint, out, AdapterExportOptions())
    found = find_adapter_base(str(base), None)
    started = start_from(out, found)
    saved = load_decoder(checkpoint).decoder.state_dict()
    assert started
    assert all(torch.equal(tensor, saved[name]) for name, tensor in started.items())
    for changes, message in (
        ({"rank": 3}, "model.adapter.rank is 3, and the adapters in .* have 4: set it to that"),
        ({"alpha": 2.0}, "model.adapter.alpha is 2.0, and the adapters in .* have 6.0"),
        ({"dora": True}, "model.adapter.dora is True, and the adapters in .* have False"),
        ({"exclude": ("*.up",)}, "are on other layers than model.adapter asks for: they have also base_model"),
    ):
        with pytest.raises(UserError, match=message):
            start_from(out, found, **changes)
    with pytest.raises(UserError, match=r"has no adapter_config.json: give a directory in PEFT's format"):
        start_from(tmp_path, found)
    other = find_adapter_base(str(save(tmp_path / "other/checkpoints", 0, build_decoder(2), {})), None)
    with pytest.raises(UserError, match=r"were trained beside a base with fingerprint .* and this base has"):
        start_from(out, other)
    # Imported again, the same base is the same base.
    again = find_adapter_base(str(save(tmp_path / "again/checkpoints", 0, build_decoder(1), {})), None)
    assert start_from(out, again).keys() == started.keys()

    config = json.loads((out / "adapter_config.json").read_text())
    tensors = load_file(out / WEIGHTS_NAME)
    narrow = {name: tensor[:, :5].contiguous() if "lora_A" in name else tensor for name, tensor in tensors.items()}
    save_file(narrow, out / WEIGHTS_NAME)  # as others write it, without a fingerprint
    with pytest.raises(UserError, match=r"are for another base: .*lora_A.weight is \[4, 5\] there, and \[4, 32\]"):
        start_from(out, found)
    path = out / WEIGHTS_NAME
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, path)
    with pytest.raises(UserError, match="has values that are no finite numbers"):
        start_from(out, found)
    for dtype, value, message in (
        (torch.float64, 1e300, "has values that are no finite numbers"),
        (torch.int32, 1, r"is torch\.int32, not floating point"),
    ):
        save_file({name: torch.full_like(tensor, value, dtype=dtype) for name, tensor in tensors.items()}, path)
        with pytest.raises(UserError, match=message):
            start_from(out, found)
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}, path)
    assert start_from(out, found).keys() == started.keys()
    for forged, message in (
        ({"lora_alpha": 10**400}, "lora_alpha is '1000.*it must be a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is 'nan'"),
        ({"kasa_config": {}}, "kasa_config is {}, and the decoder's adapters have None only"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
    ):
        (out / "adapter_config.json").write_text(json.dumps({**config, **forged}))
        with pytest.raises(UserError, match=message):
            start_from(out, found)
    (out / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON: maximum recursion depth"):
        start_from(out, found)
    (out / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "LOHA"}))
    with pytest.raises(UserError, match="peft_type is 'LOHA', and the decoder's adapters have 'LORA' only"):
        start_from(out, found)


def test_a_proof_that_fails_leaves_no_export(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = adapt(tmp_path, base, **LORA)
    monkeypatch.setattr("genesis.export.adapter.fingerprint", lambda *_: "x")
    original = adapter_config.build_adapter_config
    monkeypatch.setattr(
        adapter_config,
        "build_adapter_config",
        lambda *a, **k: original(*a, **k) | {"r": 4, "lora_alpha": 60},
    )
    with pytest.raises(RunEndedError, match="the proof failed, and the result was removed: logits differ by"):
        export_adapter(checkpoint, tmp_path / "out", AdapterExportOptions())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
def test_tensors_that_are_trained_beside_adapters_are_modules_to_save(tmp_path: Path, is_tied: bool) -> None:
    changes: dict[str, Any] = {} if is_tied else {"has_tied_embeddings": False}
    base = save(tmp_path / "base/checkpoints", 0, build_decoder(1, **changes), {}, **changes)
    extras = ["embedding"] if is_tied else ["embedding", "head"]
    directory = tmp_path / "tuned/checkpoints"
    checkpoint = save_adapted(directory, base, build_decoder(1, **changes), {}, **LORA, also_train=extras)
    proof = export_adapter(checkpoint, tmp_path / "out", AdapterExportOptions())
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    with safe_open(tmp_path / "out" / WEIGHTS_NAME, framework="pt") as file:
        assert FINGERPRINT in file.metadata()
        assert "base_model.model.model.embed_tokens.weight" in file.keys()  # noqa: SIM118 - it is no mapping


# ---- experts

MIXTURE = {"num_experts": 4, "top_k": 2, "ffn_dim": 24, "has_normalized_weights": True}
MIXED: dict[str, Any] = {"ffn_dim": None, "norm_eps": 1e-5, "feed_forward": name_part(MixtureConfig, MIXTURE)}


def adapt_experts(tmp_path: Path, **adapter: Any) -> tuple[Path, Path]:
    """Returns a base with experts, and a checkpoint of adapters beside it."""
    built = {**MIXED, "feed_forward": MixtureConfig(**MIXTURE)}  # type: ignore[arg-type]
    base = save(tmp_path / "base/checkpoints", 0, build_decoder(1, **built), {}, **MIXED)
    given = {**LORA, "include_experts": ["*"], **adapter}
    tuned = save_adapted(tmp_path / "tuned/checkpoints", base, build_decoder(1, **built), {}, shape=MIXED, **given)
    return base, tuned


@pytest.mark.each
@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter",
    [{}, {"rslora": True, "exclude": ["*.gate_up"]}, {"include": [], "exclude": ["blocks.0.*.down"]}],
    ids=["all", "down", "experts alone"],
)
def test_peft_loads_exported_adapters_of_experts_and_a_merged_model_is_the_same(
    tmp_path: Path, adapter: dict[str, Any]
) -> None:
    base, checkpoint = adapt_experts(tmp_path, **adapter)
    proof = export_adapter(checkpoint, tmp_path / "out", AdapterExportOptions())
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    assert proof["logits"]["largest_change_by_the_adapters"] > 100 * proof["logits"]["tolerance"]
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    if adapter.get("include") == []:
        assert config["target_modules"] == []
        assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]
    merged = export_checkpoints([checkpoint], tmp_path / "merged", ExportOptions(is_merged=True))
    assert merged["adapters"]["largest_difference"] <= merged["adapters"]["tolerance"]
    held = load_decoder(checkpoint).decoder
    assert merged["weights"]["num_merged"] == count_adapted(held)
    with torch.no_grad():
        found, plain = load_decoder(tmp_path / "merged").decoder(IDS), load_decoder(base).decoder(IDS)
        torch.testing.assert_close(found, held(IDS), rtol=0, atol=merged["adapters"]["tolerance"])
        assert not torch.allclose(found, plain)
        beside = load_decoder(base, adapter=tmp_path / "out").decoder(IDS)  # as `serve` loads it
        torch.testing.assert_close(beside, held(IDS), rtol=0, atol=1e-6)
    started = read_start(
        AdapterConfig(**{**LORA, "include_experts": ("*",), **adapter, "start": str(tmp_path / "out")}),
        held.config,
        find_adapter_base(str(base), None),
    )
    assert {name for name in started if "experts" in name}
    assert all(torch.equal(tensor, held.get_parameter(name)) for name, tensor in started.items())


def count_adapted(decoder: Any) -> int:
    """Returns the number of weights beside which an adapter lies."""
    names = dict(decoder.named_parameters())
    adapted = [name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")]
    weights = []
    for name in adapted:
        layer = name.removesuffix("_adapter")
        if layer == name:
            weights.append(f"{name}.weight")
        else:
            experts, _, target = layer.rpartition(".")
            weights += [f"{experts}.{one}" for one in (("gate", "up") if target == "gate_up" else ("down",))]
    return sum(names[name].numel() for name in weights)
