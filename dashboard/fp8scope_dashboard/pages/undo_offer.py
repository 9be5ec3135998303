"""The offer to undo what a person has just removed: a button beside the message on the next page."""

from __future__ import annotations

from typing import Any, Final, TypedDict

from django.http import HttpRequest

SESSION_ENTRY: Final = "undo_offer"


class UndoOffer(TypedDict):
    """A form that makes again what was removed: its words, its address and its hidden fields."""

    words: str
    address: str
    fields: dict[str, str]


def offer_undo(request: HttpRequest, words: str, address: str, **fields: str) -> None:
    """Offer the form on the next page that this browser shows."""
    request.session[SESSION_ENTRY] = UndoOffer(words=words, address=address, fields=fields)


def undo_offer(request: HttpRequest) -> dict[str, Any]:
    """Context processor: `undo_offer`, which a template evaluates once where it shows the messages."""

    def take() -> UndoOffer | None:
        # A request that is refused at once, such as for an unknown host, has no session.
        session = getattr(request, "session", {})
        # Parts of pages have no place for it.
        if "HX-Request" in request.headers or SESSION_ENTRY not in session:
            return None
        offer: UndoOffer = session.pop(SESSION_ENTRY)
        return offer

    return {"undo_offer": take}
