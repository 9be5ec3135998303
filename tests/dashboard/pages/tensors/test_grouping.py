"""Folding tensors into rows: the natural order, groups, ranges, and what is open at first."""

from __future__ import annotations

import pytest

from fp8scope_dashboard.pages.tensors.grouping import (
    MAX_OPEN,
    MAX_ROWS,
    TensorGroup,
    fitting,
    folded,
    kind_of,
    layers_of,
    opened_in,
    shortened,
    visible,
)
from fp8scope_dashboard.text.natural_order import natural_key

ROLES = ("input", "weight", "grad_output")
LINEARS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def model(blocks: int) -> tuple[list[str], list[str]]:
    """The names and roles of a transformer's tensors, in an order in which block 10 comes before block 2."""
    order = sorted(range(blocks), key=str)
    modules = [f"blocks.{block}.{linear}" for block in order for linear in LINEARS]
    names = [f"{module}.{role}" for module in ["embed", *modules, "head"] for role in ROLES]
    return names, [name.rpartition(".")[2] for name in names]


def tensors_in(groups: tuple[TensorGroup, ...]) -> list[int]:
    return [i for group in groups for i in (tensors_in(group.children) or group.positions)]


def test_it_works() -> None:
    names, roles = model(3)
    groups = folded(names, roles)
    assert [group.label for group in groups] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    block = groups[1]
    assert len(block.positions) == 12
    assert [child.label for child in block.children] == [f"blocks.0 · {role}" for role in ROLES]
    assert [names[i] for i in block.children[2].positions] == [
        f"blocks.0.{linear}.grad_output" for linear in LINEARS
    ]


def test_layers_follow_their_numbers_wherever_the_model_registered_them() -> None:
    groups = folded(*model(12))
    assert [group.label for group in groups[1:-1]] == [f"blocks.{i}" for i in range(12)]
    assert groups[0].label == "embed" and groups[-1].label == "head", "others keep the order of the model"


@pytest.mark.parametrize(
    ("before", "after"),
    [("blocks.2", "blocks.10"), ("a9b", "a10a"), ("layer", "layer.0"), ("x1y2", "x1y10"), ("9", "²")],
)
def test_natural_order(before: str, after: str) -> None:
    assert natural_key(before) < natural_key(after)


@pytest.mark.parametrize("fold", ["layer", "role", "kind"])
@pytest.mark.parametrize("blocks", [1, 2, 7, 61, 168])
def test_every_tensor_is_in_exactly_one_place(fold: str, blocks: int) -> None:
    names, roles = model(blocks)
    groups = folded(names, roles, fold)  # type: ignore[arg-type]
    assert sorted(tensors_in(groups)) == list(range(len(names)))
    keys = [row.group.key for row in visible(groups, {"*"} | every_key(groups))]
    assert len(keys) == len(set(keys)) and not any("," in key for key in keys)


def every_key(groups: tuple[TensorGroup, ...]) -> set[str]:
    return {key for group in groups for key in {group.key} | every_key(group.children)}


@pytest.mark.parametrize("fold", ["layer", "role", "kind"])
@pytest.mark.parametrize("blocks", [1, 3, 12, 24, 48, 96, 168, 500])
def test_the_first_view_has_few_rows(fold: str, blocks: int) -> None:
    groups = folded(*model(blocks), fold)  # type: ignore[arg-type]
    assert len(visible(groups)) <= MAX_ROWS


def test_2000_tensors_become_readable_rows() -> None:
    rows = visible(folded(*model(166)))
    assert 30 <= len(rows) <= MAX_ROWS
    assert "blocks.0–4" in [row.group.label for row in rows]


def test_a_range_opens_into_its_layers() -> None:
    groups = folded(*model(166))
    rows = visible(groups, {"blocks.0–4", "blocks.0–4/blocks.2"})
    labels = [(row.level, row.group.label) for row in rows]
    at = labels.index((0, "blocks.0–4"))
    assert labels[at + 1 : at + 8] == [
        (1, "blocks.0"),
        (1, "blocks.1"),
        (1, "blocks.2"),
        (2, "blocks.2 · input"),
        (2, "blocks.2 · weight"),
        (2, "blocks.2 · grad_output"),
        (1, "blocks.3"),
    ]


