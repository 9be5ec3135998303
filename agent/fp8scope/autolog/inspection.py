"""Inspects models, optimizers, their wrappers, and the inputs of a forward pass."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.config import ConfigurationError

_TOKEN_DTYPES = (torch.int64, torch.int32)
MAX_WRAPPERS = 8


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of Accelerate and Lightning, which have no hooks."""
    for _ in range(MAX_WRAPPERS):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield every parameter of the optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def holds_parameters_of(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether the optimizer has at least one parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for parameter in parameters_of(optimizer))


def models_and_optimizers(model: Any, optimizer: Any) -> dict[str, tuple[nn.Module, list[Optimizer]]]:
    """Return the models and optimizers given to `attach` by name; a single model has the name ''.

    `model` is a module, with an optimizer or a sequence of optimizers; or a mapping of names to modules, with
    a mapping of the same names. Raises ConfigurationError when it is none of these, when a model has no
    parameters, or when an optimizer steps none of its model's.
    """
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    if models.keys() != optimizers.keys() or not models:
        raise ConfigurationError(
            "attach needs one model and its optimizer(s), or two mappings with the same names: "
            f"got models {_names(models)} and optimizers {_names(optimizers)}."
        )
    if not all(isinstance(name, str) for name in models):
        raise ConfigurationError(f"the names of models must be texts, got {_names(models)}.")
    return {name: _checked(name, models[name], optimizers[name]) for name in models}


def _checked(name: str, model: Any, optimizer: Any) -> tuple[nn.Module, list[Optimizer]]:
    what = f"the model {name!r}" if name else "the model"
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{what} must be a torch.nn.Module, got {_kind(model)}.")
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not given:
        raise ConfigurationError(f"{what} has no optimizer: attach finds the steps through it.")
    for candidate in given:
        if not isinstance(candidate, Optimizer):
            raise ConfigurationError(
                f"the optimizer must be a torch.optim.Optimizer, got {_kind(candidate)}."
            )
    if next(model.parameters(), None) is None:
        raise ConfigurationError(f"{what} has no parameters: there is nothing to train or to watch.")
    inner = [unwrap_optimizer(candidate) for candidate in given]
    for candidate in inner:
        if not holds_parameters_of(candidate, model):
            raise ConfigurationError(
                f"{type(candidate).__name__} has no parameter of {what}: was it made for another one, or "
                "before the parameters were replaced?"
            )
    return model, inner


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _names(mapping: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in mapping) or "(none)"


def token_count(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens in the arguments of a forward pass; 0 if that is not clear.

    `input_ids` counts, by name, also inside a dictionary. Else all int64 or int32 tensors of two or more
    dimensions must have the same shape, such as inputs and targets. Padding is counted. Reads no values.
    """
    mappings = [kwargs, *(value for value in args if isinstance(value, Mapping))]
    for mapping in mappings:
        named = mapping.get("input_ids")
        if isinstance(named, Tensor) and named.dtype in _TOKEN_DTYPES:
            return named.numel()
    values = [*args, *(value for mapping in mappings for value in mapping.values())]
    token_tensors = [
        value
        for value in values
        if isinstance(value, Tensor) and value.dtype in _TOKEN_DTYPES and value.ndim > 1
    ]
    return token_tensors[0].numel() if len({value.shape for value in token_tensors}) == 1 else 0
