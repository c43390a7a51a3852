"""Encodes the state of loops, schedulers, callbacks and data as plain JSON: every type is restored, without pickle.

JSON's own types are stored unchanged. A value of any other type becomes an object with the key `"!"`, which names the
type. Tensors and arrays are not part of the JSON: the encoder returns them by their path in the value, and they are
stored with the other tensors.
"""

import base64
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..base.checkpoint_errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError
from ..base.manifest import dtype_from_name, dtype_name

TAG = "!"
Json = dict[str, Any] | list[Any] | str | int | float | bool | None
_PLAIN = frozenset({type(None), bool, int, str})
"""Types that are stored unchanged. They skip all other checks, because training waits for the encoding."""
_FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
}


class _Encoder:
    def __init__(self, names: Mapping[int, str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names = names

    def encode(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:
            return {
                key: item if type(item) in _PLAIN else self.encode(item, f"{path}.{key}") for key, item in value.items()
            }
        encode = _ENCODERS.get(kind, _Encoder._encode_by_base)
        return encode(self, value, path)

    def _encode_by_base(self, value: Any, path: str) -> Json:
        kind = type(value)
        if isinstance(value, Enum):
            return {TAG: "enum", "module": kind.__module__, "class": kind.__qualname__, "name": value.name}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {TAG: "numpy", "dtype": value.dtype.str, "data": value.tobytes().hex()}
        if isinstance(value, PurePath):
            return {TAG: "path", "value": str(value)}
        raise UnsupportedStateError(
            f"cannot save {path} (of type {kind.__module__}.{kind.__qualname__}): a checkpoint holds only tensors and "
            "plain values (numbers, strings, lists, dicts, ...); change the callback or hook that put it there"
        )

    def _items(self, values: Any, path: str) -> list[Any]:
        if _PLAIN.issuperset(map(type, values)):
            return list(values)
        return [self.encode(item, f"{path}.{index}") for index, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [self.encode(key, f"{path}.{index}.key"), self.encode(item, f"{path}.{index}.value")]
            for index, (key, item) in enumerate(value.items())
        ]

    def _sequence(self, value: Any, path: str) -> Json:
        return {TAG: type(value).__name__, "items": self._items(value, path)}

    def _set(self, value: Any, path: str) -> Json:
        return {TAG: type(value).__name__, "items": self._items(sorted(value, key=repr), path)}

    def _mapping(self, value: Any, path: str) -> Json:
        return {TAG: type(value).__name__, "items": self._pairs(value, path)}

    def _defaultdict(self, value: Any, path: str) -> Json:
        factory = getattr(value.default_factory, "__name__", None)
        if value.default_factory is not None and _FACTORIES.get(str(factory)) is not value.default_factory:
            raise UnsupportedStateError(f"{path}: a defaultdict of {value.default_factory!r} cannot be saved")
        return {TAG: "defaultdict", "factory": factory, "items": self._pairs(value, path)}

    def _deque(self, value: Any, path: str) -> Json:
        return {TAG: "deque", "maxlen": value.maxlen, "items": self._items(value, path)}

    def _bytes(self, value: Any, path: str) -> Json:
        return {TAG: type(value).__name__, "base64": base64.b64encode(value).decode()}

    def _complex(self, value: Any, path: str) -> Json:
        return {TAG: "complex", "parts": [self.encode(value.real, path), self.encode(value.imag, path)]}

    def _tensor(self, value: Tensor, path: str) -> Json:
        name = self._names.get(id(value))
        if name is not None:
            return {TAG: "tensor", "name": name}
        if isinstance(value, DTensor):
            raise UnsupportedStateError(
                f"{path}: a sharded tensor belongs to the model or its optimizer, not to other state"
            )
        return {TAG: "tensor", "name": self._keep(value.detach(), path)}

    def _keep(self, tensor: Tensor, path: str) -> str:
        name = path
        while name in self.tensors:  # the two tensors of {"a.b": tensor, "a": {"b": tensor}} have the same path
            name += "'"
        self.tensors[name] = tensor
        return name

    def _array(self, value: Any, path: str) -> Json:
        try:
            tensor = torch.from_numpy(np.array(value, order="C", copy=True))
        except TypeError as error:
            raise UnsupportedStateError(f"{path}: an array of {value.dtype} cannot be saved: {error}") from error
        return {TAG: "ndarray", "name": self._keep(tensor, path)}


_ENCODERS: dict[type, Callable[[_Encoder, Any, str], Json]] = {
    dict: _Encoder._mapping,
    Counter: _Encoder._mapping,
    OrderedDict: _Encoder._mapping,
    defaultdict: _Encoder._defaultdict,
    tuple: _Encoder._sequence,
    list: lambda encoder, value, path: encoder._items(value, path),
    Tensor: _Encoder._tensor,
    torch.Size: _Encoder._sequence,
    set: _Encoder._set,
    frozenset: _Encoder._set,
    deque: _Encoder._deque,
    bytes: _Encoder._bytes,
    bytearray: _Encoder._bytes,
    complex: _Encoder._complex,
    np.ndarray: _Encoder._array,
    torch.dtype: lambda _, value, path: {TAG: "dtype", "value": dtype_name(value)},
    torch.device: lambda _, value, path: {TAG: "device", "value": str(value)},
    timedelta: lambda _, value, path: {TAG: "timedelta", "parts": [value.days, value.seconds, value.microseconds]},
    range: lambda _, value, path: {TAG: "range", "parts": [value.start, value.stop, value.step]},
}


def encode_tagged(value: Any, path: str, names: Mapping[int, str] | None = None) -> tuple[Json, dict[str, Tensor]]:
    """Returns `value` as plain JSON, and the tensors in it by their path.

    Dicts keep their order; sets are written in a fixed order. The tensors share memory with those in `value`; arrays
    are copied.

    Args:
        value: Any nesting of the types in the module's tables.
        path: The path of `value`, with which every name begins.
        names: Tensors that are already stored under another name, by `id`: the JSON refers to them by that name, and
            they are not among the returned tensors.

    Raises:
        UnsupportedStateError: A value in it has another type; the message has its path.
    """
    encoder = _Encoder(names or {})
    return encoder.encode(value, path), encoder.tensors


def _pairs(content: Any, decode: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(item)) for key, item in content["items"]]


def _decode_enum(content: Any) -> Enum:
    # Only modules that the program has imported itself: an untrusted file must not cause an import or a call.
    found: Any = sys.modules.get(str(content["module"]))
    for name in str(content["class"]).split("."):
        found = getattr(found, name, None)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise CorruptCheckpointError(
            f"the state names an enum {content['module']}.{content['class']} that this program has not imported"
        )
    return found[content["name"]]


def _decode_numpy(content: Any) -> Any:
    return np.frombuffer(bytes.fromhex(content["data"]), dtype=np.dtype(content["dtype"]))[0]


_Decoder = Callable[[Any, Callable[[Any], Any], Mapping[str, Tensor]], Any]
_DECODERS: dict[str, _Decoder] = {
    "float": lambda content, decode, tensors: float(content["value"]),
    "complex": lambda content, decode, tensors: complex(*(decode(part) for part in content["parts"])),
    "dict": lambda content, decode, tensors: dict(_pairs(content, decode)),
    "Counter": lambda content, decode, tensors: Counter(dict(_pairs(content, decode))),
    "OrderedDict": lambda content, decode, tensors: OrderedDict(_pairs(content, decode)),
    "defaultdict": lambda content, decode, tensors: defaultdict(
        _FACTORIES[content["factory"]] if content["factory"] else None, _pairs(content, decode)
    ),
    "tuple": lambda content, decode, tensors: tuple(map(decode, content["items"])),
    "Size": lambda content, decode, tensors: torch.Size(map(decode, content["items"])),
    "set": lambda content, decode, tensors: set(map(decode, content["items"])),
    "frozenset": lambda content, decode, tensors: frozenset(map(decode, content["items"])),
    "deque": lambda content, decode, tensors: deque(map(decode, content["items"]), content["maxlen"]),
    "bytes": lambda content, decode, tensors: base64.b64decode(content["base64"]),
    "bytearray": lambda content, decode, tensors: bytearray(base64.b64decode(content["base64"])),
    "enum": lambda content, decode, tensors: _decode_enum(content),
    "numpy": lambda content, decode, tensors: _decode_numpy(content),
    "path": lambda content, decode, tensors: Path(content["value"]),
    "dtype": lambda content, decode, tensors: dtype_from_name(content["value"]),
    "device": lambda content, decode, tensors: torch.device(content["value"]),
    "timedelta": lambda content, decode, tensors: timedelta(*content["parts"]),
    "range": lambda content, decode, tensors: range(*content["parts"]),
    "tensor": lambda content, decode, tensors: tensors[content["name"]],
    "ndarray": lambda content, decode, tensors: tensors[content["name"]].numpy(),
}

# A program that only inspects a checkpoint need not import an enum's class.
_CHECKERS: dict[str, _Decoder] = {
    **_DECODERS,
    "enum": lambda content, decode, tensors: tuple(str(content[key]) for key in ("module", "class", "name")),
}


def decode_tagged(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that `encode_tagged` encoded.

    Args:
        content: The JSON.
        tensors: Name to tensor, for at least the names in the JSON.

    Raises:
        CorruptCheckpointError: The JSON names an unknown type, or a tensor that is missing.
    """
    return _decode(content, tensors, _DECODERS)


def check_tagged(content: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Checks that an encoded state can be decoded, without its tensors' bytes and without its enums' classes.

    Args:
        content: The JSON.
        dtypes: Dtypes of the existing tensors, by name.

    Raises:
        CorruptCheckpointError: The state cannot be decoded.
    """
    named = named_tensors(content)
    lacking = named - dtypes.keys()
    if lacking:
        raise CorruptCheckpointError(f"the state names a tensor that was not saved: {min(lacking)}")
    _decode(content, {name: torch.empty(0, dtype=dtypes[name]) for name in named}, _CHECKERS)


def _decode(content: Any, tensors: Mapping[str, Tensor], decoders: Mapping[str, _Decoder]) -> Any:
    if isinstance(content, list):
        return [_decode(item, tensors, decoders) for item in content]
    if not isinstance(content, dict):
        return content
    if TAG not in content:
        return {key: _decode(item, tensors, decoders) for key, item in content.items()}
    kind = content[TAG]
    decode = decoders.get(kind) if isinstance(kind, str) else None
    if decode is None:
        raise CorruptCheckpointError(f"the state holds a {str(kind)[:80]!r}, which is unknown to this version")
    try:
        return decode(content, lambda item: _decode(item, tensors, decoders), tensors)
    except KeyError as error:
        raise CorruptCheckpointError(f"the state lacks {error} in a {kind!r}") from error
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        raise CorruptCheckpointError(f"the state holds a {kind!r} that cannot be decoded: {error}") from error


def named_tensors(content: Any) -> set[str]:
    """Returns the names of the tensors that an encoded state refers to.

    Raises:
        CorruptCheckpointError: A name is not a string.
    """
    if isinstance(content, list):
        return set().union(*(named_tensors(item) for item in content))
    if not isinstance(content, dict):
        return set()
    if content.get(TAG) in ("tensor", "ndarray"):
        name = content.get("name")
        if not isinstance(name, str):
            raise CorruptCheckpointError(f"the state has a tensor without a name: {str(name)[:80]}")
        return {name}
    return set().union(*(named_tensors(item) for item in content.values()))
