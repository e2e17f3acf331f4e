"""Makes DataFrames. Only this module imports pandas, and only when a table is asked for."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pytracer.basics.units import size_text, time_text
from pytracer.data.columns import UNITS

if TYPE_CHECKING:
    import pandas as pd

_TEXTS: dict[str, Callable[[int], str]] = {"bytes": size_text, "ns": time_text}


# ---------------------------------------------------------------- tables


def of_rows(rows: Iterable[Any], columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """Returns a table with a row per dataclass or mapping. `columns` names them if no row does."""
    pandas = _pandas()
    mappings = [row if isinstance(row, Mapping) else vars(row) for row in rows]
    return pandas.DataFrame(mappings, columns=None if columns is None else list(columns))


def of_columns(
    columns: Mapping[str, Any], index: tuple[str, NDArray[Any]] | None = None
) -> "pd.DataFrame":
    """Returns a table of these columns. `index` is the name and values of its index."""
    pandas = _pandas()
    rows = None if index is None else pandas.Index(index[1], name=index[0])
    return pandas.DataFrame(dict(columns), index=rows)


def joined(tables: "Sequence[pd.DataFrame]") -> "pd.DataFrame":
    """Returns the rows of all tables, which have the same columns."""
    return _pandas().concat(tables, ignore_index=True)


def shown_as(
    table: "pd.DataFrame",
    html: Callable[["pd.DataFrame"], str],
    text: Callable[["pd.DataFrame"], str] | None = None,
) -> "pd.DataFrame":
    """Returns the table, which a notebook shows in this way, and a terminal, too, if there is a text.

    What is shown is read from the table at that moment, so that later changes are seen. Copies and
    slices of it are ordinary tables, which pandas shows.
    """
    plain = _pandas().DataFrame

    class Shown(plain):  # type: ignore[misc, valid-type]  # pandas has no types
        _repr_html_ = html
        __repr__ = plain.__repr__ if text is None else text
        _constructor = plain

        def equals(self, other: object) -> bool:
            return bool(plain(self).equals(other))

        def __reduce_ex__(self, protocol: Any) -> Any:
            return copy.copy, (self.copy(),)

    shown = Shown(table)
    shown.attrs = table.attrs
    return shown


def _pandas() -> Any:
    """Imports pandas, and registers `.pytracer` on its DataFrames."""
    import pandas as pd

    if not hasattr(pd.DataFrame, "pytracer"):
        pd.api.extensions.register_dataframe_accessor("pytracer")(Tables)
    return pd


# ---------------------------------------------------------------- columns


def numbers(values: NDArray[Any], missing: int) -> Any:
    """Returns a column of whole numbers, NA where the value is `missing`."""
    pandas = _pandas()
    absent = values == missing
    if not absent.any():
        return pandas.array(values, dtype="Int64").copy()
    return pandas.arrays.IntegerArray(values.astype(np.int64), absent)


def categorical(codes: NDArray[Any], names: Sequence[str]) -> Any:
    """Returns a column in which row i is `names[codes[i]]`, NA for the code -1."""
    return _pandas().Categorical.from_codes(codes, categories=list(names))


def texts(values: Iterable[str]) -> Any:
    """Returns a column of texts, NA where they are empty."""
    pandas = _pandas()
    return pandas.array([value or pandas.NA for value in values], dtype="string")


def without(column: Any, value: object) -> Any:
    """Returns the column with NA in place of the value."""
    return column.replace(value, _pandas().NA)


# ---------------------------------------------------------------- `.pytracer`


class Tables:
    """The attribute `.pytracer` of a DataFrame."""

    def __init__(self, table: "pd.DataFrame") -> None:
        self._table = table

    def human(self) -> "pd.DataFrame":
        """Returns a copy for reading: bytes become `3.57 MiB`, nanoseconds `591 ms`."""
        over_time = self._table.index.name == "time_ns"  # every column has bytes
        readable = self._table.copy()
        for name in readable.columns:
            if readable[name].dtype.kind in "iu":
                text = size_text if over_time else _TEXTS.get(UNITS.get(str(name), ""))
                if text is not None:
                    readable[name] = _written(readable[name], text)
        if over_time:
            readable.index = _written(readable.index.to_series(), time_text).rename("time")
        return readable


def _written(column: Any, text: Callable[[int], str]) -> Any:
    """Returns the numbers as texts. Missing numbers stay missing."""
    return column.astype(object).map(lambda number: text(int(number)), na_action="ignore")
