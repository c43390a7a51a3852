"""Training on prompts through the command: allowed by an argument alone, resumed, and refused with another reward."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from genesis.tokenizer.open import open_tokenizer
from genesis_callbacks.base.manifest import read_committed_hash
from genesis_callbacks.checkpoint import read_manifest
from tests.cli.conftest import Genesis
from tests.cli.test_run import committed_steps
from tests.cli.tiny import build_recipe, write_recipe
from tests.tiny_runs import build_decoder, save
from tests.train.rollouts import GROUP_SIZE, SEQ_LEN, write_case

ALLOWED = ("--allow_reward_code", "true")


@pytest.fixture
def case(tmp_path: Path) -> Path:
    return write_case(tmp_path / "case")


def write_prompt_recipe(case: Path, run_dir: Path, **changes: Any) -> Path:
    recipe = build_recipe(case, run_dir)
    vocab_size = open_tokenizer(case / "tokenizer").vocab_size
    recipe["model"]["decoder"] |= {"vocab_size": vocab_size, "max_seq_len": SEQ_LEN}
    recipe["model"]["objective"] = {"class_path": "genesis.objectives.GSPO", "init_args": {"clip_low": 0.01}}
    recipe["data"] = {
        "seq_len": SEQ_LEN,
        "micro_batch_size": 4,
        "global_batch_size": 1,
        "prompts": {
            "sources": [{"name": "questions", "paths": [str(case / "prompts.jsonl")]}],
            "reward": f"{case / 'reward.py'}:reward",
            "tokenizer": str(case / "tokenizer"),
            "group_size": GROUP_SIZE,
            "steps_per_rollout": 3,
            "max_new_tokens": 5,
        },
    }
    del recipe["trainer"]["val_check_interval"]
    return write_recipe(case / "recipe.yaml", recipe, changes)


def test_a_reward_function_runs_only_if_an_argument_allows_it(genesis: Genesis, case: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = case / "reward.py"
    path.write_text(f"open({str(case / 'ran')!r}, 'w').close()\n{path.read_text()}")
    recipe = write_prompt_recipe(case, run_dir)
    refused = genesis("fit", "--config", str(recipe))
    assert refused.status == 2
    assert "allow it by --allow_reward_code true" in refused.err
    by_itself = write_prompt_recipe(case, run_dir, allow_reward_code=True)
    refused = genesis("fit", "--config", str(by_itself))
    assert refused.status == 2
    assert "allow_reward_code is in a recipe, which must not allow itself" in refused.err
    assert not (case / "ran").exists()


@pytest.mark.slow
def test_a_run_on_prompts_is_resumed_and_continued_as_text(genesis: Genesis, case: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = write_prompt_recipe(case, run_dir)
    fitted = genesis("fit", "--config", str(recipe), *ALLOWED)
    assert fitted.status == 0, fitted.err
    assert committed_steps(run_dir) == [2, 4]
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert "allow_reward_code" not in resolved
    assert resolved["data"]["prompts"]["group_size"] == GROUP_SIZE
    (case / "reward.py").write_text("def reward(messages, text, columns):\n    return 0.5\n")
    longer = ("--config", str(recipe), *ALLOWED, "--trainer.max_steps", "5", "--ckpt_path", "latest")
    changed = genesis("fit", *longer, "--checkpoint.allow_changed", "[trainer.max_steps]")
    assert changed.status == 2
    assert "reward" in changed.err
    resumed = genesis("fit", *longer, "--checkpoint.allow_changed", "[reward, trainer.max_steps]")
    assert resumed.status == 0, resumed.err
    # The fifth step has an answer that the first reward function scored.
    assert committed_steps(run_dir)[-1] == 5
    said = genesis("generate", str(run_dir), "--prompt", "Question", "--max_new_tokens", "3")
    assert said.status == 0, said.err


@pytest.mark.slow
@pytest.mark.each
def test_a_resume_finds_its_reward_model_again_and_refuses_another_template(
    genesis: Genesis, case: Path, tmp_path: Path
) -> None:
    scorer, run_dir = shutil.copytree(case / "tokenizer", case / "scorer"), tmp_path / "run"
    first = save(scorer / "checkpoints", 1, build_decoder(1, num_scores=1), {}, num_scores=1)
    rewards = [{"function": "reward_model", "model": str(scorer)}]
    changes: dict[str, Any] = {"data.prompts.reward": None, "data.prompts.rewards": rewards}
    given = ("--config", str(write_prompt_recipe(case, run_dir, **changes)))
    fitted = genesis("fit", *given, "--trainer.max_steps", "2")
    assert fitted.status == 0, fitted.err
    save(scorer / "checkpoints", 2, build_decoder(2, num_scores=1), {}, num_scores=1)
    resumed = genesis("fit", *given, "--ckpt_path", "latest", "--checkpoint.allow_changed", "[trainer.max_steps]")
    assert resumed.status == 0, resumed.err
    identities = [read_manifest(run_dir / f"checkpoints/step-0000000{step}").identity for step in (2, 4)]
    for identity in identities:
        assert identity["reward_models"] == read_committed_hash(first)
        assert identity["reward_templates"] == identities[0]["reward_templates"]
    (scorer / "chat").mkdir()
    (scorer / "chat/template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    refused = genesis("fit", *given, "--ckpt_path", "latest")
    assert refused.status == 2
    assert "reward_templates" in refused.err


@pytest.mark.filterwarnings("ignore:Training failed .UserError.")  # which the command prints
def test_an_error_of_the_reward_function_is_one_line_with_the_row(genesis: Genesis, case: Path, tmp_path: Path) -> None:
    (case / "reward.py").write_text("def reward(messages, text, columns):\n    return columns['answer']\n")
    failed = genesis("fit", "--config", str(write_prompt_recipe(case, tmp_path / "run")), *ALLOWED)
    assert failed.status == 2
    errors = [line for line in failed.err.splitlines() if line.startswith("genesis: error")]
    assert len(errors) == 1
    assert "prompts.jsonl, line " in errors[0]
    assert errors[0].endswith("KeyError: 'answer'; correct it")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Training failed .RunEndedError.")  # which the command prints
def test_a_server_that_is_not_there_ends_a_fit_in_one_line_and_writes_no_answer(
    genesis: Genesis, case: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    rollouts = {"by": "openai", "url": "http://127.0.0.1:9", "retry_seconds": 0.1}
    recipe = write_prompt_recipe(case, run_dir, **{"data.prompts.rollouts": rollouts})
    failed = genesis("fit", "--config", str(recipe), *ALLOWED)
    assert failed.status == 1
    errors = [line for line in failed.err.splitlines() if line.startswith("genesis: error")]
    assert len(errors) == 1
    assert "the server http://127.0.0.1:9 cannot be reached (ClientConnectorError), for 0.1 s" in errors[0]
    (weights,) = (run_dir / "served" / "weights").iterdir()
    assert weights.name.startswith("0000000000-")
    lower = genesis("fit", "--config", str(recipe), *ALLOWED, "--data.prompts.rollouts.max_lag", "1")
    assert lower.status == 2
    assert "data.prompts.rollouts.max_lag is 1; it must be at least 2" in lower.err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.objective.init_args.clip_low", "1", "model.objective.clip_low is 1.0; it must be above 0 and below 1"),
        ("data.prompts.group_size", "1", "data.prompts.group_size is 1; it must be at least 2"),
    ],
)
def test_a_wrong_value_is_refused_by_its_reason_alone(
    genesis: Genesis, case: Path, tmp_path: Path, key: str, value: str, message: str
) -> None:
    recipe = write_prompt_recipe(case, tmp_path / "run")
    refused = genesis("fit", "--config", str(recipe), f"--{key}", value)
    assert refused.status == 2
    assert refused.err.startswith("genesis: error: ")
    assert refused.err.endswith(f"{message}\n")
    assert "Union" not in refused.err


@pytest.mark.slow
def test_prompts_are_written_by_the_template_that_the_weights_have_learned(
    genesis: Genesis, case: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}<start_of_turn>{{ m.role }}{{ tone }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant{{ tone }}\n{% endif %}"
    )
    changes = {"trainer.max_steps": 1, "checkpoint.every_n_steps": 1}
    learning = {"data.prompts.template": str(own), "data.prompts.variables": {"tone": " calmly"}}
    first = write_prompt_recipe(case, tmp_path / "first", **changes, **learning)
    fitted = genesis("fit", "--config", str(first), *ALLOWED)
    assert fitted.status == 0, fitted.err
    learned = tmp_path / "first" / "chat" / "template.jinja"
    assert learned.read_text().endswith("%}\n" + own.read_text())

    second = write_prompt_recipe(case, tmp_path / "second", **changes)
    from_first = ("--ckpt_path", str(tmp_path / "first"), "--checkpoint.restore", "weights")
    fitted = genesis("fit", "--config", str(second), *ALLOWED, *from_first)
    assert fitted.status == 0, fitted.err
    resolved = yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())
    assert resolved["data"]["prompts"]["template"] == str(learned)
    assert (tmp_path / "second" / "chat" / "template.jinja").read_text() == learned.read_text()
    other = tmp_path / "other.jinja"
    other.write_text(own.read_text().replace("calmly", "").replace("\n{{", "{{"))
    differing = write_prompt_recipe(case, tmp_path / "third", **changes, **{"data.prompts.template": str(other)})
    genesis("fit", "--config", str(differing), *ALLOWED, *from_first)
    assert f"the model has learned the chat template {learned}, and {other} writes" in caplog.text
