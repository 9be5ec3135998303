"""Fold many tensors into few rows: by layer and role, by role and layer, or by kind of layer.

Pure functions of names. A tensor's name is `<module path>.<role>`. A layer is the part of the path up to a
number: `blocks.2` of `blocks.2.mlp.up.input`. Numbers further down, as of experts, make layers in layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal, get_args

from fp8scope_dashboard.text.natural_order import NUMBER, natural_key

Fold = Literal["layer", "role", "kind"]
FOLDS: Final = get_args(Fold)

# The rows that are readable at once. Groups are opened level by level up to this number.
MAX_ROWS: Final = 60
# More neighbours than MAX_ROWS are put together into about this many ranges.
RANGES: Final = 40
# The most groups that an address opens, and the length of all their keys.
MAX_OPEN, OPEN_LENGTH = 200, 6_000
# The address that opens no group.
NONE: Final = "-"

# Between a layer and a role.
SEPARATOR: Final = " · "


@dataclass(frozen=True)
class TensorGroup:
    """A row that can be opened, or one tensor.

    Attributes:
        key: identifies the group within a fold, in addresses as well.
        label: the full name.
        positions: of its tensors in the list of names.
        children: empty for a tensor.
    """

    key: str
    label: str
    positions: tuple[int, ...]
    children: tuple[TensorGroup, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return not self.children


@dataclass(frozen=True)
class VisibleRow:
    """A visible row; `level` counts from 0. `short`: its label without what the rows above it have said."""

    group: TensorGroup
    level: int
    is_open: bool
    short: str


def layers_of(module: str) -> list[str]:
    """The layers around a module, outermost first; the module itself if its path has no number.

    >>> layers_of("blocks.2.experts.5.up")
    ['blocks.2', 'blocks.2.experts.5']
    """
    parts = module.split(".")
    prefixes = [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isascii() and part.isdigit()]
    return prefixes or [module]


def kind_of(name: str) -> str:
    """The name with * for its numbers: what the same tensor is called in every layer."""
    return ".".join("*" if part.isascii() and part.isdigit() else part for part in name.split("."))


def folded(names: Sequence[str], roles: Sequence[str], fold: Fold = "layer") -> tuple[TensorGroup, ...]:
    """The groups of all tensors. Siblings keep the order of the model; numbered ones follow their numbers.

    Args:
        names, roles: of N tensors, in the order of the model.
        fold: the levels: layer then role, role then layer, or the kind of tensor.
    """
    paths = [_path(name, role, fold) for name, role in zip(names, roles, strict=True)]
    return _groups("", range(len(names)), paths, names, 0)


def visible(groups: Sequence[TensorGroup], opened: Collection[str] | None = None) -> list[VisibleRow]:
    """The rows to show, parents before children. None opens whole levels while they fit in MAX_ROWS."""
    return list(_rows(groups, fitting(groups) if opened is None else opened, 0))


def fitting(groups: Sequence[TensorGroup], most: int = MAX_ROWS) -> set[str]:
    """The keys of the groups on the outer levels that can all be open in `most` rows."""
    opened: set[str] = set()
    level, rows = list(groups), len(groups)
    while level:
        below = [child for group in level for child in group.children]
        if not below or rows + len(below) > most:
            break
        opened |= {group.key for group in level if group.children}
        level, rows = below, rows + len(below)
    return opened


def opened_in(text: str | None) -> set[str] | None:
    """The keys in the field `open` of an address; None if the address does not say."""
    if not text:
        return None
    return set(text[:OPEN_LENGTH].split(",")[:MAX_OPEN]) - {NONE}


def shortened(label: str, above: Sequence[str]) -> str:
    """A label without the layers and the role that the labels `above` it have said, for narrow screens.

    >>> shortened("blocks.2.mlp.up.input", ["blocks.2", "blocks.2 · input"])
    'mlp.up'
    """
    stem, _, role = label.partition(SEPARATOR)
    for said in reversed(above):
        layer, _, said_role = said.partition(SEPARATOR)
        if "*" in layer:
            return _up_to_the_last_number(stem, layer)
        if said_role and role == said_role:
            role = ""
        elif said_role or not layer.count("."):
            stem = stem.removesuffix(f".{said_role or layer}")
            role = "" if role == layer else role
        stem = "" if stem == layer else stem.removeprefix(f"{layer}.")
    return SEPARATOR.join(part for part in (stem, role) if part) or label


def _up_to_the_last_number(name: str, kind: str) -> str:
    parts, kinds = name.split("."), kind.split(".")
    numbers = [i for i, part in enumerate(kinds[: len(parts)]) if part == "*"]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else name


def _rows(
    groups: Sequence[TensorGroup], opened: Collection[str], level: int, above: tuple[str, ...] = ()
) -> Iterator[VisibleRow]:
    for group in groups:
        is_open = bool(group.children) and group.key in opened
        yield VisibleRow(group, level, is_open, shortened(group.label, above))
        if is_open:
            yield from _rows(group.children, opened, level + 1, (*above, group.label))


def _path(name: str, role: str, fold: Fold) -> tuple[str, ...]:
    """The labels of the groups around a tensor, outermost first."""
    module = name.removesuffix(f".{role}") if role else name
    layers = layers_of(module)
    if fold == "kind":
        return (kind_of(name),)
    if fold == "role":
        return (role or "other", *(f"{layer}{SEPARATOR}{role}" for layer in layers))
    return (*layers, f"{layers[-1]}{SEPARATOR}{role}")


def _groups(
    key: str, positions: Sequence[int], paths: Sequence[tuple[str, ...]], names: Sequence[str], depth: int
) -> tuple[TensorGroup, ...]:
    """The groups of some tensors by the labels of their paths at `depth`."""
    by_label: dict[str, list[int]] = {}
    tensors: list[TensorGroup] = []
    for i in positions:
        if depth < len(paths[i]):
            by_label.setdefault(paths[i][depth], []).append(i)
        else:
            tensors.append(TensorGroup(_join(key, names[i]), names[i], (i,)))
    groups = []
    for label, members in by_label.items():
        own = _join(key, label)
        children = _groups(own, members, paths, names, depth + 1)
        # A group of one child is that child.
        if len(children) == 1:
            groups.append(replace(children[0], label=_shortest(label, children[0])))
        else:
            groups.append(TensorGroup(own, label, tuple(members), children))
    return _in_ranges(key, tuple(_naturally([*groups, *tensors])))


def _shortest(label: str, child: TensorGroup) -> str:
    return child.label if child.is_tensor else label


def _join(key: str, label: str) -> str:
    # Commas separate keys in addresses.
    return f"{key}/{label}".removeprefix("/").replace(",", ";")


def _naturally(groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    """Siblings by their first tensor, but those that differ only in numbers together and by number."""
    first: dict[str, int] = {}
    for group in groups:
        stem = _stem(group.label)
        first[stem] = min(first.get(stem, group.positions[0]), group.positions[0])
    return sorted(groups, key=lambda group: (first[_stem(group.label)], natural_key(group.label)))


def _stem(label: str) -> str:
    """Return what labels have in common that differ only in their numbers."""
    return NUMBER.sub("#", label)


def _in_ranges(key: str, groups: tuple[TensorGroup, ...]) -> tuple[TensorGroup, ...]:
    """Neighbours put together, if there are more than MAX_ROWS. Mostly those that differ only in numbers."""
    if len(groups) <= MAX_ROWS:
        return groups
    size = -(-len(groups) // RANGES)
    stems = [list(run) for _, run in groupby(groups, key=lambda group: _stem(group.label))]
    pieces = [run[i : i + size] for run in stems for i in range(0, len(run), size)]
    if len(pieces) > MAX_ROWS:
        pieces = [list(groups[i : i + size]) for i in range(0, len(groups), size)]
    return tuple(_range(key, piece) if len(piece) > 1 else piece[0] for piece in pieces)


def _range(key: str, groups: Sequence[TensorGroup]) -> TensorGroup:
    label = _range_label(groups[0].label, groups[-1].label)
    own = _join(key, label)
    members = tuple(i for group in groups for i in group.positions)
    return TensorGroup(own, label, members, tuple(_rekeyed(group, key, own) for group in groups))


def _rekeyed(group: TensorGroup, before: str, after: str) -> TensorGroup:
    """The group and what is in it, with keys below `after` instead of `before`."""
    rest = group.key.removeprefix(before).removeprefix("/")
    children = tuple(_rekeyed(child, before, after) for child in group.children)
    return replace(group, key=f"{after}/{rest}", children=children)


def _range_label(first: str, last: str) -> str:
    """`blocks.4–7` for the labels of neighbours that differ in one number, else `first … last`.

    >>> _range_label("blocks.4 · input", "blocks.7 · input")
    'blocks.4–7 · input'
    """
    a, b = NUMBER.split(first), NUMBER.split(last)
    different = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) == len(b) and len(different) == 1 and a[different[0]].isdigit():
        i = different[0]
        return "".join([*a[:i], f"{a[i]}–{b[i]}", *a[i + 1 :]])
    return f"{first} … {last}"
