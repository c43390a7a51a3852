"""Watches optimizers: counts their steps and updates, and lists the parameters that they moved."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_SAMPLED_PARAMETERS = 8
_SAMPLED_ELEMENTS = 1024

_GRADIENT = attrgetter("grad")


def _sample(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns some of the gradients."""
    # From the last one on: the first is often an embedding, whose first rows may have no gradient.
    return gradients[:: -max(1, len(gradients) // _SAMPLED_PARAMETERS)]


def _has_signal(gradients: Sequence[Tensor]) -> bool:
    """Returns whether gradients are not all zeros; on an accelerator always True."""
    # A False ends in a comparison less and never in a refused save. Reading gradients on a device would make each save
    # wait for the device's queue, so they count as non-zero there.
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local.is_sparse:
            local = local._values()  # the rows of a sparse embedding; `coalesce` would sort them first
        if local.device.type != "cpu" or bool(local.reshape(-1)[:_SAMPLED_ELEMENTS].any()):
            return True
    return False


class _Names:
    """The names of one list of parameters, looked up again only for another list: training waits for a lookup."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._found: frozenset[str] = frozenset()

    def find(self, parameters: list[Tensor], names: Mapping[int, str]) -> frozenset[str]:
        known = self._parameters
        if len(parameters) != len(known) or not all(map(is_, parameters, known)):
            self._parameters = parameters
            self._found = frozenset(names[id(parameter)] for parameter in parameters if id(parameter) in names)
        return self._found


class StepWatch:
    """Counts the steps of a run's optimizers by hooks on them.

    A step is an update if a parameter of that optimizer still has a gradient after it: a vetoed window has none. A
    fused optimizer that gets a number `found_inf`, as under a gradient scaler, decides on the device whether it steps:
    such a step counts as no update.

    Args:
        optimizers: The run's.
        before_step: Called before each step of an optimizer; None for nothing.
        has_scaler: Whether the run scales its gradients.
        names: Names of the model's parameters by their `id`.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        *,
        before_step: Callable[[], None] | None,
        has_scaler: bool,
        names: Mapping[int, str],
    ) -> None:
        self._has_scaler = has_scaler
        self._names = names
        self._known: dict[int, _Names] = {}
        self._moved_by: dict[int, tuple[Optimizer, int]] = {}
        self._handles: list[RemovableHandle] = []
        self.num_steps = 0
        self.num_updates = 0
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            if before_step is not None:
                self._handles.append(optimizer.register_step_pre_hook(lambda *_, act=before_step: act()))

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_steps += 1
        has_gradient = any(
            parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
        )
        # The kernel of a fused optimizer gets a number, by which it skips: from GradScaler, which takes the number away
        # again after the step, or from the project. Only the device knows then whether anything moved.
        is_scaled = self._has_scaler and getattr(optimizer, "_step_supports_amp_scaling", False)
        is_hidden = is_scaled or getattr(optimizer, "found_inf", None) is not None
        if has_gradient and not is_hidden:
            self.num_updates += 1
            self._moved_by[id(optimizer)] = (optimizer, self.num_updates)
        else:
            self._moved_by.pop(id(optimizer), None)

    def sample_moved(self, *, since_updates: int) -> Callable[[], frozenset[str]]:
        """Returns a function that finds the parameters that the optimizers' last steps moved, by name.

        These have a gradient and a lr. An optimizer without an update since `since_updates` moved nothing, whatever
        gradients its parameters have by now: a backward pass for another optimizer may run through them. It moved
        nothing either if a sample of its gradients is all zeros. Call this at a window's end; the function may be
        called by another thread while training continues, before the next call of this.

        Args:
            since_updates: `num_updates` at the save to compare with.
        """
        found: list[tuple[_Names, list[Tensor], Sequence[Tensor]]] = []
        for optimizer, num_updates in self._moved_by.values():
            if num_updates <= since_updates:
                continue
            parameters: list[Tensor] = []
            for group in optimizer.param_groups:
                if float(group.get("lr", 1.0)) > 0.0:
                    parameters += group["params"]
            gradients = list(map(_GRADIENT, parameters))
            if any(map(is_, gradients, repeat(None))):
                parameters = [parameter for parameter in parameters if parameter.grad is not None]
                gradients = [gradient for gradient in gradients if gradient is not None]
            # Only a sample, because the gradients would stay in memory beside those of the next backward.
            found.append((self._known.setdefault(id(optimizer), _Names()), parameters, _sample(gradients)))

        def find() -> frozenset[str]:
            with torch.no_grad():
                moved = [names.find(parameters, self._names) for names, parameters, some in found if _has_signal(some)]
            return frozenset().union(*moved)

        return find

    def remove(self) -> None:
        """Removes the hooks; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()
