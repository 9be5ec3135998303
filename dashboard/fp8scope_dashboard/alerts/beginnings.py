"""The beginning of an alert, from the evidence that it stores: the same for pages, messages and API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8scope_dashboard.text.onsets import steps_in_words


def first_tensor(evidence: Mapping[str, Any], onset: int) -> dict[str, Any]:
    """The entry of the tensor with which a condition begins; empty if it is not known.

    Alerts of earlier versions name only their worst tensors.
    """
    listed = [*([evidence["first"]] if evidence.get("first") else []), *evidence.get("tensors", [])]
    return next((dict(tensor) for tensor in listed if tensor.get("onset_step") == onset), {})


def after_step(evidence: Mapping[str, Any], onset: int) -> int | None:
    """The last step before the onset at which the first tensor was looked at; see `text.onsets`."""
    after = first_tensor(evidence, onset).get("after_step")
    return None if after is None else int(after)


def onset_of_further(entry: Mapping[str, Any]) -> int:
    """The onset of what another rule found about the same tensors: that of its first tensor."""
    first = entry.get("first") or {}
    return min(int(entry["onset_step"]), int(first.get("onset_step", entry["onset_step"])))


def further_in_words(entry: Mapping[str, Any]) -> str:
    """The steps of `onset_of_further` in words."""
    onset = onset_of_further(entry)
    return steps_in_words(onset, after_step(entry, onset))
