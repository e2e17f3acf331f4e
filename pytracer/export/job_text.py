"""A job of many ranks on one screen: who needs most, who is different, who is missing."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pytracer.basics.names import short_line
from pytracer.basics.units import size_text, time_text
from pytracer.data.schema import CATEGORY_ORDER
from pytracer.export.terminal import BOLD, DIM, MARGIN, PLAIN, USUAL, Terminal, cut_in_front
from pytracer.ranks.compare import (
    TIMES,
    Comparison,
    Late,
    Outlier,
    Part,
    Shared,
    Spread,
    Stuck,
    ranks_text,
)
from pytracer.ranks.digest import Digest

_MOST_LINES = 6  # of outliers, endings, findings and parts
_DIED = ("out of memory", "failed", "truncated", "damaged")
_SOURCE_LINE = re.compile(r"(?<=: )\[[^\]\s]*\] ")  # of torch, in the texts of its errors
_FINDINGS = {"growth": "leaks"}
_TITLES = {
    "gathered": "  gathered",
    "step": "a step",
    "forward": "its forward",
    "growth": "growth per step",
}


def render(job: Comparison, earlier: Sequence[str] = (), terminal: Terminal = PLAIN) -> str:
    """The screen, without a line break at its end."""
    lines = [
        *_head(job, terminal),
        "",
        *_figures(job, terminal),
        "",
        *_said(job, earlier, terminal),
        *_look_at(job, terminal),
    ]
    return "\n".join(line.rstrip() for line in lines)


def said(job: Comparison, earlier: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Who is missing, who died, who differs and why, findings of all: a title and a text each."""
    one_line_each = Terminal(100_000)
    lines = _said(job, earlier, one_line_each)
    return [(line[:MARGIN].strip(), line[MARGIN:].strip()) for line in lines]


def _said(job: Comparison, earlier: Sequence[str], terminal: Terminal) -> list[str]:
    return [
        *_missing(job, earlier, terminal),
        *_endings(job, terminal),
        *_most(job.stuck, "stuck", _stuck, terminal),
        *_most(job.late, "waits", _late, terminal),
        *_clocks(job, terminal),
        *_most(job.outliers, "rank", lambda one: outlier_text(one, job), terminal),
        *_parts(job, terminal),
        *_sharding(job, terminal),
        *_most(job.findings, "finding", lambda one: _finding(one, len(job.readable)), terminal),
    ]


def head(job: Comparison) -> str:
    """How many ranks, and the highest peak, as a sentence."""
    ranks = f"A job of {job.world_size} rank{'s' * (job.world_size != 1)}"
    if not job.readable:
        return f"{ranks}; none has a trace that can be read."
    worst = job.worst
    step = "" if worst.peak_step is None else f", in step {worst.first_step + worst.peak_step}"
    where = f"on rank {worst.rank} ({worst.device}){step}"
    return f"{ranks}. The highest peak is {size_text(worst.peak)}, {where}."


def on_ranks(row: Spread) -> str:
    """The ranks that have the highest figure."""
    text = _on(row, 40)
    return f"rank {text}" if text[:1].isdigit() and not text.endswith("ranks") else text


def title(name: str) -> str:
    """A figure's name, as the screen has it."""
    return _title(name).strip()


def _head(job: Comparison, terminal: Terminal) -> list[str]:
    ranks = f"job of {job.world_size} rank{'s' * (job.world_size != 1)}"
    if not job.readable:
        return terminal.wrap(f"{ranks}: none has a trace that can be read")
    hosts = len({one.host for one in job.readable if one.host})
    where = f" on {hosts} hosts" if hosts > 1 else ""
    worst = job.worst
    step = "" if worst.peak_step is None else f", in step {worst.first_step + worst.peak_step}"
    text = (
        f"{ranks}{where}   peak {size_text(worst.peak)} on rank {worst.rank} ({worst.device}){step}"
    )
    lines = [text] if len(text) <= terminal.width else terminal.wrap(text)
    return [terminal.paint(line, BOLD) for line in lines]


def _figures(job: Comparison, terminal: Terminal) -> Iterator[str]:
    if not job.spreads:
        return
    wide = 11 if terminal.width >= USUAL else 9
    heads = "".join(f"{head:>{wide}}" for head in ("lowest", "median", "highest"))
    yield terminal.paint(f"{'':<17}{heads}  on rank", DIM)
    for row in job.spreads:
        figures = f"  {_title(row.name):<15}{_sizes(row, wide)}  "
        yield figures + _on(row, terminal.width - len(figures))


