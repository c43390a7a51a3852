"""Weights of a base that decoders with different adapters share in memory."""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor

from genesis.model.language_model import LanguageModel


class SharedBases:
    """The weights of bases that are in memory, for decoders that are loaded later. Thread-safe.

    It keeps nothing in memory itself: the weights of a base live as long as a decoder that has them. Only decoders that
    do not change their weights may share them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[str, threading.Lock] = {}
        self._decoders: WeakKeyDictionary[LanguageModel, tuple[str, frozenset[str]]] = WeakKeyDictionary()

    @contextmanager
    def loading(self, key: str) -> Iterator[Mapping[str, Tensor]]:
        """Gives the weights of a base that are in memory; other loads of the same base wait until the `with` ends.

        Args:
            key: The base, its device and its dtype.
        """
        with self._lock:
            load = self._loads.setdefault(key, threading.Lock())
        with load:
            yield self._find(key)

    def add(self, key: str, decoder: LanguageModel, names: Collection[str]) -> None:
        """Adds a loaded decoder.

        Args:
            key: The base, its device and its dtype.
            decoder: The decoder.
            names: The tensors of the decoder that are those of the base.
        """
        with self._lock:
            self._decoders[decoder] = (key, frozenset(names))

    def _find(self, key: str) -> dict[str, Tensor]:
        with self._lock:
            decoders = [(decoder, names) for decoder, (own, names) in self._decoders.items() if own == key]
        return {name: decoder.get_parameter(name).detach() for decoder, names in decoders for name in names}
