"""A hash of a batch, by which two runs are recognised that train on the same data in the same order.

The hash is the sum, modulo 2**53, of a hash of each sample (row) of each tensor. So it does not depend on the
order of the samples within a step, on how they are divided into micro-batches or among ranks, on the names of
the inputs, or on the device. Integers count by value, whatever their type; other numbers as float32.

A row's hash is a dot product with fixed odd random weights modulo 2**64, which is then mixed. NumPy computes
it on the host, and a few kernels that nobody waits for on a device; both give the same number.
"""

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fp8scope.guard import Guard
from fp8scope.scalars import is_tensor

if TYPE_CHECKING:
    import torch

NAME = "data_hash"
MODULUS = 1 << 53
"""A float64, in which scalars are stored, holds every integer below it."""
MAX_ROW = 16_384
"""Values of a row that are read; of a longer row every second, third, ..."""
MAX_DEPTH = 8
MAX_LEAVES = 1_000

Int64s = NDArray[np.int64]


def _splitmix(count: int) -> Int64s:
    """The first outputs of SplitMix64 (Steele et al. 2014), made odd so that they are invertible."""
    z = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


WEIGHTS = _splitmix(MAX_ROW)
LENGTH_WEIGHT, MIX_1, MIX_2 = (int(weight) for weight in _splitmix(3) ^ np.int64(0x5DEECE66D << 1))
_device_weights: "dict[torch.device, torch.Tensor]" = {}


def data_hash(*batches: Any) -> int:
    """A hash of one batch, or of all micro-batches of a step, from 0 to 2**53 - 1.

    A batch is a tensor, an array, a text, a number, or any nesting of lists and dictionaries of these; what
    is none of them is ignored. The first dimension of a tensor with several dimensions is the samples; any
    other tensor is one sample. Equal samples give an equal hash in every process. A tensor on a device makes
    this function wait for it; `fp8scope.attach(..., data_hash=True)` does not wait.
    """
    total = _Sum()
    for batch in batches:
        total.add(batch)
    return total.number()


class _Sum:
    """The hash of samples so far: a number, and one per device that has not been waited for."""

    def __init__(self) -> None:
        self._host = 0
        self._on_device: dict[torch.device, torch.Tensor] = {}
        self._empty = True

    def add(self, batch: Any) -> None:
        """Add the samples of a batch."""
        for count, leaf in enumerate(_leaves(batch, 0)):
            if count == MAX_LEAVES:
                break
            self._empty = False
            if isinstance(leaf, np.ndarray):
                self._host += of_array(leaf)
            else:
                before = self._on_device.get(leaf.device)
                value = of_tensor(leaf)
                self._on_device[leaf.device] = value if before is None else before + value

    def number(self) -> int:
        """The hash. Waits for the devices."""
        return (self._host + sum(int(value) for value in self._on_device.values())) % MODULUS

    def scalar(self) -> "float | torch.Tensor | None":
        """The hash as a value to log, which waits for nothing; None if there were no samples."""
        if self._empty:
            return None
        if not self._on_device:
            return float(self._host % MODULUS)
        first, *others = self._on_device.values()
        total = first + self._host % MODULUS
        for other in others:
            total = total + other.to(total.device, non_blocking=True)
        return total & (MODULUS - 1)


def _leaves(value: Any, depth: int) -> "Iterator[NDArray[Any] | torch.Tensor]":
    """The arrays and device tensors in a batch. Tensors on the host are arrays."""
    if is_tensor(value):
        yield from _tensor_leaves(value)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind in "biufc":
            yield array
        elif array.dtype.kind in "OSU" and depth < MAX_DEPTH:
            yield from _leaves(array.tolist(), depth + 1)
    elif isinstance(value, str | bytes):
        text = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        yield np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), np.int64)
    elif isinstance(value, int | float):
        yield np.array(value % 2**63 if isinstance(value, int) else value)
    elif isinstance(value, Mapping | Sequence | Set) and depth < MAX_DEPTH:
        items = list(value.values() if isinstance(value, Mapping) else value)
        numbers = _as_numbers(items)
        if numbers is not None:
            yield numbers
        else:
            for item in items:
                yield from _leaves(item, depth + 1)


