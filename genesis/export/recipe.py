"""Writes the recipe of an import: everything that `genesis fit` needs to train from its weights, except the corpus."""

from pathlib import Path
from typing import Any, Final

from genesis.base.run_directory import RunDirectory
from genesis.data.sizes import AUTO
from genesis.model.decoder import DecoderConfig
from genesis.model.recipe import dump_decoder_config
from genesis.optim.recipe import DEFAULT
from genesis.recipe.yaml import dump_yaml

_NUM_EPOCHS: Final = 3
_RATES: Final = {"lr": 2e-5, "adapter_lr": 2e-4}
"""Adapters start at zero and are small: in 20 updates on conversations the rate of all weights taught them nearly
nothing (a held-out loss of 3.12 became 3.01), ten times this rate 2.13."""
_REWARD_MODEL: Final = "genesis.objectives.RewardModel"
_HEAD: Final = """\
# Trains from the imported weights, with your own corpus:
#   genesis fit --config {recipe} --data.corpus corpora/NAME
# {corpus}
# Sequences and batches are as large as the corpus asks for; the start prints both.
# It trains for data.num_epochs; --trainer.max_steps N or --data.num_tokens N replaces that. Adapters
# (--model.adapter.rank 16{also}) learn at adapter_lr; --model.optimizer.lr replaces both rates.
# To resume a run that was stopped:
#   genesis fit --config {recipe} --data.corpus corpora/NAME --ckpt_path latest
"""
_OWN: Final = "Prepare the corpus with this tokenizer: genesis data prepare --tokenizer {out} ..."
_NONE: Final = "The corpus must have the ids of the model, which was imported without a tokenizer."


def write_recipe(
    out: Path, directory: Path, checkpoint: str, config: DecoderConfig, tokenizer_hash: str | None
) -> None:
    """Writes `recipe.yaml`.

    Args:
        out: The final directory of the import; paths in the recipe are absolute, so that it works everywhere.
        directory: The staging directory in which the import is made.
        checkpoint: The checkpoint's path within the directory.
        config: The model's shape.
        tokenizer_hash: The hash of the imported tokenizer; None without one.
    """
    place = out.absolute()
    corpus = _NONE if tokenizer_hash is None else _OWN.format(out=place)
    also = "" if config.num_scores is None else " --model.adapter.also_train '[head]'"
    head = _HEAD.format(recipe=RunDirectory(place).imported_recipe, corpus=corpus, also=also)
    recipe = build_recipe(place, place / checkpoint, config, tokenizer_hash)
    text = head + dump_yaml(recipe)
    RunDirectory(directory).imported_recipe.write_text(text, encoding="utf-8")


def build_recipe(out: Path, checkpoint: Path, config: DecoderConfig, tokenizer_hash: str | None) -> dict[str, Any]:
    """Returns the recipe of a new run next to the import, which loads only the weights and trains at a low rate."""
    return {
        "run_dir": str(out.with_name(f"{out.name}-continued")),
        "seed_everything": 0,
        "ckpt_path": str(checkpoint),
        "model": {
            "decoder": dump_decoder_config(config),
            "optimizer": {"class_path": DEFAULT, "init_args": {**_RATES}},
            **({"objective": {"class_path": _REWARD_MODEL}} if config.num_scores else {}),
        },
        "data": {
            **({} if tokenizer_hash is None else {"tokenizer_hash": tokenizer_hash}),
            "seq_len": AUTO,
            "micro_batch_size": 1,
            "global_batch_size": AUTO,
            "num_epochs": _NUM_EPOCHS,
        },
        "schedule": {"by": "updates", "warmup_share": 0.05},
        "checkpoint": {"every_n_steps": 100, "every_n_minutes": 10, "restore": "weights"},
        "trainer": {"gradient_clip_val": 1.0, "log_every_n_steps": 1},
    }
