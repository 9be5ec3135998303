"""Turn a model's linear layers into FP8 ones, in place."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fp8scope_kernels.linear import Fp8Linear
from fp8scope_kernels.matmul import ALIGNMENT
from fp8scope_kernels.recipes import Recipe

Selection = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Glob patterns over module paths (`*.mlp.*`), or a function of path and module."""

READ_DIRECTLY: dict[str, tuple[str, ...]] = {
    "torch.nn.modules.activation.MultiheadAttention": ("out_proj",),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ("qkv", "proj"),
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": ("qkv", "proj"),
}
"""Children whose weights a class multiplies by itself, without calling them, by the name of the class."""
READ_BY_PARENT = "its parent reads its weight and never calls it"

HEAD_NAMES = frozenset(
    ("lm_head", "head", "output", "output_layer", "embed_out", "unembed", "classifier", "score")
)


@dataclass(frozen=True)
class Conversion:
    """What became of one module that owns parameters; `reason` is empty where it was converted."""

    name: str
    kind: str
    converted: bool
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did, in the order of the model's modules; `str(report)` is a table."""

    entries: tuple[Conversion, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """The paths of the modules that are `Fp8Linear` now."""
        return tuple(entry.name for entry in self.entries if entry.converted)

    @property
    def left(self) -> tuple[str, ...]:
        """The paths of the modules that keep their precision."""
        return tuple(entry.name for entry in self.entries if not entry.converted)

    def __str__(self) -> str:
        rows = [("module", "kind", "precision", "reason")]
        for entry in self.entries:
            rows.append((entry.name, entry.kind, "fp8" if entry.converted else "left", entry.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def convert(
    model: nn.Module, recipe: Recipe, include: Selection | None = None, exclude: Selection | None = None
) -> ConversionReport:
    """Replace the `nn.Linear` modules inside `model` by `Fp8Linear`, in place, sharing their parameters.

    Optimizers and state_dict keys of the parameters stay valid. Left in high precision are: everything that
    is not exactly an `nn.Linear` (embeddings, norms, attention's own projections), layers that their parent
    never calls (`READ_DIRECTLY`; a warning names them), sizes that are not multiples of 16, and the output
    head (by its name, by a weight shared with an embedding, or by a width equal to an embedding's
    vocabulary). `include` names what to convert instead of all but the head;
    `exclude` takes away from either. Transformer encoders of torch that contain a converted layer no longer
    take their fast path in evaluation, which would not call it.

    Raises ValueError when a pattern matches no module, which is most likely a spelling mistake.
    """
    modules = dict(model.named_modules())
    for selection in (include, exclude):
        _check_patterns(selection, modules)
    embeddings = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    unreachable = _read_directly(modules)
    entries: list[Conversion] = []
    replacements: dict[nn.Module, Fp8Linear] = {}
    for name, module in modules.items():
        if next(module.parameters(recurse=False), None) is None:
            continue
        reason = READ_BY_PARENT if module in unreachable else _why_not(name, module)
        if reason is None:
            reason = _why_not_selected(name, module, include, exclude, embeddings)
        if reason is None and isinstance(module, nn.Linear):
            replacements[module] = Fp8Linear.from_linear(module, recipe)
        entries.append(Conversion(name, type(module).__name__, reason is None, reason or ""))
    for parent in modules.values():
        for child_name, child in list(parent._modules.items()):
            if child in replacements:
                setattr(parent, child_name, replacements[child])
    _leave_fast_path(modules.values())
    _tell_unreachable(entries)
    return ConversionReport(tuple(entries))


def fp8_layers(model: nn.Module) -> Iterator[tuple[str, Fp8Linear]]:
    """Every `Fp8Linear` of the model with its path."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            yield name, module


def candidate_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that are not FP8 and would be in an FP8 run of this model, with their paths.

    That is, what `convert` takes when it is asked for nothing in particular, and subclasses of `nn.Linear`
    too, if their parent calls them: those it leaves alone only because they may compute something else.
    """
    modules = dict(model.named_modules())
    embeddings = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    unreachable = _read_directly(modules)
    for name, module in modules.items():
        if not isinstance(module, nn.Linear) or isinstance(module, Fp8Linear) or _misaligned(module):
            continue
        if module in unreachable:
            continue
        reason = _why_not_selected(name, module, None, None, embeddings)
        if reason is None:
            yield name, module


def _read_directly(modules: dict[str, nn.Module]) -> set[nn.Module]:
    """The layers that are never called, because their parent takes their weights for itself."""
    return {
        child
        for module in modules.values()
        for cls in type(module).__mro__
        for name in READ_DIRECTLY.get(f"{cls.__module__}.{cls.__qualname__}", ())
        if isinstance(child := module._modules.get(name), nn.Linear)
    }


def _leave_fast_path(modules: Iterable[nn.Module]) -> None:
    """Make torch's encoders call their FP8 layers in evaluation, as they do in training."""
    for module in modules:
        if isinstance(module, nn.TransformerEncoderLayer) and next(fp8_layers(module), None):
            # Says that the activation is neither of the two that the fast path knows; read for nothing else.
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and next(fp8_layers(module), None):
            # Only the fast path takes nested tensors.
            module.use_nested_tensor = False


def _tell_unreachable(entries: Sequence[Conversion]) -> None:
    names = [entry.name for entry in entries if entry.reason == READ_BY_PARENT]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"Left in high precision: {shown}. The parent reads the weight and never calls the layer; an FP8 "
            "layer would not be used.",
            UserWarning,
            stacklevel=3,
        )


def _check_patterns(selection: Selection | None, modules: dict[str, nn.Module]) -> None:
    if selection is None or callable(selection):
        return
    for pattern in (selection,) if isinstance(selection, str) else selection:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(f"The pattern {pattern!r} matches no module; model.named_modules() lists them.")


def _matches(selection: Selection, name: str, module: nn.Module) -> bool:
    if callable(selection):
        return bool(selection(name, module))
    patterns = (selection,) if isinstance(selection, str) else selection
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _why_not(name: str, module: nn.Module) -> str | None:
    """Why this module cannot become an `Fp8Linear`, or None."""
    if isinstance(module, Fp8Linear):
        return "is FP8 already"
    if not isinstance(module, nn.Linear):
        return "not a linear layer"
    if type(module) is not nn.Linear:
        return "a subclass of Linear, which may compute something else"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if name == "":
        return "the model itself cannot be replaced in place; use Fp8Linear.from_linear"
    if _misaligned(module):
        return f"{module.in_features} -> {module.out_features} is not in multiples of {ALIGNMENT}"
    return None


def _misaligned(module: nn.Linear) -> bool:
    return bool(module.in_features % ALIGNMENT or module.out_features % ALIGNMENT)


def _why_not_selected(
    name: str,
    module: nn.Module,
    include: Selection | None,
    exclude: Selection | None,
    embeddings: Sequence[nn.Embedding],
) -> str | None:
    """Why this convertible module is left by choice, or None."""
    if exclude is not None and _matches(exclude, name, module):
        return "excluded"
    if include is not None:
        return None if _matches(include, name, module) else "not included"
    assert isinstance(module, nn.Linear)
    if name.rpartition(".")[2] in HEAD_NAMES:
        return "output head, by its name"
    for embedding in embeddings:
        if module.weight is embedding.weight:
            return "output head: shares the embedding's weight"
        if module.out_features == embedding.num_embeddings:
            return "output head: as wide as the vocabulary"
    return None
