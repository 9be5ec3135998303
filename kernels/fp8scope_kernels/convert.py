"""Replace a model's linear layers by FP8 layers, and the products of its experts, in place."""

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fp8scope_kernels.experts.grouped_linear import Fp8GroupedLinear
from fp8scope_kernels.experts.modules import (
    UNKNOWN,
    Fp8Experts,
    are_known_experts,
    expert_weights,
    make_fp8,
    reason_of_experts,
)
from fp8scope_kernels.linear import Fp8Linear
from fp8scope_kernels.plain_tensors import PLAIN_TYPES, is_dtensor
from fp8scope_kernels.random_stream import seed_rounding
from fp8scope_kernels.recipes import Recipe
from fp8scope_kernels.torch_internals import is_fake, is_fsdp_module
from fp8scope_kernels.unit_products import ALIGNMENT

Selection = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Glob patterns over module paths (`*.mlp.*`), or a function of path and module."""

READ_DIRECTLY: dict[str, tuple[str, ...]] = {
    "torch.nn.modules.activation.MultiheadAttention": ("out_proj",),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ("qkv", "proj"),
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": ("qkv", "proj"),
}
"""By class name, the child layers whose weights the class multiplies itself, without calling the layers."""
READ_BY_PARENT = "its parent reads its weight and never calls it"
ALREADY = "already FP8"
NOT_LINEAR = "not a linear layer"
WRAPPED = "its weight is"
IN_FSDP = f"{WRAPPED} held by FSDP: convert before fully_shard"

HEAD_NAMES = frozenset(
    ("lm_head", "head", "output", "output_layer", "embed_out", "unembed", "classifier", "score")
)
"""Names of output heads. In a repeated block they name other layers, such as BERT's `attention.output`."""

