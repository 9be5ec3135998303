"""What describes a run, readable and writable while it runs: `run.config` and `run.summary`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fp8scope.metadata.redaction import plain
from fp8scope.observe.collector import is_tensor


class Entries(Mapping[str, Any]):
    """Plain values by name, as the server has them or will soon. Setting one sends it; none can be deleted.

    A value that is a mapping is read as `Entries` as well, so that `run.config["model"]["width"] = 8` counts.
    Values become what JSON can hold; a tensor of one element becomes its number, which waits for its device.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._read = read
        self._write = write

    def __getitem__(self, name: str) -> Any:
        value = self._read()[name]
        if isinstance(value, dict):
            return Entries(
                lambda: self._read().get(name, {}), lambda new: self.update({name: {**value, **new}})
            )
        return list(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Set several; those of the same name are replaced."""
        self._write({**(values or {}), **named})

    def __repr__(self) -> str:
        return repr(dict(self._read()))


def plain_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON can hold them: see `Entries`."""
    known: dict[str, Any] = plain({str(name): _number(value) for name, value in values.items()})
    return known


def _number(value: Any) -> Any:
    if is_tensor(value):
        return value.item() if value.numel() == 1 else f"<Tensor {list(value.shape)}>"
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): _number(each) for name, each in value.items()}
    return value
