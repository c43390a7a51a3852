"""A proof at the start of a fit that the accelerator does what saves need: under two seconds, and on the CPU no proof.

The engine proves two things: digests on the device equal those on the CPU, for every dtype, and a copy through pinned
memory returns the same bytes. An application adds its own proofs (`DeviceProof`). A proof that fails is named in a
warning and its slow path is used; it never ends the run. The results are in the manifest, beside the package versions,
with `device.deterministic`: whether torch takes only kernels that repeat, without which a resume need not be bit-equal.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..base.local_shards import TensorShard
from .device import DevicePath, PinError, build_stream, is_host, name_device, record_event, working_on
from .digest import DigestScratch, digest_chunk
from .stage import SharedBuffer, place_shards

THREADS_KEY = "device.threads"
_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
_SHAPE = (12, 331)  # odd, so that blocks end within rows
_CUT = (8, 100)  # a chunk in the middle of the tensor, whose runs are not contiguous
_SCRATCH_WORDS = 1 << 10
_COPY_BYTES = (1 << 20) + 4


class DeviceProofError(Exception):
    """A device computes or copies other values than the CPU; the message has the details."""


@dataclass(frozen=True)
class DeviceProof:
    """An operation whose results on a device must equal those on the CPU.

    Attributes:
        name: Name of the operation; for `sums`, the key in the manifest is `device.sums`.
        fast: Value in the manifest if the proof holds.
        slow: Value in the manifest if the proof fails.
        prove: Called with the device; any exception means that the proof fails.
        take_slow: Called with the device if the proof fails.
    """

    name: str
    fast: str
    slow: str
    prove: Callable[[torch.device], None]
    take_slow: Callable[[torch.device], None] = lambda device: None


@dataclass(frozen=True)
class DeviceReport:
    """The results of the proofs on a device.

    Attributes:
        environment: Entries for the manifest; on the CPU only the number of threads, which decides how it adds.
        failures: One line for the user for each proof that failed.
        path: The path that saves take on the device.
        wrong: Names of the operations with other results than on the CPU. The other failures are of operations that the
            device or its driver does not offer.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    path: DevicePath = field(default_factory=DevicePath)
    wrong: frozenset[str] = frozenset()


def prove_device(device: torch.device, others: Sequence[DeviceProof] = ()) -> DeviceReport:
    """Returns the results of the engine's own proofs and of `others` on `device`. No communication."""
    if is_host(device):
        return DeviceReport({THREADS_KEY: str(torch.get_num_threads())})
    proofs = (
        DeviceProof("digests", "device", "host", _prove_digests),
        DeviceProof("copies", "pinned", "pageable", _prove_copies),
        *others,
    )
    found = {proof.name: _find_failure(proof, device) for proof in proofs}
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    environment = {"device": name_device(device), "device.deterministic": "true" if is_deterministic else "false"}
    for proof in proofs:
        environment[f"device.{proof.name}"] = proof.fast if found[proof.name] is None else proof.slow
    failures = tuple(
        f"{device}: the proof of {proof.name} failed, {proof.slow} instead of {proof.fast} from now on: "
        f"{_describe(error)}"
        for proof in proofs
        if (error := found[proof.name]) is not None
    )
    wrong = frozenset(name for name, error in found.items() if isinstance(error, DeviceProofError))
    return DeviceReport(environment, failures, DevicePath(found["copies"] is None, found["digests"] is None), wrong)


def _find_failure(proof: DeviceProof, device: torch.device) -> Exception | None:
    try:
        proof.prove(device)
    except Exception as error:  # a proof never ends the run: a device that is lost ends it soon enough
        proof.take_slow(device)
        return error
    return None


def _describe(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0]
    return line if isinstance(error, DeviceProofError | PinError) else f"{type(error).__name__}: {line}"


def _make_tensor(dtype: torch.dtype) -> Tensor:
    """Returns a tensor of arbitrary but reproducible bits."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = _SHAPE
    raw = torch.randint(256, (rows, columns * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw < 128 if dtype == torch.bool else raw.view(dtype)


def _prove_digests(device: torch.device) -> None:
    """Compares digests of whole tensors and of chunks, of every dtype that the device has."""
    rows, columns = _CUT
    chunks: list[tuple[str, Tensor, Tensor, tuple[int, int]]] = []
    for name in _DTYPE_NAMES:
        tensor = _make_tensor(getattr(torch, name))
        # A device may lack a dtype, such as float64, or support only some copies of it: then no model there uses it.
        with contextlib.suppress(TypeError, NotImplementedError):
            there = tensor.to(device)
            chunks.append((name, tensor, there, (0, 0)))
            cut = there[2:rows, 7:columns].contiguous()
            chunks.append((f"a chunk of {name}", tensor[2:rows, 7:columns], cut, (2, 7)))
    scratch = DigestScratch(device, _SCRATCH_WORDS)
    found = scratch.digest_all([(there, _SHAPE, offsets) for _, _, there, offsets in chunks])
    for (name, tensor, _, offsets), digest in zip(chunks, found, strict=True):
        expected = digest_chunk(tensor, _SHAPE, offsets)
        if digest != expected:
            raise DeviceProofError(f"the digest of {name} is {digest:016x} there, but {expected:016x} on the CPU")


def _prove_copies(device: torch.device) -> None:
    """Copies some bytes to the device, back through pinned memory, to the device again, and compares."""
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, generator=generator)
    part = TensorShard("proof", "state", tuple(tensor.shape), tensor.dtype, (0,), tuple(tensor.shape))
    placed, num_bytes = place_shards([part])
    buffer = SharedBuffer(num_bytes)
    try:
        buffer.pin(device)
        there = tensor.to(device)
        event = record_event(device)
        stream = build_stream(device)
        with working_on(stream):
            stream.wait_event(event)
            buffer.copy_from_device(placed[0], there)
        stream.synchronize()
        if not torch.equal(buffer.view(placed[0]), tensor):
            raise DeviceProofError("a copy through pinned memory came back with other bytes")
        if not torch.equal(buffer.view(placed[0]).to(device), there):
            raise DeviceProofError("a copy from pinned memory arrived with other bytes")
    finally:
        buffer.close()
