"""`model.attention: auto`: what a fit resolves it to, the line that it prints, and what follows if a proof fails."""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info

from genesis.base.device import is_host
from genesis.model.attend.kernel import Place
from genesis.model.attend.table import AUTO, FLASH, KERNELS, MASK, choose_kernel, list_worse, resolve_kernel
from genesis.model.device_proofs import ProvedShape, attention_proof, prove_kernel
from genesis.train.module import GenesisModule
from genesis.train.recipe_policy import RECIPE_POLICY, fill_attention, unify_recipe
from genesis_callbacks.checkpoint import DriftPolicy
from genesis_callbacks.checkpoint.device_proof import DeviceProof

_PROOF: Final = "attention_kernel"
"""Not `attention`: under that name manifests of earlier versions have another value for the same kernel."""


def resolve_attention(given: str, place: Place, restored: Mapping[str, Any] | None, *, is_shown: bool = True) -> str:
    """Returns the kernel of a run that is about to start, and logs the choice on accelerators.

    Args:
        given: As given.
        place: Where it runs.
        restored: The recipe of the checkpoint from which the run continues; its kernel replaces `auto` if it can run.
        is_shown: Whether the model attends by such a kernel; one of another library has its own.

    Raises:
        UserError: The kernel is given, and cannot run there.
    """
    if given != AUTO:
        return resolve_kernel(given, place)
    best = choose_kernel(place)
    kept = None if restored is None else _read_attention(restored, place)
    is_kept = kept in KERNELS and KERNELS[kept].find_obstacle(place) is None
    name = str(kept) if is_kept else best.name
    if is_shown and not is_host(place.kind):
        obstacles = "".join(f"; not by {other}: {obstacle}" for other, obstacle in best.obstacles.items())
        reason = ", as in the checkpoint" if is_kept else obstacles
        rank_zero_info(f"attention runs by {KERNELS[name].describe()}{reason}")
    return name


def build_policy(place: Place) -> DriftPolicy:
    """Returns which keys of a recipe may change: a recipe without a kernel means what ran on such a device then."""
    before = _find_former(place)
    return replace(RECIPE_POLICY, unify=lambda recipe: unify_recipe(fill_attention(recipe, before)))


def _read_attention(recipe: Mapping[str, Any], place: Place) -> Any:
    model = fill_attention(recipe, _find_former(place)).get("model")
    return model.get("attention") if isinstance(model, Mapping) else None


def _find_former(place: Place) -> str:
    return MASK.name if FLASH.find_obstacle(place) is not None else FLASH.name


def build_proofs(
    model: GenesisModule, recipe: MutableMapping[str, Any], place: Place, seq_len: int, *, is_given: bool
) -> tuple[DeviceProof, ...]:
    """Returns the proof of a run's kernel on its accelerator, in the shape in which the run attends.

    If it fails, the run takes the next kernel, and its recipe names that one; a checkpoint with another kernel in its
    recipe is then refused like after any other change. A kernel that the user has named is never replaced.

    A failed proof ends no rank alone: the module has the kernel that this rank would take, or why it has none, and all
    ranks agree in its `setup`, which follows the proofs.

    Args:
        model: The module, whose kernel is resolved.
        recipe: The resolved recipe of the run.
        place: Where it runs.
        seq_len: Tokens of a sequence.
        is_given: Whether the user has named the kernel.
    """
    name, heads = model.attention, model.decoder_config.attention_heads
    if name == MASK.name or heads is None:
        return ()
    shape = ProvedShape(*heads[:3], seq_len, place.dtype, heads.has_sinks)
    proof, following = attention_proof(name, shape, _PROOF), list_worse(name, place)[0]

    def take_next(device: torch.device) -> None:
        KERNELS[name].distrust(device.type)
        if is_given:
            model.attention_failure = (
                f"model.attention is {name}, which does not attend correctly on {device.type}; give --model.attention "
                f"{following}, or auto"
            )
            return
        if following != MASK.name:
            try:
                prove_kernel(following, shape, device)
            except Exception:  # the module's `setup` ends the run
                model.attention_failure = (
                    f"neither {name} nor {following} attends correctly on {device.type}; give --model.attention "
                    f"{MASK.name}"
                )
                return
        model.attention = recipe["model"]["attention"] = following

    return (replace(proof, slow=following, take_slow=take_next),)
