"""Writes the recipe of an import: everything that `genesis fit` needs to train from its weights, except the corpus."""

from pathlib import Path
from typing import Any, Final

from genesis.model.decoder import DecoderConfig
from genesis.model.recipe import dump_decoder_config
from genesis.recipe_yaml import dump_yaml
from genesis.run_directory import RunDirectory

_SEQ_LEN: Final = 2048
_HEAD: Final = """\
# Trains from the imported weights, with your own corpus:
#   genesis fit --config {recipe} --data.corpus corpora/NAME
# {corpus}
# Adapt rates, sizes and numbers of steps to your data. To resume a run that was stopped:
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
    head = _HEAD.format(recipe=RunDirectory(place).imported_recipe, corpus=corpus)
    recipe = build_recipe(place, place / checkpoint, config, tokenizer_hash)
    text = head + dump_yaml(recipe)
    RunDirectory(directory).imported_recipe.write_text(text, encoding="utf-8")


def build_recipe(out: Path, checkpoint: Path, config: DecoderConfig, tokenizer_hash: str | None) -> dict[str, Any]:
    """Returns the recipe of a new run next to the import, which loads only the weights and trains at a low rate."""
    return {
        "run_dir": str(out.with_name(f"{out.name}-continued")),
        "seed_everything": 0,
        "ckpt_path": str(checkpoint),
        "model": {"decoder": dump_decoder_config(config), "optimizer": {"name": "adamw", "lr": 2e-5}},
        "data": {
            **({} if tokenizer_hash is None else {"tokenizer_hash": tokenizer_hash}),
            "seq_len": min(_SEQ_LEN, config.max_seq_len),
            "micro_batch_size": 1,
            "global_batch_size": 16,
        },
        "schedule": {"by": "updates", "total_updates": 1000, "warmup_updates": 50},
        "checkpoint": {"every_n_steps": 100, "restore": "weights"},
        "trainer": {"max_steps": 1000, "gradient_clip_val": 1.0, "log_every_n_steps": 10},
    }