def _as_numbers(items: list[Any]) -> "NDArray[Any] | None":
    """A list of numbers, or of equally long lists of numbers, as an array; None if it is none."""
    first = items[0] if items else None
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if not isinstance(first, int | float):
        return None
    try:
        array = np.asarray(items)
    except (ValueError, TypeError, OverflowError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _tensor_leaves(tensor: "torch.Tensor") -> "Iterator[NDArray[Any] | torch.Tensor]":
    # A sharded tensor (DTensor) counts by its shard: the ranks' hashes add up.
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    from fp8scope_kernels.torch_internals import is_functorch_wrapped_tensor

    # Inside of torch.func's transforms there are no values.
    if is_functorch_wrapped_tensor(tensor):
        return
    if tensor.is_sparse or tensor.is_nested or tensor.is_meta or not tensor.numel():
        return
    if not tensor.is_cpu:
        yield tensor
        return
    if tensor.is_floating_point() and tensor.element_size() < 4:
        # NumPy has no bfloat16.
        tensor = tensor.float()
    yield tensor.resolve_conj().resolve_neg().numpy()


def of_array(array: NDArray[Any]) -> int:
    """The sum of the hashes of an array's rows."""
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    if not array.size:
        return 0
    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    length = rows.shape[1]
    if length > MAX_ROW:
        rows = rows[:, :: -(-length // MAX_ROW)]
    if rows.dtype.kind == "f":
        rows = np.ascontiguousarray(rows, np.float32).view(np.int32)
    dots: Int64s = rows.astype(np.int64, copy=False) @ WEIGHTS[: rows.shape[1]]
    dots += np.int64(_wrapped(length * LENGTH_WEIGHT))
    dots ^= dots >> 31
    dots *= MIX_1
    dots ^= dots >> 29
    dots *= MIX_2
    return int(dots.sum()) & 0xFFFF_FFFF_FFFF_FFFF


def of_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """The same as `of_array`, computed on the tensor's device as an int64 that nobody has waited for."""
    import torch

    with torch.no_grad():
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        rows = tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(1, -1)
        length = rows.shape[1]
        if length > MAX_ROW:
            rows = rows[:, :: -(-length // MAX_ROW)]
        if rows.is_floating_point():
            rows = rows.float().contiguous().view(torch.int32)
        weights = _device_weights.get(rows.device)
        if weights is None:
            weights = _device_weights[rows.device] = torch.from_numpy(WEIGHTS).to(rows.device)
        # No matrix product: CUDA has none for integers.
        dots = (rows.to(torch.int64) * weights[: rows.shape[1]]).sum(1)
        dots += _wrapped(length * LENGTH_WEIGHT)
        dots ^= dots >> 31
        dots *= MIX_1
        dots ^= dots >> 29
        dots *= MIX_2
        return dots.sum()


def _wrapped(number: int) -> int:
    """The number modulo 2**64 as a signed integer of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


class HashedStep(Protocol):
    """The open step: `fp8scope.step.Step`."""

    scalars: dict[str, float]
    device_scalars: "dict[str, torch.Tensor]"

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Add values to the step."""


class BatchHasher:
    """Logs the hash of all batches of a step as its `data_hash`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._step: HashedStep | None = None
        self._sum = _Sum()

    def add(self, step: HashedStep, inputs: Iterable[Any]) -> None:
        """Add the inputs of a forward pass to a step. Does not wait for a device, and never raises."""
        try:
            if step is not self._step:
                self._step, self._sum = step, _Sum()
            for value in inputs:
                self._sum.add(value)
            scalar = self._sum.scalar()
        except Exception as error:
            self._guard.caught("hashing a batch", error)
            return
        if scalar is not None:
            step.log({NAME: scalar})
        else:
            self._guard.warn_once(
                "no data hash",
                "the model is called with no tensor: log the hash of the batch yourself, "
                "run.log(data_hash=fp8scope.data_hash(batch)).",
            )

    def forget(self) -> None:
        """Leave out the batches of the open step so far: they were not trained on."""
        if self._step is not None:
            self._step.scalars.pop(NAME, None)
            self._step.device_scalars.pop(NAME, None)
        self._step = None


class Hashing(Protocol):
    """Adds batches to the open step: `fp8scope.session.session.Session`."""

    def hash_inputs(self, inputs: Iterable[Any]) -> None:
        """Add the inputs of a forward pass to the open step, if there is one."""


class BatchHook:
    """A forward hook of a watched model that hands its inputs to a session, which it does not keep alive.

    In a copy of the model the hook does nothing.
    """

    def __init__(self, session: Hashing | None = None) -> None:
        self._session = None if session is None else weakref.ref(session)

    def __call__(self, module: "torch.nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Both need torch.
        import torch

        from fp8scope.observe.tensors.base import inside_backward, is_traced

        if self._session is None or is_traced():
            return
        session = self._session()
        if session is not None and module.training and torch.is_grad_enabled() and not inside_backward():
            session.hash_inputs((*args, *kwargs.values()))

    def __reduce__(self) -> tuple[type["BatchHook"], tuple[()]]:
        return BatchHook, ()
