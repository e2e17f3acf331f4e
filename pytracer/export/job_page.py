"""A job of many ranks, as a part of the report's document."""

from collections.abc import Mapping
from typing import Any

from pytracer.export import html, job_text
from pytracer.ranks.compare import TIMES, Comparison, Spread
from pytracer.ranks.digest import Digest


def document(job: Comparison, sets: Mapping[int, int]) -> dict[str, Any]:
    """What all ranks say together; `sets` are the places of those that are on the page."""
    differ = {one.rank for one in job.outliers}
    return {
        "head": _safe(job_text.head(job)),
        "world_size": job.world_size,
        "ranks": [
            _rank(one, differs=one.rank in differ, place=sets.get(one.rank)) for one in job.digests
        ],
        "spreads": [_spread(row) for row in job.spreads],
        "said": [(title, _safe(text)) for title, text in job_text.said(job)],
    }


def _rank(one: Digest, *, differs: bool, place: int | None) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "host": _safe(one.host),
        "device": _safe(one.device),
        "status": one.status,
        "peak": one.peak,
        "step": None if one.peak_step is None else one.first_step + one.peak_step,
        "by_category": dict(one.at_peak),
        "differs": differs,
        "set": place,
        "file": _safe(one.file.rpartition("/")[2]),
    }


def _spread(row: Spread) -> dict[str, Any]:
    return {
        "name": job_text.title(row.name),
        "lowest": row.lowest,
        "median": row.median,
        "highest": row.highest,
        "ranks": job_text.on_ranks(row),
        "is_time": row.name in TIMES,
    }


def _safe(text: str) -> str:
    return html.without_folders(html.printable(text))