def _title(name: str) -> str:
    return _TITLES.get(name, name)


def _text_of(name: str) -> Callable[[int], str]:
    return time_text if name in TIMES else size_text


def _sizes(row: Spread, wide: int) -> str:
    text = _text_of(row.name)
    return "".join(f"{text(value):>{wide}}" for value in (row.lowest, row.median, row.highest))


def _on(row: Spread, room: int) -> str:
    if len(row.ranks) == row.of:
        return "all the same" if row.of > 1 else str(row.ranks[0])
    texts = (ranks_text(row.ranks, most) for most in (3, 2, 1))
    return next((text for text in texts if len(text) <= room), f"{len(row.ranks)} ranks")


def _missing(job: Comparison, earlier: Sequence[str], terminal: Terminal) -> Iterator[str]:
    if job.missing:
        text = (
            f"rank {ranks_text(job.missing)} of {job.world_size}: no file. Nothing here counts them"
        )
        yield from terminal.paragraph("missing", text)
    for one in job.digests:
        if not one.is_readable:
            yield from terminal.paragraph("missing", f"rank {one.rank}: {one.problem}")
    if earlier:
        text = f"{len(earlier)} file(s) of earlier steps or attempts of these ranks are not shown"
        yield from terminal.paragraph("earlier", text)


def _endings(job: Comparison, terminal: Terminal) -> Iterator[str]:
    """The ranks that died, those that died first on top, and those that fell behind."""
    died = [one for one in job.readable if one.status in _DIED]
    behind = [one for one in job.readable if one.rank in job.behind and one not in died]
    # By the clocks of the hosts; the others often die of the first one's death.
    died.sort(key=lambda one: (one.ended_unix_ns - job.clocks[one.host].ns, one.rank))
    if (
        len(died) == len(job.readable) > 1
        and len({one.status for one in died}) == 1
        and not job.behind
    ):
        text = f"all ranks: {_ending(died[0])}"
        yield from terminal.paragraph("ended", text)
        return
    yield from _most(died, "ended", lambda one: f"rank {one.rank}: {_ending(one)}", terminal)
    if behind:
        least = min(job.behind[one.rank] for one in behind)
        ranks = ranks_text([one.rank for one in behind])
        text = f"rank {ranks}: ended after {least} steps; others made {job.steps}"
        yield from terminal.paragraph("ended", text)


def _ending(one: Digest) -> str:
    where = f"in step {one.first_step + len(one.steps)}"
    if one.last_phase in ("forward", "backward", "optimizer"):
        where += f", in {one.last_phase}"
    if one.status == "out of memory":
        held = ", ".join(
            f"{name} {size_text(size)}"
            for name, size in sorted(one.at_peak.items(), key=lambda each: -each[1])[:3]
        )
        return f"out of memory {where}; it held {held}"
    if one.status == "failed":
        return f"{where}: {_SOURCE_LINE.sub('', one.error)}"
    if one.status == "damaged":
        return "the file is damaged, so any of its figures may be wrong"
    return f"the file ends {where}: the process was killed, hung, or still runs"


def _stuck(one: Stuck) -> str:
    return (
        f"{one.operation} {one.sequence} of group {one.group}: rank {ranks_text(one.absent)} never "
        f"began it, rank {ranks_text(one.waiting)} waited"
    )


def _late(one: Late) -> str:
    return (
        f"for rank {one.rank}, the last to begin the last collective of {one.steps} steps of "
        f"{one.of}: {time_text(one.wait_ns)} after all others"
    )


def _clocks(job: Comparison, terminal: Terminal) -> Iterator[str]:
    """Clocks that are not known to agree."""
    unknown = [host for host, offset in job.clocks.items() if offset.uncertainty_ns is None]
    known = [offset for offset in job.clocks.values() if offset.uncertainty_ns]
    if unknown and len(job.clocks) > 1:
        text = (
            f"those of {len(unknown)} of {len(job.clocks)} hosts were not compared: times are as each "
            "host's clock shows them"
        )
        yield from terminal.paragraph("clocks", text)
    if known:
        apart = max(abs(offset.ns) for offset in known)
        doubt = max(offset.uncertainty_ns or 0 for offset in known)
        text = (
            f"up to {time_text(apart)} apart, known within {time_text(doubt)}, and corrected here"
        )
        yield from terminal.paragraph("clocks", text)


