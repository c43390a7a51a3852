"""A base model that learns a chat format stops where its turns end, in every command, with the template it learned.

The tokenizer has `</s>` as its eos and ChatML as its template; the corpus is written by a template of its own.
Reported as huggingface/trl#2059, hiyouga/LLaMA-Factory#7454 and #9338, and huggingface/open-r1#603.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

from genesis.base.run_directory import RunDirectory
from tests.chat.support import CHATML
from tests.cli.conftest import Genesis
from tests.cli.test_chat import build_chat_recipe, prepare
from tests.cli.tiny import write_recipe
from tests.serve.support import start

TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
END, EOS = 16, 4
ASKED, ANSWER = "one two?", "12 \u00e9t\u00e9"


def write_corpus(genesis: Genesis, directory: Path, template: str, name: str = "corpus") -> Path:
    chat: list[dict[str, Any]] = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]
    prepare(genesis, directory, [chat] * 8, "best_fit")
    (directory / "own.jinja").write_text(template)
    recipe = json.loads((directory / "corpus.yaml").read_text())
    recipe |= {"name": name, "chat": {**recipe["chat"], "template": str(directory / "own.jinja")}}
    (directory / "own.yaml").write_text(json.dumps(recipe))
    prepared = genesis("data", "prepare", "--config", str(directory / "own.yaml"))
    assert prepared.status == 0, prepared.err
    assert "the assistant's turns end with <end_of_turn> (16)" in prepared.out
    return directory / name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_model_that_learned_a_format_stops_in_every_command(
    genesis: Genesis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, run = write_corpus(genesis, tmp_path, TEMPLATE, "own"), tmp_path / "run"
    recipe = build_chat_recipe(corpus, run, "best_fit", 2)
    recipe["data"] |= {"num_epochs": 30}
    recipe["checkpoint"]["every_n_steps"] = 20
    del recipe["trainer"]["val_check_interval"]
    fitted = genesis("fit", "--config", str(write_recipe(tmp_path / "recipe.yaml", recipe)))
    assert fitted.status == 0, fitted.err
    assert RunDirectory(run).chat_template.read_text() == TEMPLATE
    tuned = build_chat_recipe(corpus, tmp_path / "tuned", "best_fit", 2) | {"ckpt_path": str(run)}
    tuned["model"]["adapter"] = {"rank": 2}
    tuned["model"]["optimizer"] |= {"lr": 1e-4}
    tuned["checkpoint"]["restore"] = "weights"
    del tuned["trainer"]["val_check_interval"]
    adapted = genesis("fit", "--config", str(write_recipe(tmp_path / "tuned.yaml", tuned)))
    assert adapted.status == 0, adapted.err
    shutil.rmtree(corpus / "chat")  # the run has its own

    greedy = ("--prompt", ASKED, "--temperature", "0", "--max_new_tokens", "40")
    said = genesis("generate", str(run), "--chat", *greedy)
    assert (said.out, said.err) == (f"> {ASKED}\n{ANSWER}\n", "")
    (tmp_path / "other.jinja").write_text(CHATML)
    genesis("generate", str(run), "--chat", "--chat_template", str(tmp_path / "other.jinja"), *greedy)
    assert "the model has learned the chat template" in caplog.text

    with start(run) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        asked: Any = {"model": "latest", "messages": [{"role": "user", "content": ASKED}], "temperature": 0}
        (choice,) = client.chat.completions.create(**asked).choices
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")

    for name, source in (("export", run), ("again", tmp_path / "imported")):
        if name == "again":
            imported = genesis("import", str(tmp_path / "export"), str(source), "--proof", "weights")
            assert imported.status == 0, imported.err
        exported = genesis("export", str(source), str(tmp_path / name))
        assert exported.status == 0, exported.err
        assert (tmp_path / name / "chat_template.jinja").read_text() == TEMPLATE
        held = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert held["eos_token_id"] == [EOS, END]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        prompt = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :].tolist()
        assert ids[-1] == END
        assert tokenizer.decode(ids, skip_special_tokens=True) == ANSWER
        answers = pipeline("text-generation", model=model, tokenizer=tokenizer)
        written = answers(asked["messages"], do_sample=False, max_new_tokens=40)[0]["generated_text"][-1]
        assert written == {"role": "assistant", "content": ANSWER}

    # Adapters alone, as their card says: the base stops at its eos, and has its own template.
    exported = genesis("export", str(tmp_path / "tuned"), str(tmp_path / "adapter"), "--adapter")
    assert exported.status == 0, exported.err
    assert "texts with equal ids" in exported.out
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    base.generation_config.eos_token_id = EOS
    peft: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    peft.generation_config = GenerationConfig.from_pretrained(tmp_path / "adapter")
    assert peft.generation_config.eos_token_id == [EOS, END]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    prompt = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_tensors="pt")
    ids = peft.generate(**prompt, do_sample=False, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :].tolist()
    assert (ids[-1], tokenizer.decode(ids, skip_special_tokens=True)) == (END, ANSWER)
    assert "GenerationConfig.from_pretrained" in (tmp_path / "adapter/README.md").read_text()
