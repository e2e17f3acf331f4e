"""Writes a trace's tables as Parquet files into a folder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.analysis.answers import breakdown, training_steps
from pytracer.analysis.facts import usage
from pytracer.data.recorded import Trace

TABLES: dict[str, Callable[[Trace], Any]] = {
    "allocations": breakdown.allocations_frame,
    "timeline": usage.timeline,
    "steps": training_steps.steps,
    "summary": breakdown.summary,
}


def write(trace: Trace, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Writes `allocations.parquet`, `timeline.parquet`, `steps.parquet` and `summary.parquet`.

    Raises:
        errors.PytracerError: pyarrow is not installed.
        errors.CannotWrite: the folder is not empty, or cannot be written to.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise errors.PytracerError("Parquet needs pyarrow: pip install pyarrow") from None
    folder = Path(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise errors.CannotWrite(f"{folder} is a file, and Parquet needs a folder")
        if folder.exists() and not overwrite and any(folder.iterdir()):
            raise errors.FileIsThere(folder, "is not empty", "writes into it")
        folder.mkdir(parents=True, exist_ok=True)
        for name, view in TABLES.items():
            # A reader never meets half a file under its final name.
            unfinished = folder / f".{name}.{os.getpid()}"
            try:
                parquet.write_table(pa.Table.from_pandas(view(trace)), unfinished)
                unfinished.replace(folder / f"{name}.parquet")
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, errors.CannotWrite):
            raise
        reason = os.strerror(error.errno or 5)
        raise errors.CannotWrite(f"{folder} cannot be written to: {reason}") from None
    return folder