def outlier_text(one: Outlier, job: Comparison) -> str:
    """`3: activations 2.10 GiB, others 1.00 GiB, from step 4 on; most in layers.7 (train.py:12)`."""
    text = _text_of(one.name)
    first = next(each.first_step for each in job.digests if each.rank == one.rank)
    said = f"{one.rank}: {_title(one.name)} {text(one.value)}, others {text(one.typical)}"
    if one.since_step:
        said += f", from step {first + one.since_step} on"
    if one.holder is not None and holder_text(*one.holder[1:4]):
        said += f"; {size_text(abs(one.holder.bytes))} {'more' if one.holder.bytes > 0 else 'less'}"
        said += f" in {holder_text(*one.holder[1:4])}"
    return said


def holder_text(module: str, op: str, line: str) -> str:
    """The module and the line if they are known; else the op."""
    place = " at ".join(part for part in (module, short_line(line) if line else "") if part)
    return place or op


def _parts(job: Comparison, terminal: Terminal) -> Iterator[str]:
    """Ranks that hold different modules: stages of a pipeline, experts."""
    if len(job.parts) < 2:
        return
    yield from _most(job.parts, "part", _part, terminal)


def _part(part: Part) -> str:
    held = "their" if len(part.ranks) > 1 else "its"
    return f"rank {ranks_text(part.ranks)}: {held} own modules, peak {size_text(part.median_peak)}"


def _sharding(job: Comparison, terminal: Terminal) -> Iterator[str]:
    wrappers = sorted({name for one in job.readable for name in one.wrappers})
    rows = [
        f"{size_text(row.global_bytes)} of parameters {row.how}: "
        f"{_range(row.lowest, row.highest)} on each rank ({row.part:.1%})"
        for row in job.shares
    ]
    if wrappers or rows:
        text = "; ".join([" + ".join(wrappers)] * bool(wrappers) + rows)
        yield from terminal.paragraph("sharding", text)
    whole = _repeated(job)
    if whole:
        yield from terminal.paragraph("", whole)


def _repeated(job: Comparison) -> str:
    """What every rank keeps whole, if none of it is sharded."""
    if len(job.readable) < 2 or len(job.parts) > 1 or job.shares or _shards_otherwise(job):
        return ""
    kept = {row.name: row for row in job.spreads if row.name in _SHARDABLE}
    if "weights" not in kept or any(row.lowest != row.highest for row in kept.values()):
        return ""
    total = sum(row.highest for row in kept.values())
    less = total - total // job.world_size
    return (
        f"each rank keeps all {', '.join(kept).replace('_', ' ')}; cut over {job.world_size} ranks "
        f"(FSDP), each would need {size_text(less)} less between steps"
    )


_SHARDABLE = [
    name for name in CATEGORY_ORDER if name in ("weights", "gradients", "optimizer_state")
]


def _shards_otherwise(job: Comparison) -> bool:
    known = ("FSDP", "ZeRO")
    return any(name.startswith(known) for one in job.readable for name in one.wrappers)


def _range(lowest: int, highest: int) -> str:
    if lowest == highest:
        return size_text(highest)
    return f"{size_text(lowest)} to {size_text(highest)}"


def _finding(one: Shared, ranks: int) -> str:
    who = "all ranks" if len(one.ranks) == ranks > 1 else f"rank {ranks_text(one.ranks)}"
    per_step = " a step" if one.kind == "growth" else ""
    where = holder_text(one.module, "", one.line)
    said = f"{who}: {_FINDINGS.get(one.kind, one.kind)} {size_text(one.bytes)}{per_step}"
    return f"{said}{where and f' in {where}'}; {one.change}"


def _look_at(job: Comparison, terminal: Terminal) -> Iterator[str]:
    if not job.readable:
        return
    file = (
        cut_in_front(Path(job.worst.file).as_posix(), terminal.width - 30) if job.worst.file else ""
    )
    if file:
        yield ""
        yield f"{'next':<10}pytracer summary {file}"


def _most(rows: Sequence, title: str, text: Callable, terminal: Terminal) -> Iterator[str]:  # type: ignore[type-arg]
    """A paragraph for each of the first rows, and the number of the others."""
    for row in rows[:_MOST_LINES]:
        yield from terminal.paragraph(title, text(row))
    if len(rows) > _MOST_LINES:
        yield f"{title:<10}and {len(rows) - _MOST_LINES} more: t.ranks() and --json list all"
