"""The definitions that the pages show as help beside each number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.quantities import QUANTITY_TERMS
from fp8scope_dashboard.pages.glossary.runs import RUN_TERMS
from fp8scope_dashboard.pages.glossary.steps import STEP_TERMS
from fp8scope_dashboard.pages.glossary.tensors import TENSOR_TERMS
from fp8scope_dashboard.pages.glossary.term import Term

GLOSSARY: Final[Mapping[str, Term]] = {**RUN_TERMS, **QUANTITY_TERMS, **STEP_TERMS, **TENSOR_TERMS}


def title(name: str) -> str:
    """The title of a statistic or scalar; its name with spaces if the glossary has no entry."""
    return GLOSSARY[name].title if name in GLOSSARY else name.replace("_", " ")
