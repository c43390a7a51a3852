"""Reward models in transformers' form: exported, read there with the same scores, imported again, and begun."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from genesis.base.errors import UserError
from genesis.chat.options import ChatOptions
from genesis.chat.render import open_renderer
from genesis.export.export import ExportOptions, export_checkpoints
from genesis.export.importing import import_directory
from genesis.export.prove import measure_scores
from genesis.generate.load import load_decoder
from genesis.huggingface.directory import CONFIG_NAME
from genesis.huggingface.shape import FAMILIES, find_family, read_shape, score_by
from genesis.huggingface.weights import read_weights
from genesis.model.scores import score_text
from genesis_callbacks.checkpoint import read_manifest
from tests.chat.support import write_tokenizer
from tests.export.test_families import FAMILIES as MODELS
from tests.export.test_families import SHAPE
from tests.huggingface.test_directory import write_llama
from tests.tiny_runs import build_decoder, save

START = "checkpoints/step-00000000"


def write_theirs(directory: Path, name: str, auto: Any, **changes: Any) -> Any:
    """Writes a model of transformers with random weights, and returns it."""
    kind, shape = MODELS[name]
    config = AutoConfig.for_model(kind, **{**SHAPE, **shape, **changes})
    torch.manual_seed(3)
    model = auto.from_config(config).eval()
    model.save_pretrained(directory)
    return model


def score_theirs(directory: Path, texts: list[list[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids])).logits) for ids in texts]


def make_texts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in (1, 5, 60)]


@pytest.mark.parametrize("changes", [{"dtype": torch.bfloat16}, {"dtype": None}, {"is_nf4": True}])
def test_a_score_head_that_cannot_be_trained_is_not_imported(changes: dict[str, Any], tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", vocab_size=90)
    with pytest.raises(UserError, match="trained in float32 alone: give --dtype float32 beside --as reward_model"):
        import_directory(tmp_path / "llama", tmp_path / "no", has_tokenizer=False, has_new_head=True, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama 3.1", "qwen2", pytest.param("qwen3", marks=pytest.mark.each), "mistral", "olmo2", "qwen3.5"]
)
def test_a_reward_model_begins_with_any_model_and_has_its_scores_in_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path / "causal", name, AutoModelForCausalLM)
    proof = import_directory(tmp_path / "causal", tmp_path / "run", has_tokenizer=False, has_new_head=True)
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]  # of the model that it begins with
    loaded = load_decoder(tmp_path / "run", allows_scores=True)
    assert loaded.decoder.output.weight.shape == (1, 32)
    assert 0.0 < float(loaded.decoder.output.weight.detach().std()) < 0.05
    assert torch.equal(loaded.decoder.embedding.weight, theirs.get_input_embeddings().weight)

    proof = export_checkpoints([tmp_path / "run" / START], tmp_path / "scorer", ExportOptions())
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    texts = make_texts(90)
    wanted = score_theirs(tmp_path / "scorer", texts)
    for ids, score in zip(texts, wanted, strict=True):
        assert score_text(loaded.decoder, ids) == pytest.approx(score, abs=1e-5)

    import_directory(tmp_path / "scorer", tmp_path / "again", has_tokenizer=False)
    again = load_decoder(tmp_path / "again", allows_scores=True).decoder
    state = loaded.decoder.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
    recipe = (tmp_path / "again/recipe.yaml").read_text()
    assert "(--model.adapter.rank 16 --model.adapter.also_train '[head]')" in recipe
    assert "num_scores: 1" in recipe
    assert "genesis.objectives.RewardModel" in recipe


@pytest.mark.slow
def test_a_reward_model_of_transformers_is_read_with_its_scores(tmp_path: Path) -> None:
    write_theirs(
        tmp_path / "theirs", "qwen3", AutoModelForSequenceClassification, num_labels=1, tie_word_embeddings=True
    )
    proof = import_directory(tmp_path / "theirs", tmp_path / "run", has_tokenizer=False)
    assert proof["logits"]["largest_difference"] <= proof["logits"]["tolerance"]
    decoder, texts = load_decoder(tmp_path / "run", allows_scores=True).decoder, make_texts(90)
    for ids, score in zip(texts, score_theirs(tmp_path / "theirs", texts), strict=True):
        assert score_text(decoder, ids) == pytest.approx(score, abs=1e-5)
    with pytest.raises(UserError, match="is a reward model already: leave out --as reward_model"):
        import_directory(tmp_path / "theirs", tmp_path / "no", has_tokenizer=False, has_new_head=True)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs", "qwen2", AutoModelForSequenceClassification)
    with pytest.raises(UserError, match="num_labels is 2, and a reward model has 1"):
        read_shape(tmp_path / "theirs")


@pytest.mark.slow
def test_the_padding_of_an_export_is_no_token_that_ends_a_text(tmp_path: Path) -> None:
    """Of a tokenizer that pads with what ends its turns, transformers would read the score one token too early."""
    write_llama(tmp_path / "llama", tie_word_embeddings=True, vocab_size=400)
    write_tokenizer(tmp_path / "llama")
    settings = json.loads((tmp_path / "llama/tokenizer_config.json").read_text())
    (tmp_path / "llama/tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    import_directory(tmp_path / "llama", tmp_path / "run", has_tokenizer=True, has_new_head=True)
    export_checkpoints([tmp_path / "run" / START], tmp_path / "scorer", ExportOptions())
    content = json.loads((tmp_path / "scorer" / CONFIG_NAME).read_text())
    assert content["architectures"] == ["LlamaForSequenceClassification"]
    loaded = load_decoder(tmp_path / "scorer", allows_scores=True)
    assert content["pad_token_id"] not in (None, *loaded.stop_ids)
    texts = [[5, 6, loaded.text_tokenizer.eos_id or 0], [9]]
    for ids, score in zip(texts, score_theirs(tmp_path / "scorer", texts), strict=True):
        assert score_text(loaded.decoder, ids) == pytest.approx(score, abs=1e-5)
    # A batch, as the card has it, by the export's own tokenizer.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "scorer")
    assert tokenizer.pad_token_id == content["pad_token_id"]
    answers = ("So.", "A place to be brief, and no more.")
    chats = [[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}] for answer in answers]
    batch = tokenizer.apply_chat_template(chats, padding=True, return_tensors="pt", return_dict=True)
    assert batch["attention_mask"].sum(1).unique().numel() == 2
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer").eval()
    with torch.no_grad():
        found = model(**batch).logits[:, 0].tolist()
    renderer = open_renderer(loaded.text_tokenizer, ChatOptions())
    for chat, score in zip(chats, found, strict=True):
        assert score_text(loaded.decoder, renderer.render(chat).ids.tolist()) == pytest.approx(score, abs=1e-5)
    card = (tmp_path / "scorer/README.md").read_text()
    assert "tokenizer.apply_chat_template(messages, return_tensors='pt', return_dict=True)" in card
    assert "AutoModelForSequenceClassification" in card


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_no_proof_holds_for_scores_that_are_not_finite_or_that_differ(place: int, wrong: float) -> None:
    theirs = [0.5, -20.0, 0.25]
    assert measure_scores(theirs, theirs) == {
        "largest_logit": 20.0,
        "largest_difference": 0.0,
        "tolerance": pytest.approx(2e-3),
    }
    broken = [wrong if index == place else score for index, score in enumerate(theirs)]
    for ours, others in ((broken, broken), (theirs, broken), (broken, theirs)):
        with pytest.raises(UserError, match="a score is not finite"):
            measure_scores(ours, others)
    with pytest.raises(UserError, match=r"scores differ by 0\.01, more than the rounding tolerance 0\.002"):
        measure_scores([0.5, -20.0, 0.26], theirs)


def test_the_classes_of_reward_models_are_those_of_transformers() -> None:
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for family in FAMILIES:
        if family.model_type in known:
            assert score_by(family, "it").architecture == known[family.model_type]
        else:
            with pytest.raises(UserError, match=f"has no class for reward models of type {family.model_type}"):
                score_by(family, "it")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scorer") / "run"
    return save(directory / "checkpoints", 1, build_decoder(5, num_scores=1), {}, num_scores=1)


def test_where_a_model_writes_a_reward_model_is_refused_in_one_line(scorer: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a reward model, which scores texts and writes none: ask it by POST /v1/s"):
        load_decoder(scorer)
    options = ExportOptions(layout="gguf", dtype="f16")
    gguf = pytest.importorskip("genesis.export.gguf")
    with pytest.raises(UserError, match="is a reward model, which scores texts"):
        gguf.export_gguf([scorer], tmp_path / "gguf", options)


@pytest.mark.slow
def test_the_layout_of_genesis_keeps_scores_of_families_that_transformers_lacks(scorer: Path, tmp_path: Path) -> None:
    export_checkpoints([scorer], tmp_path / "out", ExportOptions(layout="safetensors"))
    with pytest.raises(UserError, match="is a reward model"):
        load_decoder(tmp_path / "out")
    decoder = load_decoder(tmp_path / "out", allows_scores=True).decoder
    wanted = load_decoder(scorer, allows_scores=True).decoder
    assert score_text(decoder, [1, 2, 3]) == pytest.approx(score_text(wanted, [1, 2, 3]), abs=1e-6)
    shape = read_manifest(scorer).recipe["model"]["decoder"]
    assert shape["num_scores"] == 1
    assert find_family(decoder.config).tensors["output.weight"] == "score.weight"
    assert read_weights(tmp_path / "out", decoder.config, None).keys() == wanted.state_dict().keys()
