"""`load()`: a file is a trace, and a folder of files is a job."""

from pathlib import Path
from typing import TYPE_CHECKING

from pytracer.reading import views
from pytracer.reading.views import LoadedTrace

if TYPE_CHECKING:
    from pytracer.reading.job import Job


def load(path: str | Path, *, engine: str | None = None) -> LoadedTrace:
    """Reads a trace from a file, or all ranks of a job from a folder.

    A file is read as far as it was written before the program ended. Memory snapshots of torch
    (`torch.cuda.memory._dump_snapshot`) are read too, and nothing in them is executed. A
    RuntimeWarning says what an incomplete file lacks.

    A folder becomes a `Job`: its table compares the ranks, and its other views are those of the rank
    with the highest peak.

    Example:
        t = load("run.pytrace")
        print(t)
        job = load("run/")
        print(job)
        print(job.rank(3))

    Args:
        path: a `.pytrace` file, a memory snapshot, a folder of them, or a pattern such as
            "run/train.rank*.pytrace".
        engine: for a folder: "dask" or the address of Dask's scheduler, to read files in parallel.

    Raises:
        errors.UnreadableTrace: the file is missing, no trace, damaged beyond reading, or of a newer
            format; or the folder has no trace.
        errors.UsageError: the folder has the files of several runs.
    """
    return _job(path, engine) if is_job(path) else views.load(path)


def read(path: str | Path, *, engine: str | None = None) -> LoadedTrace:
    """Like `load`, without the warning. For callers that report an incomplete file themselves."""
    return _job(path, engine) if is_job(path) else views.read(path)


def is_job(path: str | Path) -> bool:
    """Whether the path is a folder, or a pattern such as run/train.rank*.pytrace."""
    return Path(path).is_dir() or "*" in str(path)


def _job(path: str | Path, engine: str | None) -> "Job":
    """Imports what compares ranks only if there are some."""
    from pytracer.reading import job

    return job.read_job(path, engine)
