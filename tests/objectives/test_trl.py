"""DPO and reward models beside TRL's trainers: equal weights and an equal batch give equal loss, gradients and log."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genesis.huggingface.llama import LLAMA
from genesis.huggingface.shape import find_family, write_shape
from genesis.model.decoder import Decoder
from genesis.objectives import RewardModel
from genesis.objectives.preference import CPO, DPO, ORPO, PairObjective, SimPO
from tests.chat.support import write_tokenizer
from tests.objectives.support import TINY, make_decoder, make_pairs, window_of
from tests.objectives.test_preference import gradients_of, run, table_of
from tests.objectives.test_reward_model import SCORER, make_rated_pairs, make_scorer, step

PAIRS = make_pairs(6)


def to_transformers(decoder: Decoder) -> Any:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(**write_shape(LLAMA, TINY), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    left = model.load_state_dict(LLAMA.to_theirs(decoder.state_dict()), strict=False)
    assert left == (["lm_head.weight"], [])  # tied to the embedding
    return model.train()


def trl_loss(policy: Any, reference: Any, directory: Path, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Returns the loss of TRL's trainer on the pairs in one batch, and what it logs."""
    trl = import_module("trl")
    write_tokenizer(directory / "tokenizer")
    file = str(directory / "tokenizer/tokenizer.json")
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_file=file, eos_token="</s>", pad_token="<pad>"
    )
    arguments = trl.DPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        report_to="none",
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=False,
        **options,
    )
    rows = import_module("datasets").Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    trainer = trl.DPOTrainer(
        model=policy, ref_model=reference, args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    examples = []
    for pair in PAIRS:
        asked = int(pair.chosen.has_label.argmax())
        sides = {
            "chosen_ids": pair.chosen.tokens[asked:].tolist(),
            "rejected_ids": pair.rejected.tokens[asked:].tolist(),
        }
        examples.append({"prompt_ids": pair.chosen.tokens[:asked].tolist(), **sides})
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    logged = {name: float(torch.tensor(values).double().mean()) for name, values in trainer._metrics["train"].items()}
    return loss, logged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"beta": 0.3}, {"beta": 0.3}),
        ({"beta": 2.0, "length_normalisation": True}, {"beta": 2.0, "loss_type": ["sigmoid_norm"]}),
        ({"sft_weight": 0.5}, {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ({"loss": "robust", "label_smoothing": 0.2}, {"beta": 0.1, "loss_type": ["robust"], "label_smoothing": 0.2}),
        ({"loss": "hinge", "beta": 0.3}, {"beta": 0.3, "loss_type": ["hinge"]}),
        ({"loss": "ipo", "beta": 0.3, "length_normalisation": True}, {"beta": 0.3, "loss_type": ["ipo"]}),
    ],
    ids=["plain", "length_normalised", "with_sft", "robust", "hinge", "ipo"],
)
@pytest.mark.filterwarnings("ignore")
def test_loss_gradients_and_log_equal_those_of_trl(
    ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    policy, reference = make_decoder(0), make_decoder(1)
    objective = DPO(**ours)
    objective.log_probs = table_of(reference, PAIRS)
    loss, sums = run(objective, policy, window_of(PAIRS, 2))
    gradients = LLAMA.to_theirs(gradients_of(policy, loss))
    model = to_transformers(policy)
    wanted, logged = trl_loss(model, to_transformers(reference), tmp_path, **theirs)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, name
    if "length_normalisation" in ours:  # TRL logs rewards without the normalisation
        return
    values = objective.measure(sums)
    pairs = {
        "rewards/chosen": "rewards_chosen",
        "rewards/rejected": "rewards_rejected",
        "rewards/margins": "reward_margin",
        "rewards/accuracies": "reward_accuracy",
        "logps/chosen": "log_probs_chosen",
        "logps/rejected": "log_probs_rejected",
    }
    for name, own in pairs.items():
        assert values[own] == pytest.approx(logged[name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (SimPO(beta=1.5, gamma=0.6), {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.6, "label_smoothing": 0.0}),
        (CPO(beta=0.3, label_smoothing=0.1), {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.1}),
        (ORPO(weight=0.2), {"beta": 0.2}),
    ],
    ids=["simpo", "cpo", "orpo"],
)
@pytest.mark.filterwarnings("ignore")
def test_losses_without_a_reference_and_their_gradients_equal_those_of_trl(
    objective: PairObjective, options: dict[str, Any]
) -> None:
    """TRL's losses of mean or summed log-probabilities; ours get these times beta."""
    log_probs = (-torch.rand(64, 2, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    theirs = SimpleNamespace(alpha=0.0, accelerator=SimpleNamespace(device="cpu"), **options)
    if isinstance(objective, ORPO):
        trainer = import_module("trl.experimental.orpo").ORPOTrainer
        wanted = -trainer.odds_ratio_loss(theirs, *log_probs.unbind(1))[0]
    else:
        trainer = import_module("trl.experimental.cpo").CPOTrainer
        wanted = trainer.cpo_loss(theirs, *log_probs.unbind(1))[0]
    rewards = objective.beta * log_probs
    found = objective.lose(rewards, rewards[:, 0] - rewards[:, 1])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(losses.sum(), log_probs)[0] for losses in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"center_rewards_coefficient": 0.2}], ids=["margins", "centred"])
@pytest.mark.filterwarnings("ignore")
def test_the_loss_and_gradients_of_a_reward_model_equal_those_of_trl(options: dict[str, float], tmp_path: Path) -> None:
    trl, transformers = import_module("trl"), import_module("transformers")
    collate = import_module("trl.trainer.reward_trainer").DataCollatorForPreference
    decoder, pairs = make_scorer(), make_rated_pairs()
    content = write_shape(find_family(SCORER), SCORER)
    config = transformers.LlamaConfig(**content, pad_token_id=0, attn_implementation="eager")
    theirs = transformers.LlamaForSequenceClassification(config)
    theirs.load_state_dict(find_family(SCORER).to_theirs(decoder.state_dict()))
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer/tokenizer.json"), eos_token="</s>", pad_token="<pad>"
    )
    arguments = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    rows = import_module("datasets").Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    trainer = trl.RewardTrainer(model=theirs, args=arguments, train_dataset=rows, processing_class=tokenizer)
    theirs.config.pad_token_id = 0
    examples = [
        {"chosen_ids": pair.chosen.tokens.tolist(), "rejected_ids": pair.rejected.tokens.tolist(), "margin": pair.value}
        for pair in pairs
    ]
    wanted = trainer.compute_loss(theirs.train(), collate(pad_token_id=0)(examples))
    wanted.backward()
    loss, logged = step(RewardModel(**options), decoder, pairs, 2, is_padded=False, missing=0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
    due = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = find_family(SCORER).to_theirs({name: one.grad for name, one in decoder.named_parameters()})
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, due[name], rtol=1e-4, atol=1e-5)
    (accuracy,), (margin,) = (trainer._metrics["train"][name] for name in ("accuracy", "margin"))
    assert logged["reward_accuracy"] == pytest.approx(accuracy)
    assert logged["reward_margin"] == pytest.approx(margin, abs=1e-5)
