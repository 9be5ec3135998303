"""Errors of the cold store. `reason` completes a sentence: the cold store, which ..."""

from __future__ import annotations

from uuid import UUID


class ColdStoreError(Exception):
    """Values that cannot be read from the cold store, or written to it.

    Attributes:
        reason: says what is wrong, without the address of the store.
        run_id: the run whose values they are, if they are those of one.
    """

    def __init__(self, reason: str, run_id: UUID | None = None) -> None:
        super().__init__(f"The cold store {reason}.")
        self.reason = reason
        self.run_id = run_id


class ColdStoreAwayError(ColdStoreError):
    """The store is not set up, or does not answer; it may later."""


class ColdValuesLostError(ColdStoreError):
    """The store answers, and has not what was written to it."""
