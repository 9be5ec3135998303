"""Copies of everything that a training step changes, which another process can load.

`fp8scope.control.training_state` restores objects of this process. A snapshot names what it holds instead:
parameters and buffers by their names, optimizer state by the position of the parameter. It holds tensors on
the host, numbers, texts, and lists and dictionaries of these. Restoring is exact, bit for bit.
"""

import copy
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.control.training_state import states_of_devices
from fp8scope.observe.tensors.base import unwrapped
from fp8scope_kernels import devices

Snapshot: TypeAlias = dict[str, Any]

_PLAIN = (bool, int, float, str, type(None))
_NOT_STATE = frozenset(("_is_full_backward_hook",))
"""Plain attributes of modules that depend on the hooks of this process."""


class SnapshotError(ValueError):
    """The snapshot does not fit the model or the optimizer; the message says how."""


class Trained:
    """The trained objects of a script: its models, optimizers, and further objects with a `state_dict`."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], also: Sequence[Any] = ()
    ) -> None:
        # A checkpoint of a compiled or distributed model has the names of the model inside.
        self.models = [unwrapped(model) for model in models]
        self.optimizers = list(optimizers)
        self.also = list(also)

    @property
    def nbytes(self) -> int:
        """The size of the tensors that a snapshot copies."""
        tensors = [tensor for model in self.models for _, tensor in _tensors_of(model)]
        for optimizer in self.optimizers:
            tensors += [tensor for state in optimizer.state.values() for tensor in _tensors_in(state)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def capture(self) -> Snapshot:
        """Copy the present state to the host. Waits for the device."""
        return {
            "models": [
                {
                    "tensors": {name: _copied(tensor) for name, tensor in _tensors_of(model)},
                    "plain": {path: _plain_of(module) for path, module in model.named_modules()},
                }
                for model in self.models
            ],
            "optimizers": [_optimizer_state(optimizer) for optimizer in self.optimizers],
            "also": [_copied(stateful.state_dict()) for stateful in self.also],
            "random": random_state(self.models),
        }

    def load(self, snapshot: Snapshot) -> None:
        """Restore the state of a snapshot. Raises SnapshotError if it does not fit."""
        for key, own in (("models", self.models), ("optimizers", self.optimizers), ("also", self.also)):
            if len(snapshot[key]) != len(own):
                raise SnapshotError(
                    f"the snapshot has {len(snapshot[key])} {key}, and the script passes {len(own)} to "
                    "allow_snapshots."
                )
        for model, saved in zip(self.models, snapshot["models"], strict=True):
            _load_model(model, saved)
        for optimizer, saved in zip(self.optimizers, snapshot["optimizers"], strict=True):
            _load_optimizer(optimizer, saved)
        for stateful, saved in zip(self.also, snapshot["also"], strict=True):
            stateful.load_state_dict(copy.deepcopy(saved))
        restore_random(snapshot["random"])


def random_state(models: Sequence[nn.Module] = ()) -> dict[str, Any]:
    """The random states of torch (on the host and on the models' accelerators), Python and NumPy."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "devices": {str(device): state for device, state in states_of_devices(models).items()},
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    # Snapshots of earlier versions have the states of CUDA devices by their index.
    by_name = {f"cuda:{index}": saved for index, saved in state.get("cuda", {}).items()}
    for name, saved in (by_name | state.get("devices", {})).items():
        devices.set_random_state(saved, torch.device(name))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, also the buffers that are not in the state_dict."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _plain_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name not in _NOT_STATE
    }


def _load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    own, tensors = dict(_tensors_of(model)), saved["tensors"]
    if own.keys() != tensors.keys():
        other = sorted(own.keys() ^ tensors.keys())
        raise SnapshotError(f"the model is another one than in the run: {other[0]} is in only one of them.")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise SnapshotError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} here, and {tensors[name].dtype} "
                f"{list(tensors[name].shape)} in the run."
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.detach().copy_(tensors[name])
    for path, module in model.named_modules():
        if path in saved["plain"]:
            plain = saved["plain"][path]
            for name in _plain_of(module).keys() - plain.keys():
                del module.__dict__[name]
            module.__dict__.update(plain)


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {
            index: _copied(dict(optimizer.state[parameter]))
            for index, parameter in enumerate(parameters)
            if parameter in optimizer.state
        },
        "settings": [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
    }


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    if len(saved["settings"]) != len(optimizer.param_groups):
        raise SnapshotError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups here, and "
            f"{len(saved['settings'])} in the run."
        )
    index = 0
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            values = saved["state"].get(index)
            index += 1
            if values is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = _placed(values, parameter.device, bool(on_device))
    for group, settings in zip(optimizer.param_groups, saved["settings"], strict=True):
        for name, value in settings.items():
            if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                group[name].detach().copy_(value)
            else:
                group[name] = _copied(value)


def _placed(value: Any, device: torch.device, on_device: bool) -> Any:
    """Optimizer state on the parameter's device; a count of steps stays on the host, as torch keeps it."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True) if value.ndim or on_device else value.clone()
    if isinstance(value, dict):
        return {key: _placed(item, device, on_device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, device, on_device) for item in value)
    return value


def _copied(value: Any) -> Any:
    """A deep copy with all tensors on the host."""
    if isinstance(value, Tensor):
        host = value.detach()
        return host.to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)
