"""Binds the layers of a model to a statistics buffer: FP8 layers, and layers that could be FP8.

Hooks observe a layer in high precision: the amax of its three tensors and their non-finite elements. Tensors
have the names of the FP8 run, so that the two runs can be compared.
"""

from torch import nn

from fp8scope_kernels.convert import candidate_layers, fp8_layers
from fp8scope_kernels.experts.high_precision_experts import observe_plain_experts, unobserve_plain_experts
from fp8scope_kernels.experts.modules import experts_in_high_precision
from fp8scope_kernels.experts.observers import EXPERT_TENSORS, observe_experts, tensors_of_experts
from fp8scope_kernels.experts.products import ExpertProducts, fp8_experts
from fp8scope_kernels.formats import Format
from fp8scope_kernels.high_precision import HighPrecisionObserver
from fp8scope_kernels.hooks import register_forward_hook, remove_hooks
from fp8scope_kernels.linear import Fp8Linear
from fp8scope_kernels.recipes import ROLES, Role
from fp8scope_kernels.statistics import Slot, StatisticsBuffer


def observe(model: nn.Module, buffer: StatisticsBuffer, *, expert_tensors: int = EXPERT_TENSORS) -> int:
    """Bind the model's tensors to rows of `buffer`; returns the number of tensors.

    Observes the input, weight and grad_output of every `Fp8Linear`, and of the `candidate_layers` that could
    become one. The latter are not quantised: they have no format in the catalogue, `numel`, `amax` and
    `nonfinite` are counted, `scale` is 1, and nothing saturates or underflows. Names are
    `<module path>.<input|weight|grad_output>`. A second call, after modules were added, binds the new ones
    and keeps the rows of the others. Raises ValueError if a layer is on another device than the buffer.

    Of experts, three rows for all experts of each of their weights are bound. Those in high precision are the
    modules that `convert` would take. For FP8 experts there are also three rows for each expert
    (`<path>.expert_3.input`) if those of the whole model are at most `expert_tensors`.
    """
    layers = observable_layers(model)
    experts, plain_experts = list(fp8_experts(model)), list(experts_in_high_precision(model))
    devices_of = [(path, layer.weight.device) for path, layer in layers]
    devices_of += [(path, products.device) for path, products in experts]
    devices_of += [(path, next(module.parameters()).device) for path, module in plain_experts]
    for path, device in devices_of:
        if device != buffer.device:
            raise ValueError(
                f"{path or 'the model'} is on {device}, but the statistics buffer is on {buffer.device}; "
                "make one buffer per device."
            )
    for path, layer in layers:
        observe_layer(path, layer, buffer)
    singly = tensors_of_experts(experts) <= expert_tensors
    rows = sum(observe_experts(path, products, buffer, singly=singly) for path, products in experts)
    rows += sum(observe_plain_experts(path, module, buffer) for path, module in plain_experts)
    return len(ROLES) * len(layers) + rows


def observe_layer(path: str, layer: nn.Linear, buffer: StatisticsBuffer) -> None:
    """Bind the three tensors of one of `observable_layers` to rows of `buffer`, which is on its device."""
    if isinstance(layer, Fp8Linear):
        layer.slots.update(_register(path, layer, buffer))
    else:
        _observer_of(layer).slots.update(_register(path, layer, buffer))


def observable_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The layers that `observe` binds, with their paths: FP8 ones first."""
    return [*fp8_layers(model), *candidate_layers(model)]


def unobserve(model: nn.Module) -> None:
    """Undo `observe`: unbind FP8 layers and remove the hooks of the others."""
    for module in model.modules():
        if isinstance(module, Fp8Linear | ExpertProducts):
            module.slots.clear()
        else:
            remove_hooks(module._forward_hooks, HighPrecisionObserver)
            unobserve_plain_experts(module)


def _observer_of(layer: nn.Linear) -> HighPrecisionObserver:
    """The layer's observer; registers one if there is none."""
    # torch has no public list of a module's hooks. A registry beside it would not follow copies of the model.
    for hook in layer._forward_hooks.values():
        if isinstance(hook, HighPrecisionObserver):
            return hook
    observer = HighPrecisionObserver()
    register_forward_hook(layer, observer)
    return observer


def _register(path: str, layer: nn.Linear, buffer: StatisticsBuffer) -> dict[Role, Slot]:
    shapes: dict[Role, tuple[int, ...]] = {
        "input": (-1, layer.in_features),
        "weight": (layer.out_features, layer.in_features),
        "grad_output": (-1, layer.out_features),
    }
    slots: dict[Role, Slot] = {}
    for role in ROLES:
        format: Format | None = layer.state_of(role).format if isinstance(layer, Fp8Linear) else None
        name = f"{path}.{role}" if path else role
        slots[role] = buffer.register(name, format=format, shape=shapes[role], role=role)
    return slots
