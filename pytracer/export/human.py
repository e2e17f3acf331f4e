"""A view's table with sizes and times as people read them: `t.by("module").pytracer.human()`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytracer.export.table import size_text, time_text

if TYPE_CHECKING:
    import pandas as pd

# Of bytes, beside those whose names say so; only where they are whole numbers.
_BYTES = frozenset(
    ("at_peak", "own_peak", "at_end", "before", "after", "change")  # a summary's, a diff's
) | {"used", "free", "largest_gap", "unusable", "free_pages"}


class Tables:
    """What `.pytracer` is of a DataFrame."""

    def __init__(self, table: "pd.DataFrame") -> None:
        self._table = table

    def human(self) -> "pd.DataFrame":
        """A copy in which bytes are `3.57 MiB` and nanoseconds `591 ms`: to be read, not computed with."""
        over_time = self._table.index.name == "time_ns"  # all its numbers are levels
        shown = self._table.copy()
        for name in shown.columns:
            if shown[name].dtype.kind in "iu":
                text = size_text if over_time else _text_for(str(name))
                if text is not None:
                    shown[name] = _written(shown[name], text)
        if over_time:
            shown.index = _written(shown.index.to_series(), time_text).rename("time")
        return shown


def _text_for(column: str) -> Callable[[int], str] | None:
    if column in _BYTES or column.endswith("bytes"):
        return size_text
    return time_text if column.endswith("_ns") else None


def _written(numbers: Any, text: Callable[[int], str]) -> Any:
    """Missing ones stay missing."""
    return numbers.astype(object).map(lambda number: text(int(number)), na_action="ignore")


def register() -> None:
    """Gives DataFrames their `.pytracer`, as pandas has it for such a thing; once."""
    import pandas as pd

    if not hasattr(pd.DataFrame, "pytracer"):
        pd.api.extensions.register_dataframe_accessor("pytracer")(Tables)
