"""Finds the moment in a backward at which a rank has all of its own gradients. Under DDP it then waits for others."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class LastGradient:
    """Calls a function in each backward after the first ones, when the gradient that came last in these is there.

    The order of gradients follows from the model, so that it is learned once, and later backwards have a single hook.

    Args:
        module: The module that trains.
        act: The function. It must neither wait nor change a gradient.
    """

    def __init__(self, module: nn.Module, act: Callable[[], None]) -> None:
        self._act = act
        self._last: Tensor | None = None
        trained = [each for each in module.parameters() if each.requires_grad]
        self._handles = [_hook(each, self._note) for each in trained]

    def _note(self, parameter: Tensor) -> None:
        self._last = parameter

    def learn(self) -> None:
        """Takes the gradient that came last until now; later calls do nothing."""
        if self._last is not None:
            last, self._last = self._last, None
            self.remove()
            self._handles = [_hook(last, lambda _: self._act())]

    def remove(self) -> None:
        """Removes all hooks."""
        while self._handles:
            self._handles.pop().remove()


def _hook(parameter: Tensor, act: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(act)  # type: ignore[no-untyped-call]
    return handle
