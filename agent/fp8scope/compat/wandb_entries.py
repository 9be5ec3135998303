"""Objects of W&B's interface that hold what a script puts into them."""

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger("fp8scope")


class Media:
    """Stands for what is no number. It is counted when it is logged, and not recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments, and keep nothing."""

    def add_data(self, *row: Any) -> None:
        """Add nothing."""

    def add_column(self, *args: Any, **kwargs: Any) -> None:
        """Add nothing."""


class LoggedImage(Media):
    """An image, which is recorded: an array, a tensor, a PIL image or a path, with a caption."""

    def __init__(
        self, data_or_path: Any, mode: Any = None, caption: str | None = None, **kwargs: Any
    ) -> None:
        """Keep the image until it is logged; other arguments are not used."""
        self.image = data_or_path
        self._caption = caption


class LoggedTable(Media):
    """A table, which is recorded."""

    def __init__(
        self,
        columns: Sequence[Any] | None = None,
        data: Any = None,
        rows: Any = None,
        dataframe: Any = None,
        **kwargs: Any,
    ) -> None:
        """Take columns and rows, or a data frame."""
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.to_numpy().tolist()
        self.columns = list(columns or ("Input", "Output", "Expected"))
        self.data = [list(row) for row in (rows if data is None else data) or ()]

    def add_data(self, *row: Any) -> None:
        """Add a row."""
        self.data.append(list(row))


class WandbSettings(SimpleNamespace):
    """Settings of a run, kept as they are given; fp8scope reads `mode`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class WandbEntries(MutableMapping[str, Any]):
    """A configuration or a summary: entries by item and by attribute. `changed` is called with new ones."""

    def __init__(self, changed: Callable[[Mapping[str, Any]], object]) -> None:
        object.__setattr__(self, "_entries", {})
        object.__setattr__(self, "_changed", changed)

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._entries[name]
        except KeyError:
            raise AttributeError(f"there is no entry {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, values: Any = (), /, allow_val_change: bool | None = None, **named: Any) -> None:
        """Set entries, as W&B does: a mapping or a namespace of argparse."""
        new = {**entries_of(values), **named}
        self._entries.update(new)
        self._changed(new)

    def setdefaults(self, values: Any) -> None:
        """Set entries that are not set."""
        self.update({name: value for name, value in entries_of(values).items() if name not in self._entries})

    def as_dict(self) -> dict[str, Any]:
        """Return the entries."""
        return dict(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)


def entries_of(values: Any) -> dict[str, Any]:
    """The entries of a mapping, a namespace or another object with attributes; of a text none."""
    if isinstance(values, Mapping):
        return {str(name): value for name, value in values.items()}
    if isinstance(values, argparse.Namespace | SimpleNamespace):
        return dict(vars(values))
    if isinstance(values, str):
        logger.warning("wandb: the configuration file %r is not read; pass a dictionary.", values[:200])
        return {}
    return dict(values) if isinstance(values, list | tuple) else dict(getattr(values, "__dict__", {}))
