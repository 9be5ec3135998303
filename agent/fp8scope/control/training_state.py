"""Saves everything that a training step changes, and restores it bit for bit:

* parameters, buffers (including scaling state and running statistics), and gradients
* numbers, flags and strings that modules store as plain attributes (counters, `training`, `precision`)
* the optimizers' state, and the settings of their parameter groups (such as learning rates)
* further objects with `state_dict` and `load_state_dict`: schedulers, a GradScaler, averaged weights
* random state: torch's on the host and on the model's accelerators, Python's `random`, and NumPy's

Values are restored into the same tensors, so optimizers, graphs and views of them stay valid.
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

from fp8scope_kernels import devices

_PLAIN = (bool, int, float, str, type(None))


class RandomState:
    """The state of the random number generators of the host and of the models' accelerators."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._torch = torch.get_rng_state()
        # Only the models' devices: reading the state of a GPU creates a context on it.
        self._devices = states_of_devices(models)
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        for device, state in self._devices.items():
            devices.set_random_state(state, device)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)


def states_of_devices(models: Sequence[nn.Module]) -> dict[torch.device, Tensor]:
    """The states of the random number generators of the accelerators that the models are on."""
    used = {parameter.device for model in models for parameter in model.parameters()}
    states = {device: devices.random_state(device) for device in used if devices.is_accelerator(device)}
    return {device: state for device, state in states.items() if state is not None}


@dataclass(slots=True)
class TensorCopy:
    """A tensor and a copy of its values."""

    tensor: Tensor
    values: Tensor

    @classmethod
    def of(cls, tensor: Tensor, keep_on: str) -> "TensorCopy":
        values = tensor.detach()
        # `cpu()` of a CPU tensor would share its memory, so clone it.
        copied = values.cpu() if keep_on == "cpu" and not values.is_cpu else values.clone()
        return cls(tensor, copied)

    def restore(self) -> Tensor:
        """Write the values back into the tensor, and return it."""
        with torch.no_grad():
            self.tensor.detach().copy_(self.values)
        return self.tensor

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()


class ModelState:
    """The state that forward and backward passes change: buffers, plain attributes, and gradients.

    With `parameters`, the values of the parameters as well. `keep_on`: `cpu` or `device`.
    """

    def __init__(self, models: Sequence[nn.Module], *, parameters: bool, keep_on: str = "device") -> None:
        modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._plain = [(module, _plain_of(module)) for module in modules]
        self._buffers = [
            (module, name, TensorCopy.of(buffer, keep_on))
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        every = list(
            dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None)
        )
        self._parameters = [TensorCopy.of(parameter, keep_on) for parameter in every] if parameters else []
        self._gradients = [
            (parameter, None if parameter.grad is None else TensorCopy.of(parameter.grad, keep_on))
            for parameter in every
        ]

    def restore(self) -> None:
        for module, plain in self._plain:
            for name in [name for name, value in vars(module).items() if isinstance(value, _PLAIN)]:
                if name not in plain:
                    del module.__dict__[name]
            module.__dict__.update(plain)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer.restore()
        for copied in self._parameters:
            copied.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.restore()

    @property
    def nbytes(self) -> int:
        gradients = [gradient for _, gradient in self._gradients if gradient is not None]
        buffers = [buffer for _, _, buffer in self._buffers]
        return sum(copied.nbytes for copied in [*self._parameters, *gradients, *buffers])


class TrainingState:
    """A copy of everything that a training step changes; see the list in the module docstring.

    `also`: further objects with a `state_dict`. `keep_on`: where the copies are stored, `cpu` or `device`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Sequence[Any] = (),
        *,
        keep_on: str = "cpu",
    ) -> None:
        self._random = RandomState([model])
        self._model = ModelState([model], parameters=True, keep_on=keep_on)
        self._optimizers = [
            (
                optimizer,
                {parameter: _copy_tensors(values, keep_on) for parameter, values in optimizer.state.items()},
                settings_of(optimizer, keep_on),
            )
            for optimizer in optimizers
        ]
        self._also = [(stateful, copy.deepcopy(stateful.state_dict())) for stateful in also]

    def restore(self) -> None:
        """Restore everything to the saved state."""
        self._model.restore()
        for optimizer, state, settings in self._optimizers:
            for parameter in [parameter for parameter in optimizer.state if parameter not in state]:
                del optimizer.state[parameter]
            for parameter, values in state.items():
                optimizer.state[parameter] = _restore_tensors(values)
            restore_settings(optimizer, settings)
        for stateful, document in self._also:
            stateful.load_state_dict(copy.deepcopy(document))
        self._random.restore()

    @property
    def nbytes(self) -> int:
        """The size of the copied tensors."""
        return self._model.nbytes + sum(
            copied.nbytes
            for _, state, _ in self._optimizers
            for values in state.values()
            for copied in _copies_in(values)
        )


def settings_of(optimizer: Optimizer, keep_on: str = "device") -> list[dict[str, Any]]:
    """Copy the options of an optimizer's parameter groups, that is, everything but the parameters."""
    return [
        {name: _copy_tensors(value, keep_on) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def restore_settings(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Restore an optimizer's options to those that `settings_of` copied."""
    for group, options in zip(optimizer.param_groups, settings, strict=False):
        group.update({name: _restore_tensors(value) for name, value in options.items()})


def clone_batch(value: Any) -> Any:
    """Copy a batch, because a loader may reuse its memory. Tensors stay on their device."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: clone_batch(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(clone_batch(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(clone_batch(item) for item in value)
    return _copied(value)


def _copied(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _plain_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _copy_tensors(value: Any, keep_on: str) -> Any:
    """Copy nested optimizer state; its tensors become `TensorCopy` objects."""
    if isinstance(value, Tensor):
        return TensorCopy.of(value, keep_on)
    if isinstance(value, dict):
        return {key: _copy_tensors(item, keep_on) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy_tensors(item, keep_on) for item in value)
    return _copied(value)


def _restore_tensors(value: Any) -> Any:
    """Undo `_copy_tensors`: restore the tensors of nested state, and return the state."""
    if isinstance(value, TensorCopy):
        return value.restore()
    if isinstance(value, dict):
        return {key: _restore_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restore_tensors(item) for item in value)
    # Copy again: the caller may change the returned object, and this one may be restored another time.
    return _copied(value)


def _copies_in(value: Any) -> Iterator[TensorCopy]:
    if isinstance(value, TensorCopy):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _copies_in(item)
