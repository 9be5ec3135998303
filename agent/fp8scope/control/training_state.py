"""Copies of everything that a training step changes, and the way back to them, bit for bit.

* parameters and buffers (scaling state and running statistics among them), and gradients
* numbers, flags and texts that modules keep as plain attributes (counters, `training`, `precision`)
* the optimizers' state and the settings of their parameter groups (learning rates)
* what is named and has `state_dict` and `load_state_dict`: schedulers, a GradScaler, averaged weights
* random state: torch's on the host and on the model's GPUs, Python's `random`, NumPy's

Everything goes back into the same tensors: optimizers, graphs and views of them stay valid.
"""

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_PLAIN = (bool, int, float, str, type(None))


class RandomState:
    """Where the random number generators stand: of the host, and of the GPUs that these models are on."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._torch = torch.get_rng_state()
        # Not of other GPUs: asking makes a context on each.
        devices = {one.device for model in models for one in model.parameters() if one.is_cuda}
        self._devices = {device: torch.cuda.get_rng_state(device) for device in devices}
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        for device, state in self._devices.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)


@dataclass(slots=True)
class Kept:
    """A tensor and what was in it."""

    tensor: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> "Kept":
        values = tensor.detach()
        # On the CPU a copy from a GPU, else a clone: never the tensor's own memory.
        moved = values.cpu() if place == "cpu" and values.is_cuda else values.clone()
        return cls(tensor, moved)

    def put_back(self) -> Tensor:
        with torch.no_grad():
            self.tensor.detach().copy_(self.values)
        return self.tensor

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()


class ModelState:
    """What passes through a model change in it: buffers, plain attributes, and gradients.

    `parameters`: the parameters' values too.
    """

    def __init__(self, models: Sequence[nn.Module], *, parameters: bool, place: str = "device") -> None:
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._plain = [(module, _plain_of(module)) for module in modules]
        self._buffers = [
            (module, name, Kept.of(buffer, place))
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        every = list(
            dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None)
        )
        self._parameters = [Kept.of(parameter, place) for parameter in every] if parameters else []
        self._gradients = [
            (parameter, None if parameter.grad is None else Kept.of(parameter.grad, place))
            for parameter in every
        ]

    def restore(self) -> None:
        for module, plain in self._plain:
            for name in [name for name, value in vars(module).items() if isinstance(value, _PLAIN)]:
                if name not in plain:
                    del module.__dict__[name]
            module.__dict__.update(plain)
        for module, name, kept in self._buffers:
            module._buffers[name] = kept.put_back()
        for kept in self._parameters:
            kept.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.put_back()

    @property
    def nbytes(self) -> int:
        gradients = [kept for _, kept in self._gradients if kept is not None]
        return sum(kept.nbytes for kept in [*self._parameters, *gradients, *(k for _, _, k in self._buffers)])


class TrainingState:
    """A copy of what one training step changes; see the module's table. `place`: `cpu`, or `device`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Sequence[Any] = (),
        *,
        place: str = "cpu",
    ) -> None:
        self._random = RandomState([model])
        self._model = ModelState([model], parameters=True, place=place)
        self._optimizers = [
            (
                optimizer,
                {parameter: _keep(values, place) for parameter, values in optimizer.state.items()},
                settings_of(optimizer, place),
            )
            for optimizer in optimizers
        ]
        self._also = [(one, copy.deepcopy(one.state_dict())) for one in also]

    def restore(self) -> None:
        """Everything as it was."""
        self._model.restore()
        for optimizer, state, settings in self._optimizers:
            for parameter in [known for known in optimizer.state if known not in state]:
                del optimizer.state[parameter]
            for parameter, values in state.items():
                optimizer.state[parameter] = _put_back(values)
            restore_settings(optimizer, settings)
        for one, document in self._also:
            one.load_state_dict(copy.deepcopy(document))
        self._random.restore()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies of tensors."""
        return self._model.nbytes + sum(
            kept.nbytes
            for _, state, _ in self._optimizers
            for values in state.values()
            for kept in _all(values)
        )


def settings_of(optimizer: Optimizer, place: str = "device") -> list[dict[str, Any]]:
    """What an optimizer's parameter groups say besides their parameters."""
    return [
        {name: _keep(value, place) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def restore_settings(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Undo what happened to an optimizer's settings since `settings_of`."""
    for group, kept in zip(optimizer.param_groups, settings, strict=False):
        group.update({name: _put_back(value) for name, value in kept.items()})


def clone_batch(value: Any) -> Any:
    """A batch with memory of its own: loaders may use theirs again. Tensors stay on their device."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: clone_batch(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(clone_batch(one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(clone_batch(one) for one in value)
    return _copied(value)


def _copied(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _plain_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _keep(value: Any, place: str) -> Any:
    """Optimizer state of any shape, its tensors as `Kept`."""
    if isinstance(value, Tensor):
        return Kept.of(value, place)
    if isinstance(value, dict):
        return {key: _keep(one, place) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_keep(one, place) for one in value)
    return _copied(value)


def _put_back(value: Any) -> Any:
    if isinstance(value, Kept):
        return value.put_back()
    if isinstance(value, dict):
        return {key: _put_back(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_back(one) for one in value)
    # Kept for another time: what is handed out may be changed.
    return _copied(value)


def _all(value: Any) -> Iterator[Kept]:
    if isinstance(value, Kept):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _all(one)
