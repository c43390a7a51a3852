"""The chat template in a recipe of `genesis fit`: what the weights have learned, and what the run learns."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.errors import UserError, blaming
from genesis.base.run_directory import RunDirectory
from genesis.chat.learned import describe_other_template
from genesis.cli.adapter import find_continued
from genesis.data.training_data import TrainingData
from genesis.generate.checkpoint_reference import read_reference
from genesis.generate.load import find_learned_template
from genesis.recipe.resolved import ResolvedRecipe
from genesis_callbacks.base.files import replace_file
from genesis_callbacks.base.untrusted import read_text
from genesis_callbacks.checkpoint import CheckpointError, read_manifest

_OPTION: Final = "data.prompts.template"


def find_chat_template(recipe: ResolvedRecipe) -> tuple[Path | None, dict[str, Any]]:
    """Returns the file of the chat template that a run's first weights have learned, if any, and options by it.

    Prompts that the model answers in training are written with it, unless the recipe names another one.

    Args:
        recipe: The recipe, with the checkpoint that the run begins with.

    Raises:
        UserError: A file of a template cannot be read.
    """
    wanted, learned = recipe.get("ckpt_path"), None
    if wanted is None:
        return None, {}
    # A checkpoint that cannot be used is refused before training, with its remedy.
    with suppress(UserError, CheckpointError, OSError):
        continued = find_continued(read_reference(wanted, run_dir=Path(recipe.get("run_dir"))))
        learned = None if continued is None else find_learned_template(continued, read_manifest(continued))
    if learned is None or recipe.get("data.prompts") is None:
        return learned, {}
    given = recipe.get(_OPTION)
    line = describe_other_template(None if given is None else Path(given), learned)
    if line is not None:
        rank_zero_info(f"{line} ({_OPTION})")
    return learned, {_OPTION: given or learned}


class RecordChatTemplate(Callback):
    """Writes the template that a run learns, or else the one that its weights have learned, into its directory.

    Args:
        run_dir: The run's directory.
        learned: The template that the weights have learned with which the run begins; None without one.
    """

    def __init__(self, run_dir: Path, learned: Path | None) -> None:
        self._run_dir, self._learned = run_dir, learned

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file on rank 0, when no check can refuse the run any more."""
        data: TrainingData = vars(trainer)["datamodule"].training
        with blaming(self._learned, "restore it"):
            before = None if self._learned is None else read_text(self._learned)
        text = data.chat_template if trainer.is_global_zero else None
        if text is not None and before is not None and text != before:
            rank_zero_info(
                f"the weights have learned the chat template {self._learned}, and the data are written in another one; "
                "this run learns and keeps the template of its data"
            )
        if trainer.is_global_zero and (text or before):
            file = RunDirectory(self._run_dir).chat_template
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, (text or before or "").encode())
