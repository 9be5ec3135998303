"""What every number on the pages means: one place, shown as help beside each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.runs import RUN_TERMS
from fp8scope_dashboard.pages.glossary.steps import STEP_TERMS
from fp8scope_dashboard.pages.glossary.tensors import TENSOR_TERMS
from fp8scope_dashboard.pages.glossary.term import Term

GLOSSARY: Final[Mapping[str, Term]] = {**RUN_TERMS, **STEP_TERMS, **TENSOR_TERMS}


def title(name: str) -> str:
    """A statistic's or scalar's name for people; the name itself where the glossary has none."""
    return GLOSSARY[name].title if name in GLOSSARY else name.replace("_", " ")