BEFORE_FP8 = "_fast_path_before_fp8"
"""The attribute of an encoder that keeps its flag from before `convert`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """The outcome for one module that owns parameters; `reason` is empty if it was converted.

    `precision` is that which a converted module has.
    """

    name: str
    kind: str
    converted: bool
    reason: str
    precision: str = "fp8"


@dataclass(frozen=True)
class ConversionReport:
    """The outcome of `convert` or `revert`, in the order of the model's modules; `str(report)` is a table."""

    entries: tuple[Conversion, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """The paths of the modules that were converted: to `Fp8Linear`, or by `revert` to `nn.Linear`."""
        return tuple(entry.name for entry in self.entries if entry.converted)

    @property
    def left(self) -> tuple[str, ...]:
        """The paths of the modules that keep their precision."""
        return tuple(entry.name for entry in self.entries if not entry.converted)

    def __str__(self) -> str:
        rows = [("module", "kind", "precision", "reason")]
        for entry in self.entries:
            precision = entry.precision if entry.converted else "left"
            rows.append((entry.name, entry.kind, precision, entry.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def convert(
    model: nn.Module, recipe: Recipe, include: Selection | None = None, exclude: Selection | None = None
) -> ConversionReport:
    """Replace the `nn.Linear` modules inside `model` by `Fp8Linear`, in place, sharing their parameters.

    Modules with the weights of experts as 3-D parameters stay the same objects, and compute their products in
    FP8: those of Transformers, and others that are called like experts (`experts/modules.py`).

    Optimizers and the state_dict keys of the parameters stay valid. These modules stay in high precision:

    - modules that are not exactly an `nn.Linear`: embeddings, norms, attention's own projections;
    - layers that their parent never calls (`READ_DIRECTLY`; a warning names them);
    - layers whose sizes are not multiples of 16;
    - modules with 3-D weights that are not known to be experts, unless `include` names them;
    - layers whose weight is a tensor of another class, as torchao's, or is held by FSDP (a warning names
      them). Layers that tensor parallelism has sharded are converted;
    - the output head, recognised by a weight shared with an embedding, and outside of repeated blocks by its
      name (`HEAD_NAMES`) or by a width equal to an embedding's vocabulary.

    The report says for each module why it was left; a logging message (INFO) names the linear ones.

    `include` selects the layers to convert, instead of all but the head; `exclude` removes layers from either
    selection. torch's transformer encoders that contain a converted layer no longer take their fast path in
    evaluation, because it would not call the layer.

    Raises ValueError if a pattern matches no module, which is most likely a spelling mistake.
    """
    plan = plan_conversion(model, include, exclude)
    entries = tuple(entry for entry, _ in plan)
    replacements = {
        module: Fp8Linear.from_linear(module, recipe)
        for entry, module in plan
        if entry.converted and isinstance(module, nn.Linear)
    }
    # A layer may be registered at several paths; all of them are replaced.
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, replacements[module])
            seed_rounding(replacements[module], path=path)
    for entry, module in plan:
        if entry.converted and not isinstance(module, nn.Linear):
            make_fp8(module, recipe, entry.name)
    _disable_fast_path(list(model.modules()))
    _warn_left(entries)
    _log_left(entries)
    _warn_unchanged(entries)
    return ConversionReport(entries)


def plan_conversion(
    model: nn.Module, include: Selection | None = None, exclude: Selection | None = None
) -> list[tuple[Conversion, nn.Module]]:
    """The outcome that `convert` would have for each module that owns parameters; changes nothing.

    Raises ValueError as `convert` does.
    """
    modules = dict(model.named_modules())
    for selection in (include, exclude):
        _check_patterns(selection, modules)
    embeddings = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    unreachable, repeated = _read_directly(modules), _repeated_blocks(modules)
    sharded = any(is_fsdp_module(module) for module in modules.values())
    plan: list[tuple[Conversion, nn.Module]] = []
    for name, module in modules.items():
        if next(module.parameters(recurse=False), None) is None:
            continue
        if not isinstance(module, nn.Linear | Fp8Experts | Fp8GroupedLinear) and expert_weights(module):
            reason = reason_of_experts(module) or _reason_experts_not_selected(name, module, include, exclude)
            plan.append((Conversion(name, type(module).__name__, reason is None, reason or ""), module))
            continue
        reason = READ_BY_PARENT if module in unreachable else _reason_not_convertible(name, module)
        if reason is None and sharded and is_dtensor(getattr(module, "weight", None)):
            reason = IN_FSDP
        if reason is None:
            reason = _reason_not_selected(name, module, include, exclude, embeddings, repeated)
        plan.append((Conversion(name, type(module).__name__, reason is None, reason or ""), module))
    return plan


def fp8_layers(model: nn.Module) -> Iterator[tuple[str, Fp8Linear]]:
    """Every `Fp8Linear` of the model with its path."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            yield name, module


def candidate_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers in high precision that an FP8 run of this model would convert, with their paths.

    These are the layers that `convert` takes by default, and also subclasses of `nn.Linear` that their parent
    calls. `convert` leaves those alone only because they may compute something else.
    """
    modules = dict(model.named_modules())
    embeddings = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    unreachable, repeated = _read_directly(modules), _repeated_blocks(modules)
    for name, module in modules.items():
        if not isinstance(module, nn.Linear) or isinstance(module, Fp8Linear) or _misaligned(module):
            continue
        if module in unreachable:
            continue
        reason = _reason_not_selected(name, module, None, None, embeddings, repeated)
        if reason is None:
            yield name, module


def _read_directly(modules: dict[str, nn.Module]) -> set[nn.Module]:
    """The layers that are never called, because their parent reads their weights."""
    return {
        child
        for module in modules.values()
        for cls in type(module).__mro__
        for name in READ_DIRECTLY.get(f"{cls.__module__}.{cls.__qualname__}", ())
        if isinstance(child := getattr(module, name, None), nn.Linear)
    }


def _repeated_blocks(modules: dict[str, nn.Module]) -> frozenset[str]:
    """The paths of the blocks that a model repeats.

    These are the members of a container that have a sibling of the same class, and the only member of an
    `nn.ModuleList`. A list of heads, which its name says, is not one of blocks.
    """
    paths: set[str] = set()
    for path, container in modules.items():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        name = path.rpartition(".")[2].lower()
        if name.rstrip("s") in HEAD_NAMES or name.endswith("_heads"):
            continue
        kinds = [type(child) for child in container.children()]
        for key, child in container.named_children():
            alone = isinstance(container, nn.ModuleList) and len(kinds) == 1
            # A list repeats what is in it; it is no block itself.
            if not isinstance(child, nn.ModuleList) and (alone or kinds.count(type(child)) > 1):
                paths.add(f"{path}.{key}" if path else key)
    return frozenset(paths)


def _is_inside(name: str, blocks: Collection[str]) -> bool:
    """Return whether a module of this path is inside one of the blocks, and not a block itself."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in blocks for length in range(1, len(parts)))


def _disable_fast_path(modules: Iterable[nn.Module]) -> None:
    """Make torch's encoders call their FP8 layers in evaluation, as they do in training."""
    for module in modules:
        name = _fast_path_flag(module)
        if name is not None and next(fp8_layers(module), None):
            module.__dict__.setdefault(BEFORE_FP8, getattr(module, name))
            setattr(module, name, type(getattr(module, name))(0))


def restore_fast_path(model: nn.Module) -> None:
    """Undo what `convert` has changed in torch's encoders that have no FP8 layer any more."""
    for module in model.modules():
        name = _fast_path_flag(module)
        if name is not None and BEFORE_FP8 in module.__dict__ and not next(fp8_layers(module), None):
            setattr(module, name, module.__dict__.pop(BEFORE_FP8))


def _fast_path_flag(module: nn.Module) -> str | None:
    """The attribute whose false value keeps an encoder of torch from its fast path."""
    if isinstance(module, nn.TransformerEncoderLayer):
        # 0 means an activation that the fast path does not support. Nothing else reads it.
        return "activation_relu_or_gelu"
    # Only the fast path supports nested tensors.
    return "use_nested_tensor" if isinstance(module, nn.TransformerEncoder) else None


def _warn_left(entries: Sequence[Conversion]) -> None:
    """Warn of layers that would be converted if their parent, or another library, used them otherwise."""
    unreachable = [entry.name for entry in entries if entry.reason == READ_BY_PARENT]
    if unreachable:
        warnings.warn(
            f"Left in high precision: {_listed(unreachable)}. The parent reads the weight and never calls "
            "the layer; an FP8 layer would not be used.",
            UserWarning,
            stacklevel=3,
        )
    wrapped = [entry for entry in entries if entry.reason.startswith(WRAPPED)]
    if wrapped:
        warnings.warn(
            f"Left in high precision: {_listed([entry.name for entry in wrapped])}; {wrapped[0].reason}.",
            UserWarning,
            stacklevel=3,
        )


def _log_left(entries: Sequence[Conversion]) -> None:
    """Say which linear layers keep their precision, and why: a head is recognised by rules that may err."""
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.converted and entry.reason not in (NOT_LINEAR, ALREADY):
            by_reason.setdefault(entry.reason, []).append(entry.name or "the model")
    for reason, names in by_reason.items():
        logger.info("Left in high precision: %s (%s).", _listed(names), reason)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _warn_unchanged(entries: Sequence[Conversion]) -> None:
    """Warn if there is no FP8 layer afterwards: the caller believes that the model computes in FP8."""
    if any(entry.converted or entry.reason == ALREADY for entry in entries):
        return
    linear = [entry for entry in entries if entry.reason != NOT_LINEAR]
    shown = "; ".join(f"{entry.name or 'the model'}: {entry.reason}" for entry in linear[:3])
    more = f"; and {len(linear) - 3} more" if len(linear) > 3 else ""
    warnings.warn(
        f"No layer was converted, the model computes as before. {shown or 'It has no linear layer'}{more}.",
        UserWarning,
        stacklevel=3,
    )


def _check_patterns(selection: Selection | None, modules: dict[str, nn.Module]) -> None:
    if selection is None or callable(selection):
        return
    for pattern in (selection,) if isinstance(selection, str) else selection:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(f"The pattern {pattern!r} matches no module; model.named_modules() lists them.")


def matches(selection: Selection, name: str, module: nn.Module) -> bool:
    """Return whether `selection` selects this module of this path."""
    if callable(selection):
        return bool(selection(name, module))
    patterns = (selection,) if isinstance(selection, str) else selection
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _reason_not_convertible(name: str, module: nn.Module) -> str | None:
    """Return why this module cannot become an `Fp8Linear`, or None."""
    if isinstance(module, Fp8Linear | Fp8Experts | Fp8GroupedLinear):
        return ALREADY
    if not isinstance(module, nn.Linear):
        return NOT_LINEAR
    if type(module) is not nn.Linear:
        return "a subclass of Linear, which may compute something else"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if name == "":
        return "the model itself cannot be replaced in place; use Fp8Linear.from_linear"
    weight = module.weight
    if not (type(weight) in PLAIN_TYPES or is_dtensor(weight) or is_fake(weight)):
        return f"{WRAPPED} a {type(weight).__name__}"
    if _misaligned(module):
        return f"{module.in_features} -> {module.out_features} is not in multiples of {ALIGNMENT}"
    return None


def _misaligned(module: nn.Linear) -> bool:
    return bool(module.in_features % ALIGNMENT or module.out_features % ALIGNMENT)


def _reason_experts_not_selected(
    name: str, module: nn.Module, include: Selection | None, exclude: Selection | None
) -> str | None:
    """Return why these convertible 3-D weights are not selected, or None."""
    if exclude is not None and matches(exclude, name, module):
        return "excluded"
    if include is not None:
        return None if matches(include, name, module) else "not included"
    return None if are_known_experts(name, module) else UNKNOWN


def _reason_not_selected(
    name: str,
    module: nn.Module,
    include: Selection | None,
    exclude: Selection | None,
    embeddings: Sequence[nn.Embedding],
    repeated: Collection[str],
) -> str | None:
    """Return why this convertible module is not selected, or None."""
    if exclude is not None and matches(exclude, name, module):
        return "excluded"
    if include is not None:
        return None if matches(include, name, module) else "not included"
    assert isinstance(module, nn.Linear)
    is_in_block = _is_inside(name, repeated)
    if name.rpartition(".")[2] in HEAD_NAMES and not is_in_block:
        return "output head, by its name"
    for embedding in embeddings:
        if module.weight is embedding.weight:
            return "output head: shares the embedding's weight"
        # In a block it is a layer whose width happens to be that, or the length of an embedding of positions.
        if module.out_features == embedding.num_embeddings and not is_in_block:
            return "output head: as wide as the vocabulary"
    return None
