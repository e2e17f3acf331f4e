"""The table of formats that a trace can be exported to. A new format is a new line in it.

The command line, `t.export_*` and a test of the docs read the table. Each writer imports its module
when it is called, so reading the table costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytracer.basics.files import refuse_to_overwrite

if TYPE_CHECKING:
    from pytracer.data.recorded import Trace
    from pytracer.export.chrome import Exported

_PERFETTO = "Open it at https://ui.perfetto.dev (the file stays on your machine)."


@dataclass(frozen=True)
class Exporter:
    """One format, and how it is written."""

    name: str  # of `pytracer export --format`
    suffixes: tuple[str, ...]  # that stand for it; the first is the default, "/" is a folder
    write: Callable[..., Path | Exported]  # (trace, path, *, overwrite, and what `limits` names)
    opened_with: str  # a sentence for the user; {} is the path
    limits: tuple[str, ...] = ()  # options of the command that `write` takes as arguments


def written_by(module: str) -> Callable[..., Path]:
    """The function `write` of a module in this package, which is imported when it is called."""

    def write(trace: Trace, path: str | Path, *, overwrite: bool = False) -> Path:
        written: Path = import_module(f"pytracer.export.{module}").write(
            trace, path, overwrite=overwrite
        )
        return written

    return write


def chrome(trace: Trace, path: str | Path, *, overwrite: bool = False, **limits: Any) -> Exported:
    """Chrome trace JSON. `limits` are the fields of `rows.Options`."""
    from pytracer.export import chrome
    from pytracer.export.rows import Options

    return chrome.write(trace, path, Options(**limits), overwrite=overwrite)


def perfetto(trace: Trace, path: str | Path, *, overwrite: bool = False, **limits: Any) -> Exported:
    """Perfetto's own format. `limits` are the fields of `rows.Options`."""
    from pytracer.export import perfetto
    from pytracer.export.rows import Options

    return perfetto.write(trace, path, Options(**limits), overwrite=overwrite)


def html(trace: Trace, path: str | Path, *, overwrite: bool = False) -> Path:
    """The page of one trace."""
    from pytracer.export import report

    return report.write([report.Named(Path(path).stem, trace)], path, overwrite=overwrite)


def pytrace(trace: Trace, path: str | Path, *, overwrite: bool = False) -> Path:
    """The trace itself."""
    refuse_to_overwrite(Path(path), overwrite=overwrite)
    return trace.save(path, overwrite=overwrite)


_TABLE = (
    Exporter("chrome", (".json.gz", ".json"), chrome, _PERFETTO, ("max_events", "full")),
    Exporter("perfetto", (".pftrace",), perfetto, _PERFETTO, ("full",)),
    Exporter(
        "snapshot",
        (".pickle", ".pkl"),
        written_by("snapshot"),
        "Open it at https://pytorch.org/memory_viz (the file stays on your machine).",
    ),
    Exporter("html", (".html", ".htm"), html, "Open it in any browser; it loads nothing."),
    Exporter(
        "parquet",
        (".parquet", "/"),
        written_by("parquet"),
        "Read it with pandas.read_parquet('{}/allocations.parquet').",
    ),
    Exporter("pytrace", (".pytrace",), pytrace, "Look at it with pytracer summary."),
)

EXPORTERS: dict[str, Exporter] = {exporter.name: exporter for exporter in _TABLE}
