"""A model of transformers comes in as it is, trains, and goes back to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from genesis.base.errors import RunEndedError, UserError
from genesis.export import foreign
from genesis.export.adapter import AdapterExportOptions, export_adapter
from genesis.export.add_tokens import AddTokensOptions, add_tokens
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.foreign import import_foreign
from genesis.export.importing import save_weights
from genesis.export.upcycle import UpcycleOptions, upcycle
from genesis.generate.load import load_decoder
from genesis.model.adapter import AdapterConfig
from genesis.model.foreign.decoder import choose_auto
from genesis.model.recipe import build_decoder_config
from genesis.tokenizer.addition import TokenAddition
from genesis.tokenizer.open import open_tokenizer
from genesis.train.adapter_base import find_adapter_base, read_start
from genesis_callbacks.base.manifest import read_manifest
from tests.model.foreign.models import configure, describe, make_theirs, wrap
from tests.tiny_runs import save_adapted
from tests.tokenizer.test_huggingface import qwen


@pytest.mark.parametrize(("kind", "documents"), [("gemma3_text", "packed"), ("granite", "packed"), ("falcon", "rows")])
def test_a_model_comes_back_with_every_tensor_and_its_logits(tmp_path: Path, kind: str, documents: str) -> None:
    changes = {"num_kv_heads": 4, "alibi": False, "multi_query": False} if kind == "falcon" else {}
    theirs = make_theirs(configure(kind, **changes))
    theirs.save_pretrained(tmp_path / "theirs")
    proof = import_foreign(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    assert proof["documents"] == documents
    checkpoint = tmp_path / "run/checkpoints/step-00000000"
    config = build_decoder_config(read_manifest(checkpoint).recipe["model"]["decoder"], "the manifest")
    assert config.body is not None
    export_checkpoints([checkpoint], tmp_path / "back", ExportOptions())
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    wanted = theirs.state_dict()
    assert back.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in back.state_dict().items())
    ids = torch.arange(20)[None]
    torch.testing.assert_close(back(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 1,000 are read"),
        ({"num_attention_heads": 10**400}, "num_attention_heads is 1000000"),
        (
            {"num_hidden_layers": 1000},
            r"config\.json describes a model of 1,000 layers, and the files have \d+ tensors",
        ),
        ({"intermediate_size": 10**8}, r"config\.json describes a model of .* values, and the files have"),
        ({"model_type": "qwen3_moe"}, "describes a model of"),
        ({"model_type": ["llama"]}, r"config\.json"),
        ({"model_type": None}, "transformers has no model_type None"),
    ],
)
def test_what_a_configuration_claims_is_compared_before_the_model_is_built(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_theirs(configure("llama")).save_pretrained(tmp_path / "theirs")
    content = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps(content | changes))
    monkeypatch.setattr(foreign, "load_model", None)
    with pytest.raises(UserError, match=message) as caught:
        import_foreign(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("inner", ["text_config", "vision_config"])
def test_classes_and_code_that_an_inner_configuration_names_are_not_passed_on(tmp_path: Path, inner: str) -> None:
    make_theirs(configure("gemma3")).save_pretrained(tmp_path / "theirs")
    content = json.loads((tmp_path / "theirs/config.json").read_text())
    content[inner] |= {
        "num_labels": 10**12,
        "attn_implementation": "own/kernels",
        "auto_map": {"AutoConfig": "own.Own"},
    }
    (tmp_path / "theirs/config.json").write_text(json.dumps(content))
    import_foreign(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("phi3", {"rank": 4, "include": ["*.qkv_proj", "*.down_proj"]}),
        ("gpt_oss", {"rank": 2, "dora": True, "include": ["*.1.*.o_proj"]}),
        ("llava", {"rank": 2, "include": ["*.q_proj", "*.down_proj"]}),
    ],
)
def test_peft_loads_adapters_beside_a_model_of_transformers(tmp_path: Path, kind: str, adapter: dict[str, Any]) -> None:
    make_theirs(configure(kind)).save_pretrained(tmp_path / "theirs")
    import_foreign(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    base = tmp_path / "run/checkpoints/step-00000000"
    model = load_decoder(base, allows_body=True).model
    shape = {
        **dict.fromkeys(("num_heads", "num_kv_heads", "ffn_dim")),
        **read_manifest(base).recipe["model"]["decoder"],
    }
    tuned = save_adapted(tmp_path / "tuned/checkpoints", base, model, {}, shape=shape, **adapter)
    proof = export_adapter(tuned, tmp_path / "out", AdapterExportOptions(base_name=str(tmp_path / "theirs")))
    assert proof["logits"]["largest_change_by_the_adapters"] > 100 * proof["logits"]["tolerance"]
    theirs = choose_auto(configure(kind)).from_pretrained(tmp_path / "theirs")
    adapted: Any = PeftModel.from_pretrained(theirs, str(tmp_path / "out")).eval()
    ids = torch.arange(30)[None]
    with torch.no_grad():
        ours = load_decoder(tuned, allows_body=True).model(ids)
        torch.testing.assert_close(ours, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    found = find_adapter_base(str(base), None)
    again = AdapterConfig(start=str(tmp_path / "out"), **adapter)
    config = build_decoder_config(shape, "the manifest")
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in read_start(again, config, found).items())
    (tmp_path / "theirs/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=f"a model of type llama, and the adapters fit one of type {kind}"):
        export_adapter(tuned, tmp_path / "no", AdapterExportOptions(base_name=str(tmp_path / "theirs")))


def test_commands_that_read_parts_of_a_decoder_refuse_a_model_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    tokenizer = open_tokenizer(qwen(tmp_path / "tokenizer"))
    kind = configure("llama", vocab_size=640)
    state = wrap(make_theirs(kind)).state_dict()
    checkpoint = save_weights(state, describe(kind), tokenizer, tmp_path / "checkpoints")
    before = sorted(tmp_path.iterdir())
    options = AddTokensOptions(tokenizer=tmp_path / "tokenizer")
    line = r"the model is of another library \(TransformersConfig\)"
    with pytest.raises(UserError, match=line):
        add_tokens(checkpoint, tmp_path / "new", TokenAddition(tokens=("<|tool|>",)), options)
    with pytest.raises(UserError, match=line):
        upcycle(checkpoint, tmp_path / "new", UpcycleOptions(num_experts=4, top_k=2))
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_without_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    theirs = make_theirs(configure("llama"))
    state = theirs.state_dict()
    del state["model.norm.weight"]
    theirs.save_pretrained(tmp_path / "theirs", state_dict=state)
    with pytest.raises(UserError, match=r"missing keys, such as model\.norm\.weight"):
        import_foreign(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    assert not (tmp_path / "run").exists()


def test_a_value_that_is_not_that_of_the_files_fails_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_theirs(configure("llama")).save_pretrained(tmp_path / "theirs")
    honest = foreign.save_weights

    def spoil(state: Any, *arguments: Any, **options: Any) -> Path:
        changed = state["model.model.norm.weight"].clone()
        changed[0] += 1e-6
        return honest({**state, "model.model.norm.weight": changed}, *arguments, **options)

    monkeypatch.setattr(foreign, "save_weights", spoil)
    with pytest.raises(RunEndedError, match=r"the values of model\.model\.norm\.weight differ"):
        import_foreign(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    assert not (tmp_path / "run").exists()
