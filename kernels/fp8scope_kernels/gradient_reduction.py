"""Averages gradients over ranks in FP8, with automatic pre-scaling.

After Peng et al., "FP8-LM: Training FP8 Large Language Models" (2023). All ranks cast their gradients g_i
with one scale, from the largest amax among them, and add up the FP8 numbers:

    s = M / max_i amax(g_i)     q_i = FP8(g_i * s * u)     q = FP8(q_1 + ... + q_N)     q / (N * s * u)

With a large pre-scale u the sum saturates where ranks agree; with a small u small gradients are flushed. u
therefore adapts, per tensor: it halves when more than `threshold` of the values are at the format's maximum,
and otherwise grows by `growth` every `interval` steps, which doubles it in a thousand steps. It starts at
1/N, where no sum can exceed the maximum.

The sum takes two exchanges of one byte per element. Each rank receives its share of every q_i, adds these up
in float32 and rounds once; then the results are gathered. That is 2 (N-1)/N bytes sent per element and
rank, against 8 (N-1)/N for a ring all-reduce in float32.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fp8scope_kernels.distributed import Group
from fp8scope_kernels.formats import E4M3, Format
from fp8scope_kernels.quantization import amax_to_scale, measure, quantize
from fp8scope_kernels.reference import MAX_SCALE, Extent
from fp8scope_kernels.statistics import STATISTICS, Slot, StatisticsBuffer

MAX_PRE_SCALE = 2.0**8
"""The upper limit of u, which a gradient that is always zero would otherwise let grow for ever."""

SATURATED = STATISTICS.index("saturated")

_reducers: "WeakSet[Fp8GradientReducer]" = WeakSet()


def live_reducers() -> "tuple[Fp8GradientReducer, ...]":
    """All reducers of this process that are in use, for those who observe the training."""
    return tuple(_reducers) if _reducers else ()


class _Bucket(NamedTuple):
    """Tensors that are sent together: their indices, and the offset of each in the bucket."""

    indices: tuple[int, ...]
    starts: tuple[int, ...]
    elements: int


class Fp8GradientReducer:
    """Averages the gradients of `named_parameters` over `group` in FP8: call `reduce()` after every backward.

    Every rank creates one, with the same parameters in the same order (checked), and calls `reduce` equally
    often. The model must not reduce its gradients as well: leave it unwrapped, with equal initial weights
    from one seed or checkpoint, or use DDP's `no_sync`. A single process rounds its gradients to FP8 too.

    A NaN or Inf on any rank becomes NaN on all. `bucket_elements`: the number of elements sent at a time.

    Raises ValueError for no parameters, for parameters on several devices, for parameters that differ
    between ranks, and for a format without a torch dtype; TypeError for sharded parameters.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: Group | None = None,
        *,
        format: Format = E4M3,
        threshold: float = 1e-5,
        interval: int = 10,
        growth: float = 2**0.01,
        bucket_elements: int = 2**26,
    ) -> None:
        self.names, self.parameters = _named(named_parameters)
        _dtype(format)
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold is a share, from 0 to less than 1, got {threshold}.")
        if interval < 1 or growth < 1 or bucket_elements < 1:
            raise ValueError("interval, growth and bucket_elements must be at least 1.")
        self.group, self.format = group, format
        self.threshold, self.interval, self.growth = threshold, interval, growth
        grouped = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(group) if grouped else 1
        device, count = self.parameters[0].device, len(self.names)
        with torch.inference_mode(False):
            self._pre_scale = torch.full((count,), 1 / self.world_size, dtype=torch.float32, device=device)
            self._calm_steps = torch.zeros(count, dtype=torch.int32, device=device)
            self._sizes = torch.tensor([max(p.numel(), 1) for p in self.parameters], device=device)
        self._buckets = tuple(_buckets(self.parameters, bucket_elements))
        self._slots: list[tuple[Slot, Slot]] = []
        self._shares: Tensor | None = None
        self._check_same_everywhere()
        _reducers.add(self)

    @property
    def pre_scale(self) -> dict[str, float]:
        """u of every gradient. Waits on a GPU."""
        return dict(zip(self.names, self._pre_scale.tolist(), strict=True))

    @property
    def is_observed(self) -> bool:
        """Return whether its gradients are bound to rows of a buffer."""
        return bool(self._slots)

    @property
    def pre_scales(self) -> Tensor:
        """u of every gradient on the device, in the order of `names`: float32 [tensors]."""
        return self._pre_scale

    @property
    def saturated_shares(self) -> Tensor | None:
        """The shares of values at the maximum that the last `reduce` adapted u by: float64 [tensors].

        The largest of the cast on any rank and of the sum. None before the first `reduce`.
        """
        return self._shares

    @property
    def bytes_sent(self) -> int:
        """The bytes that a rank sends in one `reduce`: FP8 numbers with their padding, amaxes and shares.

        A ring is assumed for the two all-reduces of amaxes (float32) and shares (float64), which sends
        2 (N-1)/N bytes for each of theirs.
        """
        numbers = sum(self._padded(bucket) for bucket in self._buckets)
        amaxes_and_shares = (4 + 8) * len(self.names)
        return 2 * (self.world_size - 1) * (numbers + amaxes_and_shares) // self.world_size

    def bytes_of_all_reduce(self, itemsize: int) -> int:
        """The bytes that a rank sends in a ring all-reduce of the same gradients, `itemsize` bytes each."""
        elements = sum(bucket.elements for bucket in self._buckets)
        return 2 * (self.world_size - 1) * itemsize * elements // self.world_size

    def observe(self, buffer: StatisticsBuffer) -> int:
        """Bind every gradient to two rows of `buffer`; returns the number of rows.

        `<parameter>.grad` is this rank's gradient in the cast; its scale is s*u.
        `<parameter>.grad_sum` is the sum in FP8; its scale is N*s*u, and its elements at the maximum count as
        saturated. Nothing underflows in it: a sum of multiples of the smallest subnormal is such a multiple.
        """
        self._slots = [
            (
                buffer.register(f"{name}.grad", format=self.format, shape=tuple(p.shape), role="grad"),
                buffer.register(
                    f"{name}.grad_sum", format=self.format, shape=tuple(p.shape), role="grad_sum"
                ),
            )
            for name, p in zip(self.names, self.parameters, strict=True)
        ]
        return 2 * len(self._slots)

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce(self) -> None:
        """Replace every `.grad` by the mean over the ranks, the same bits on each.

        A gradient that is None on some ranks counts as zero there; one that is None on all stays None. If any
        gradient is None, this waits on a GPU. Raises ValueError for a sparse gradient.
        """
        grads = [_dense(name, p.grad) for name, p in zip(self.names, self.parameters, strict=True)]
        nothing = Extent(*torch.tensor([-1.0, 0.0], dtype=torch.float32, device=self._pre_scale.device))
        extents = [nothing if grad is None else measure(grad) for grad in grads]
        amax = self._maximum(torch.stack([extent.amax for extent in extents]))
        self._add_missing(grads, amax)
        scale = (amax_to_scale(amax, self.format) * self._pre_scale).clamp_(max=MAX_SCALE)
        rows = amax.new_zeros(2, len(grads), len(STATISTICS), dtype=torch.float64)
        for bucket in self._buckets:
            total = self._sum(self._cast(bucket, grads, extents, scale, rows[0]))
            for index, start in zip(bucket.indices, bucket.starts, strict=True):
                grad = grads[index]
                if grad is not None:
                    q = total[start : start + grad.numel()].float()
                    grad.copy_((q / (scale[index] * self.world_size)).view_as(grad))
                    self._count_sum(rows[1, index], q, scale[index] * self.world_size)
        at_maximum = torch.maximum(rows[0, :, SATURATED], rows[1, :, SATURATED])
        self._shares = self._maximum(at_maximum) / self._sizes
        self._adapt(self._shares)
        for index, slots in enumerate(self._slots):
            for slot, row in zip(slots, rows[:, index], strict=True):
                _merge(slot.row, row)

    def state_dict(self) -> dict[str, Any]:
        """Pre-scales (float32) and the steps since each was last halved, in the order of `names`."""
        return {
            "names": list(self.names),
            "pre_scale": self._pre_scale.clone(),
            "calm_steps": self._calm_steps.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if `state` is that of other parameters."""
        if list(state.get("names", ())) != self.names:
            raise ValueError("This state belongs to a reducer of other parameters.")
        self._pre_scale.copy_(state["pre_scale"])
        self._calm_steps.copy_(state["calm_steps"])

    def _cast(
        self, bucket: _Bucket, grads: list[Tensor | None], extents: list[Extent], scale: Tensor, rows: Tensor
    ) -> Tensor:
        """The bucket's q_i, one after another, with zeros at the end: FP8 [multiple of the world's size]."""
        length = self._padded(bucket)
        # A zero byte is the value zero.
        flat = torch.zeros(length, dtype=torch.uint8, device=scale.device)
        flat = flat.view(_dtype(self.format))
        for index, start in zip(bucket.indices, bucket.starts, strict=True):
            grad, extent = grads[index], extents[index]
            if grad is None:
                continue
            extent = Extent(extent.amax.clamp(min=0), extent.nonfinite)
            q = quantize(grad, scale[index], self.format, rows[index], extent=extent).data
            flat[start : start + grad.numel()] = q.reshape(-1)
        return flat

    def _padded(self, bucket: _Bucket) -> int:
        """The elements that are sent: a multiple of the world's size."""
        return -(-bucket.elements // self.world_size) * self.world_size

    def _sum(self, mine: Tensor) -> Tensor:
        """The sum of all ranks' FP8 numbers, rounded to FP8 once, the same bits on every rank."""
        if self.world_size == 1:
            return mine
        shares = torch.empty_like(mine)
        dist.all_to_all_single(shares.view(torch.uint8), mine.view(torch.uint8), group=self.group)
        first, *others = shares.view(self.world_size, -1).unbind()
        total = first.float()
        for other in others:
            total += other.float()
        share = total.clamp_(-self.format.max, self.format.max).to(mine.dtype)
        # Gather into the received shares, which are no longer needed. Newer versions of torch have renamed
        # the function and warn about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(shares.view(torch.uint8), share.view(torch.uint8), group=self.group)
        return shares

    def _count_sum(self, row: Tensor, q: Tensor, scale: Tensor) -> None:
        magnitude = q.abs()
        nonzero = (magnitude > 0).sum()
        row[0] = q.numel()
        row[1] = measure(q).amax / scale
        row[2] = scale
        row[3] = (magnitude == self.format.max).sum()
        row[5] = nonzero - (magnitude >= self.format.smallest_normal).sum()
        row[6] = q.isnan().sum()

    def _adapt(self, share: Tensor) -> None:
        """u for the next step, from the share of values at the maximum in this one."""
        full = share > self.threshold
        self._calm_steps = torch.where(full, 0, self._calm_steps + 1)
        grown = self._pre_scale * self.growth
        calm = torch.where(self._calm_steps % self.interval == 0, grown, self._pre_scale)
        # With u = 1/(2N) the sum of N numbers cannot reach the maximum; a smaller u would only flush more.
        self._pre_scale = torch.where(full, self._pre_scale / 2, calm).clamp_(
            1 / (2 * self.world_size), MAX_PRE_SCALE
        )

    def _add_missing(self, grads: list[Tensor | None], amax: Tensor) -> None:
        """Zeros where another rank has a gradient and this one has none."""
        if all(grad is not None for grad in grads):
            return
        for index, somewhere in enumerate((amax >= 0).tolist()):
            if somewhere and grads[index] is None:
                parameter = self.parameters[index]
                grads[index] = parameter.grad = torch.zeros_like(parameter)

    def _maximum(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def _check_same_everywhere(self) -> None:
        described = ";".join(f"{n}{tuple(p.shape)}" for n, p in zip(self.names, self.parameters, strict=True))
        mark = zlib.crc32(described.encode())
        device = self._pre_scale.device
        lowest, highest = self._maximum(
            torch.tensor([-mark, mark], dtype=torch.int64, device=device)
        ).tolist()
        if -lowest != highest:
            raise ValueError("Ranks have different parameters; names, shapes and order must be the same.")


def _dtype(format: Format) -> torch.dtype:
    if format.dtype is None or format.dtype.itemsize != 1:
        raise ValueError(f"Gradients are sent as bytes, which {format.name} is not; use E4M3 or E5M2.")
    return format.dtype


def _named(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[list[str], list[nn.Parameter]]:
    pairs = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if not pairs:
        raise ValueError("There is no parameter with a gradient; pass model.named_parameters().")
    for name, parameter in pairs:
        if hasattr(parameter, "placements"):
            raise TypeError(f"{name} is sharded; FSDP reduces its gradients itself.")
    devices = {parameter.device for _, parameter in pairs}
    if len(devices) > 1:
        raise ValueError(
            f"Parameters are on {', '.join(sorted(map(str, devices)))}; they must share a device."
        )
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]


def _buckets(parameters: list[nn.Parameter], limit: int) -> Iterator[_Bucket]:
    """Groups of adjacent parameters with at most `limit` elements; a larger parameter is alone."""
    indices: list[int] = []
    starts: list[int] = []
    end = 0
    for index, parameter in enumerate(parameters):
        if indices and end + parameter.numel() > limit:
            yield _Bucket(tuple(indices), tuple(starts), end)
            indices, starts, end = [], [], 0
        indices.append(index)
        starts.append(end)
        end += parameter.numel()
    yield _Bucket(tuple(indices), tuple(starts), end)


def _dense(name: str, grad: Tensor | None) -> Tensor | None:
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(f"The gradient of {name} is sparse; use a dense one (nn.Embedding(sparse=False)).")
    return grad


def _merge(row: Tensor, new: Tensor) -> None:
    row[0] += new[0]
    row[1] = torch.maximum(row[1], new[1])
    row[2] = new[2]
    row[3:] += new[3:]
