"""The layers that the matrix quantises, and the others that stay as they are."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.control.training_state import RandomState
from fp8scope.evaluation.scores import EvaluationError
from fp8scope_kernels import plan_conversion
from fp8scope_kernels.convert import ALREADY, Conversion, Selection
from fp8scope_kernels.plain_tensors import PLAIN_TYPES

QUANTISABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OF_DTYPE = "its weight is quantised already:"
NOT_FINITE = "its weight has NaN or Inf elements"
THREE_DIMENSIONS = "its weights have three dimensions, as those of experts do"
CHUNK = 1 << 22
"""Elements of a checksum that are converted at once."""
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LeftGroup:
    """Modules that keep their precision for one reason: how many, their elements, and some of their paths."""

    reason: str
    modules: int
    elements: int
    paths: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The layers of every column, with their paths, and what stays as it is."""

    layers: Mapping[str, nn.Linear]
    left: tuple[LeftGroup, ...]

    @property
    def weights(self) -> list[Tensor]:
        """The layers' weights; one that several layers share counts once."""
        return list({id(layer.weight): layer.weight for layer in self.layers.values()}.values())

    @property
    def elements(self) -> int:
        return sum(weight.numel() for weight in self.weights)


def plan_layers(
    model: nn.Module, include: Selection | None = None, exclude: Selection | None = None
) -> LayerPlan:
    """Choose the layers that `fp8scope.convert` would convert, and those that are FP8 already.

    They are the same in every column, so that columns differ in the format alone. Raises EvaluationError if
    there is none, and ValueError as `convert` does.
    """
    layers: dict[str, nn.Linear] = {}
    left: list[tuple[Conversion, nn.Module]] = []
    for entry, module in plan_conversion(model, include, exclude):
        chosen = entry.converted or entry.reason == ALREADY
        if not chosen or not isinstance(module, nn.Linear):
            left.append((entry, module))
        elif module.weight.is_meta:
            raise EvaluationError(
                f"The weight of {entry.name} is on the meta device: load the checkpoint first."
            )
        elif module.weight.dtype not in QUANTISABLE:
            left.append(
                (Conversion(entry.name, entry.kind, False, f"{OF_DTYPE} {module.weight.dtype}"), module)
            )
        elif not bool(torch.isfinite(module.weight).all()):
            left.append((Conversion(entry.name, entry.kind, False, NOT_FINITE), module))
        else:
            layers[entry.name] = module
    groups = _groups(left)
    if not layers:
        reasons = "; ".join(f"{group.paths[0] or 'the model'}: {group.reason}" for group in groups[:3])
        raise EvaluationError(f"No layer can be quantised. {reasons or 'The model has no parameters'}.")
    return LayerPlan(layers=layers, left=groups)


def _groups(left: Sequence[tuple[Conversion, nn.Module]]) -> tuple[LeftGroup, ...]:
    by_reason: dict[str, list[tuple[Conversion, nn.Module]]] = defaultdict(list)
    for entry, module in left:
        by_reason[_reason(entry, module)].append((entry, module))
    groups = [
        LeftGroup(
            reason=reason,
            modules=len(members),
            elements=sum(parameter.numel() for parameter in _own_parameters(members)),
            paths=tuple(entry.name for entry, _ in members[:3]),
        )
        for reason, members in by_reason.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.elements))


def _reason(entry: Conversion, module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return entry.reason
    if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)) and not isinstance(
        module, nn.Conv1d | nn.ConvTranspose1d
    ):
        return THREE_DIMENSIONS
    return entry.reason


def _own_parameters(members: Sequence[tuple[Conversion, nn.Module]]) -> list[nn.Parameter]:
    own = (parameter for _, module in members for parameter in module.parameters(recurse=False))
    return list({id(parameter): parameter for parameter in own}.values())


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Linear, Forward]) -> Iterator[None]:
    """Give layers other forward passes. Modules, parameters and hooks stay, so that restoring is exact.

    torch's transformer encoders call their layers instead of reading the weights, and compiled models run
    eagerly: their code has the layers' own forward passes.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for layer, forward in forwards.items():
            layer.__dict__["forward"] = forward
        with _eagerly():
            yield
    finally:
        for layer in forwards:
            layer.__dict__.pop("forward", None)
        torch.backends.mha.set_fastpath_enabled(fast)


def _eagerly() -> AbstractContextManager[Any]:
    """A context in which compiled models run eagerly. Where nothing is compiled yet, it does not load the
    compiler, which takes seconds.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class ModelGuard:
    """Restores what an evaluation changes: buffers, the modes of modules, and random states.

    Parameters are compared by checksums, because a copy would take as much memory as the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modes = {module: module.training for module in model.modules()}
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._random = RandomState([model])
        self._sums = self._checksums()

    def begin(self) -> None:
        """Set evaluation mode, and the random state that every column begins with."""
        self._random.restore()
        self._model.eval()

    def restore(self) -> None:
        for module, mode in self._modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)
        self._random.restore()

    def changed(self) -> list[str]:
        """The names of parameters that are not as before."""
        return [name for name, total in self._checksums().items() if total != self._sums.get(name)]

    def _checksums(self) -> dict[str, tuple[int, ...]]:
        return {name: _checksum(parameter) for name, parameter in self._model.named_parameters()}


def _checksum(parameter: Tensor) -> tuple[int, ...]:
    """Sums of the bits as integers, the second one with weights that make it depend on the order."""
    values = parameter.detach()
    # Of other classes (sharded, quantised) nobody knows here how their bits are read.
    if type(parameter) not in PLAIN_TYPES or values.is_meta or not values.numel():
        return ()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(values.element_size())
    if integers is None:
        return ()
    plain = weighted = 0
    for part in torch.split(values.contiguous().view(integers).flatten(), CHUNK):
        bits = part.to(torch.int64)
        order = torch.arange(1, bits.numel() + 1, device=bits.device)
        plain, weighted = plain + int(bits.sum()), 3 * weighted + int((bits * order).sum())
    return plain, weighted
