"""A trace in Perfetto's own format, for a first view without a click.

Perfetto shows the groups of a JSON file closed and in an order of its own. Here there is one group at
the top, which it opens by itself, with memory by category, steps, phases and threads. Allocations are
in a group inside. export/chrome.py decides the contents; csrc/core/perfetto_trace.h writes them.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from pytracer import errors
from pytracer.basics.files import refuse_to_overwrite, write_whole
from pytracer.data._native import core
from pytracer.data.recorded import Trace
from pytracer.export.chrome import Document, Exported
from pytracer.export.rows import Options

SUFFIX = ".pftrace"
_PIECE = 4 << 20


def write(
    trace: Trace, path: str | Path, options: Options | None = None, *, overwrite: bool = False
) -> Exported:
    """Writes a `.pftrace`. A failed export leaves no file.

    Raises:
        errors.UsageError: the suffix or a limit is wrong.
        errors.CannotWrite: the file exists already, or cannot be written.
    """
    return write_all([trace], path, options, overwrite=overwrite)


def write_all(
    traces: Iterable[Trace],
    path: str | Path,
    options: Options | None = None,
    *,
    overwrite: bool = False,
) -> Exported:
    """Like `write`, for the ranks of a job. Files of this format may follow each other."""
    path = Path(path)
    if path.suffix != SUFFIX:
        raise errors.UsageError(f"{path}: a Perfetto trace is a {SUFFIX} file")
    refuse_to_overwrite(path, overwrite=overwrite)  # before the work
    events = 0
    left_out: Counter[str] = Counter()
    folded: Counter[str] = Counter()

    def fill(file: BinaryIO) -> None:
        nonlocal events
        for trace in traces:
            document = Document(trace, options or Options(), native=True)
            tracks, tables = document.tracks()
            native = core.PerfettoTrace(document.texts.encoded(), tracks, tables, document.rank + 1)
            while piece := native.next(_PIECE):
                file.write(piece)
            events += native.events()
            left_out.update(document.left_out)
            folded.update(document.folded)

    write_whole(path, fill, overwrite=overwrite)
    return Exported(
        path=path,
        events=events,
        json_bytes=0,
        file_bytes=path.stat().st_size,
        left_out=dict(left_out),
        folded=dict(folded),
        warnings=(),
    )
