"""Columns as tables of other packages, which are imported when they are asked for."""

import importlib
from collections.abc import Mapping
from typing import Any

from fp8scope.client.connection import ClientError

Columns = Mapping[str, Any]


def to_arrow(columns: Columns) -> Any:
    """A pyarrow.Table. Raises ClientError without pyarrow."""
    pyarrow = _package("pyarrow")
    return pyarrow.table({name: _arrow_values(pyarrow, values) for name, values in columns.items()})


def to_pandas(columns: Columns, index: str) -> Any:
    """A pandas.DataFrame whose index is a column. Raises ClientError without pandas."""
    frame = _package("pandas").DataFrame({name: _plain(values) for name, values in columns.items()})
    return frame.set_index(index)


def to_polars(columns: Columns) -> Any:
    """A polars.DataFrame. Raises ClientError without polars."""
    return _package("polars").DataFrame({name: _plain(values) for name, values in columns.items()})


def _plain(values: Any) -> Any:
    """The rows of a matrix as lists: a column has one value in each row."""
    return list(values) if getattr(values, "ndim", 1) > 1 else values


def _arrow_values(pyarrow: Any, values: Any) -> Any:
    if getattr(values, "ndim", 1) < 2:
        return pyarrow.array(values)
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), values.shape[1])


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ClientError(f"{name} cannot be imported: pip install {name}, or use .numpy()") from None
