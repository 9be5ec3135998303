"""The inverse of `convert`: FP8 layers of a model become linear layers again, in place."""

from typing import Any

from torch import nn

from fp8scope_kernels.convert import (
    Conversion,
    ConversionReport,
    Selection,
    matches,
    restore_fast_path,
)
from fp8scope_kernels.experts.modules import Fp8Experts, make_plain
from fp8scope_kernels.linear import Fp8Linear

OWN_ATTRIBUTES = (
    "recipe", "slots", "number", "turn", "turn_back", "kept_weight", "weight_shard", "on_units",
    "_recipe_text", "_precision", "_products", "_products_text",
)  # fmt: skip
"""Attributes of an `Fp8Linear` that `nn.Linear` does not have."""

SUBCLASS = "a subclass of {}, which may compute something else"
NOT_SELECTED = "not included"


def revert(model: nn.Module, include: Selection | None = None) -> ConversionReport:
    """Make every `Fp8Linear` of `model` an `nn.Linear` again, in place, and experts what they were.

    `include` selects some, as in `convert`. The layers stay the same objects, with their parameters, hooks
    and mode, so that tied layers, optimizers, FSDP2 and compiled blocks go on with them (compiled code is
    compiled again). Scaling state is dropped, and the layers leave the statistics buffers that they were
    bound to. The model itself may be a layer. Encoders of torch that `convert` has kept from their fast path
    take it again.

    Call it between steps: a backward pass that is still to come needs the FP8 layers. Subclasses of
    `Fp8Linear` stay. Entries of the report are the FP8 layers; `converted` names those that are linear now.
    """
    entries = []
    for path, layer in list(model.named_modules()):
        if not isinstance(layer, Fp8Linear | Fp8Experts):
            continue
        if include is not None and not matches(include, path, layer):
            reason = NOT_SELECTED
        else:
            base = Fp8Linear if isinstance(layer, Fp8Linear) else Fp8Experts
            reason = "" if _make_plain(layer) else SUBCLASS.format(base.__name__)
        entries.append(Conversion(path, type(layer).__name__, not reason, reason, precision="high"))
    restore_fast_path(model)
    return ConversionReport(tuple(entries))


def _plain_class(kind: type[Fp8Linear]) -> type[nn.Module] | None:
    """The class of a layer without FP8; None if that is unknown."""
    if kind is Fp8Linear:
        return nn.Linear
    # fully_shard gives a layer a class made of FSDPModule and the layer's own.
    if (
        len(kind.__bases__) == 2
        and kind.__bases__[0].__name__ == "FSDPModule"
        and kind.__bases__[1] is Fp8Linear
    ):
        name = kind.__name__.replace("Fp8Linear", "Linear")
        own = {key: value for key, value in kind.__dict__.items() if key == "__deepcopy__"}
        return type(name, (kind.__bases__[0], nn.Linear), own)
    return None


def _make_plain(layer: Any) -> bool:
    """Give a layer the class that it had. False if that is unknown."""
    if isinstance(layer, Fp8Experts):
        return make_plain(layer)
    kind = _plain_class(type(layer))
    if kind is None:
        return False
    layer.slots.clear()
    if layer.weight_shard is not None:
        layer.weight_shard.detach()
    del layer.scaling
    for name in OWN_ATTRIBUTES:
        layer.__dict__.pop(name, None)
    layer.__class__ = kind
    return True
