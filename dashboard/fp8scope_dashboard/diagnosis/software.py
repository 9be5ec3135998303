"""Step (b): the software. Versions with known faults, and versions mixed over ranks.

`KNOWN` has few entries on purpose: only what a project's own issue or release notes say of its versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding


@dataclass(frozen=True, kw_only=True)
class KnownTrouble:
    """Versions `first` <= version < `before` of a package, if the condition holds; see `source`."""

    package: str
    first: tuple[int, ...]
    before: tuple[int, ...]
    what: str
    source: str
    rowwise: bool = False


KNOWN: Final = (
    KnownTrouble(
        package="transformer_engine", first=(0,), before=(1, 6),
        what="weights that fp8_model_init stores in FP8 have a numerical fault, which 1.6 fixes",
        source="https://github.com/NVIDIA/TransformerEngine/releases/tag/v1.6",
    ),
    KnownTrouble(
        package="transformer_engine", first=(1, 7), before=(1, 8),
        what="with is_first_microbatch the scale of a cached FP8 weight changes while its data do not",
        source="https://github.com/NVIDIA/TransformerEngine/issues/1047",
    ),
    KnownTrouble(
        package="transformer_engine", first=(2, 2), before=(2, 3),
        what="the custom DDP of megatron-core has a numerical fault, which 2.3 fixes",
        source="https://github.com/NVIDIA/TransformerEngine/releases/tag/v2.3",
    ),
    KnownTrouble(
        package="torch", first=(2, 7), before=(2, 8),
        what="torch.compile with RMSNorm and row-wise float8 gave NaN in nightly builds after 2.6",
        source="https://github.com/pytorch/pytorch/issues/150859",
        rowwise=True,
    ),
)  # fmt: skip
PACKAGES: Final = ("torch", "torchao", "transformer_engine", "triton", "fp8scope", "cuda", "cudnn", "driver")


def examine(environments: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any]) -> Finding:
    """The finding of this step, from the environment of each rank that sent one.

    A known fault is a suspect only: whether the training uses what is faulty cannot be seen.
    """
    if not environments:
        return Finding(step="software", outcome="unknown", sentence="The run's environment is not recorded.")
    mixed = _mixed(environments)
    if mixed:
        package, versions = mixed[0]
        sentence = f"The processes of the run have different versions of {package}: {' and '.join(versions)}."
        return Finding(
            step="software", outcome="suspect", sentence=sentence, cause="mixed_versions",
            suggestion="Install the same versions on every node.", links=(EvidenceLink("ranks", "Ranks"),),
        )  # fmt: skip
    environment = environments[0]
    for fault in KNOWN:
        version = _version(str(environment.get(fault.package, "")))
        if version and fault.first <= version < fault.before and (not fault.rowwise or _is_rowwise(recipe)):
            sentence = f"{fault.package} {environment[fault.package]} is known for this: {fault.what}."
            return Finding(
                step="software", outcome="suspect", sentence=sentence, cause="known_version",
                suggestion="Update it, or check that the training does not use this.",
                links=(EvidenceLink("source", fault.source, {"address": fault.source}),),
            )  # fmt: skip
    listed = ", ".join(f"{name} {environment[name]}" for name in PACKAGES[:4] if environment.get(name))
    return Finding(
        step="software",
        outcome="clear",
        sentence=f"No version with a known fault ({listed or 'none recorded'}).",
    )


def _mixed(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Packages of which the ranks have several versions. `mixed_versions` is what registration collected."""
    collected = environments[0].get("mixed_versions")
    if isinstance(collected, Mapping):
        return [(str(name), sorted(map(str, versions))) for name, versions in sorted(collected.items())]
    mixed = []
    for package in PACKAGES:
        versions = sorted({str(other[package]) for other in environments if other.get(package)})
        if len(versions) > 1:
            mixed.append((package, versions))
    return mixed


def _version(text: str) -> tuple[int, ...]:
    """`2.7.1+cu126` -> (2, 7, 1); empty if it does not begin with a number."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _is_rowwise(recipe: Mapping[str, Any]) -> bool:
    return recipe.get("recipe") == "RowwiseScaling" or "rowwise" in str(recipe.values())