def test_small_models_are_open() -> None:
    names, roles = model(2)
    assert {row.group.label for row in visible(folded(names, roles)) if row.group.is_tensor} == set(names)


def test_groups_open_level_by_level_while_they_fit() -> None:
    groups = folded(*model(6))
    assert fitting(groups, most=8) == set()
    assert {key.count("/") for key in fitting(groups, most=40)} == {0}


def test_experts_are_layers_in_layers() -> None:
    names = [f"blocks.{b}.experts.{e}.{m}.weight" for b in range(2) for e in range(3) for m in ("up", "down")]
    names += ["blocks.0.router.weight"]
    (first, second) = folded(names, ["weight"] * len(names))
    assert [child.label for child in first.children] == [
        "blocks.0.experts.0",
        "blocks.0.experts.1",
        "blocks.0.experts.2",
        "blocks.0.router.weight",
    ]
    assert len(second.positions) == 6


def test_a_group_of_one_tensor_is_the_tensor() -> None:
    (only,) = folded(["head.weight"], ["weight"])
    assert only.is_tensor and only.label == "head.weight"


def test_by_kind_the_same_tensor_of_all_layers_is_together() -> None:
    groups = folded(*model(9), "kind")
    row = next(group for group in groups if group.label == "blocks.*.mlp.up.input")
    assert [child.label for child in row.children] == [f"blocks.{i}.mlp.up.input" for i in range(9)]


def test_by_role_the_layers_of_a_role_are_together() -> None:
    groups = folded(*model(3), "role")
    assert [group.label for group in groups] == list(ROLES)
    assert [child.label for child in groups[0].children][1] == "blocks.0 · input"


@pytest.mark.parametrize(
    ("module", "layers"),
    [
        ("blocks.2.mlp.up", ["blocks.2"]),
        ("blocks.2.experts.5.up", ["blocks.2", "blocks.2.experts.5"]),
        ("model.embed_tokens", ["model.embed_tokens"]),
        ("0.weight_1", ["0"]),
        ("", [""]),
    ],
)
def test_layers(module: str, layers: list[str]) -> None:
    assert layers_of(module) == layers


def test_kinds() -> None:
    assert kind_of("h.10.attn.3.q.input") == "h.*.attn.*.q.input"


@pytest.mark.parametrize(
    ("text", "opened"),
    [(None, None), ("", None), ("-", set()), ("a,b/c", {"a", "b/c"}), ("x" * 9_000, {"x" * 6_000})],
)
def test_reads_open_groups_from_the_address(text: str | None, opened: set[str] | None) -> None:
    assert opened_in(text) == opened


def test_an_address_opens_a_limited_number_of_groups() -> None:
    assert len(opened_in(",".join(map(str, range(1_000)))) or ()) == MAX_OPEN


def test_unknown_keys_open_nothing() -> None:
    groups = folded(*model(3))
    assert len(visible(groups, {"no such group"})) == len(groups)


@pytest.mark.parametrize(
    ("label", "above", "short"),
    [
        ("blocks.2 · input", ["blocks.2"], "input"),
        ("blocks.2.mlp.up.input", ["blocks.2", "blocks.2 · input"], "mlp.up"),
        ("blocks.2.experts.5", ["blocks.2"], "experts.5"),
        ("blocks.2 · input", ["input"], "blocks.2"),
        ("blocks.2.mlp.up.input", ["input", "blocks.2 · input"], "mlp.up"),
        ("blocks.2.mlp.up.input", ["blocks.*.mlp.up.input"], "blocks.2"),
        ("blocks.20.mlp.up.input", ["blocks.2"], "blocks.20.mlp.up.input"),
        ("head.input", ["head", "head · input"], "head.input"),
        ("blocks.2", [], "blocks.2"),
    ],
)
def test_names_are_shortened_by_what_stands_above_them(label: str, above: list[str], short: str) -> None:
    assert shortened(label, above) == short
