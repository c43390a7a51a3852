import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.finetune import main, pack_rows, pair_rows, summarise
from benchmarks.workers.finetune_protocol import IGNORE_INDEX
from benchmarks.workers.genesis_finetuner import build_window, build_window_of_pairs
from benchmarks.workers.protocol import Burst
from genesis.base.errors import UserError
from genesis.chat.render import RenderedChat
from genesis.tokenizer.open import open_tokenizer
from tests.chat.support import write_tokenizer


def _write_model(directory: Path) -> None:
    write_tokenizer(directory)
    tokenizer = open_tokenizer(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.eos_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


@pytest.mark.bench
@pytest.mark.usefixtures("forked_finetuners")
def test_every_kind_trains_with_the_losses_of_peft_and_trl(tmp_path: Path) -> None:
    _write_model(tmp_path / "model")
    conversations = tmp_path / "conversations.jsonl"
    turns = [[{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": "x" * n}] for n in (3, 9)]
    conversations.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    out = tmp_path / "record.json"
    words = ["--model", str(tmp_path / "model"), "--conversations", str(conversations), "--seq_len", "40"]
    counts = {"loss_steps": 3, "loss_tokens": 24, "rank": 2, "pairs": 2, "threads": 1, "answer_tokens": 6}
    words += [word for name, count in counts.items() for word in (f"--{name}", str(count))]

    assert main([*words, "--out", str(out)]) == 0

    record = json.loads(out.read_text(encoding="utf-8"))
    assert list(record["kinds"]) == ["lora", "full", "dpo", "kto", "reward", "grpo"]
    for name, kind in record["kinds"].items():
        assert [len(speeds) for speeds in kind["tokens_per_second_by_round"].values()] == [2, 2]
        assert kind["memory_over_trl"] > 0
        if name == "grpo":  # whose answers are random
            continue
        assert {one: len(losses) for one, losses in kind["losses"].items()} == {
            "genesis": 3,
            "trl": 3,
            "reference": 3,
        }
        assert all(difference < 1e-4 for difference in kind["largest_loss_difference"].values())
    # The kinds train different tensors, so that only the first losses are equal.
    lora, full, dpo, kto, reward = (kind["losses"]["genesis"] for kind in [*record["kinds"].values()][:5])
    assert lora[0] == full[0]
    assert lora[2] != full[2]
    assert dpo[0] == pytest.approx(math.log(2))
    assert kto[0] == pytest.approx(0.5)
    assert all(losses[2] != losses[0] for losses in (dpo, kto, reward))
    assert str(tmp_path) not in out.read_text() + out.with_suffix(".md").read_text()


def _chat(ids: list[int], num_learned: int) -> RenderedChat:
    learned = np.arange(len(ids)) >= len(ids) - num_learned
    return RenderedChat(np.array(ids, dtype=np.int32), learned)


def test_rows_hold_conversations_in_turn_and_are_cut_where_they_end() -> None:
    first, second = pack_rows([_chat([1, 2, 3], 2), _chat([4, 5], 1)], [4, 5])
    assert (first.input_ids, first.seq_lengths) == ([1, 2, 3, 4], [3, 1])
    assert first.labels == [IGNORE_INDEX, 2, 3, IGNORE_INDEX]
    assert (second.input_ids, second.seq_lengths) == ([5, 1, 2, 3, 4], [1, 3, 1])
    assert second.labels == [5, IGNORE_INDEX, 2, 3, IGNORE_INDEX]


def test_a_pair_has_one_prompt_two_answers_and_no_padding() -> None:
    chats = [_chat([1, 2, 3], 2), _chat([4, 5], 1)]
    chosen, rejected = pair_rows(chats, [4])
    assert (chosen.input_ids, rejected.input_ids) == ([1, 2, 3, 5], [1, 5, 2, 3])
    assert chosen.labels[0] == rejected.labels[0] == IGNORE_INDEX
    assert chosen.labels[1:] == chosen.input_ids[1:]

    (micro_batch,) = build_window_of_pairs([chosen, rejected]).micro_batches
    assert micro_batch.input_ids.tolist() == [[1, 2, 3, 1, 5, 2]]
    assert micro_batch.labels.tolist() == [[2, 3, 5, 5, 2, 3]]


def test_our_label_is_the_next_token_of_the_same_conversation() -> None:
    (row,) = pack_rows([_chat([1, 2, 3], 2), _chat([4, 5], 2)], [5])
    window = build_window([row])
    (micro_batch,) = window.micro_batches
    # The learned 4 begins a conversation, and follows no token.
    assert micro_batch.labels.tolist() == [[2, 3, IGNORE_INDEX, 5, IGNORE_INDEX]]
    assert micro_batch.document_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert micro_batch.document_offsets is not None
    assert micro_batch.document_offsets.tolist() == [0, 3, 5]
    assert window.num_valid_tokens == 3


def test_speed_and_memory_are_ratios_to_trl_and_losses_are_compared_step_by_step() -> None:
    bursts = {"genesis": [Burst(1.0, 2.0, 8.0, 60, None, None)], "trl": [Burst(2.0, 2.0, 8.0, 100, None, None)]}
    found = summarise(bursts, {"genesis": [1.0, 2.0], "trl": [1.0, 2.5], "reference": [1.25, 2.0]}, {})
    assert found["speed_over_trl"]["median"] == 2.0
    assert found["speed_over_trl_by_cpu_time"]["median"] == 1.0
    assert found["memory_over_trl"] == 0.6
    assert found["largest_loss_difference"] == {"trl": 0.5, "reference": 0.25}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--pairs", "0"], "--pairs is 0: it must be at least 1"),
        (["--kinds", "lora,ppo"], "--kinds has 'ppo'; there are lora, full, dpo, kto, reward, grpo"),
        (["--batch_size", "3"], "--batch_size is 3: dpo has pairs of rows; give an even number"),
        (["--model", "nowhere"], "nowhere does not exist"),
    ],
)
def test_a_wrong_option_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        main(words)
