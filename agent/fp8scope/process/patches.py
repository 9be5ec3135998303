"""Replaces functions of other modules for a while, and restores them."""

from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Patch:
    """Wraps the attribute `name` of `owner` until `restore`.

    `wrap` takes the original function and returns the replacement.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Function], Function]) -> None:
        self._owner = owner
        self._name = name
        self._original = getattr(owner, name)
        self._replacement = wrap(self._original)
        setattr(owner, name, self._replacement)

    def is_on(self, owner: Any, name: str) -> bool:
        """Return whether this patch replaces that attribute."""
        return self._owner is owner and self._name == name

    def restore(self) -> bool:
        """Put the original back; False if another library has replaced the attribute since."""
        if getattr(self._owner, self._name) is not self._replacement:
            return False
        setattr(self._owner, self._name, self._original)
        return True
