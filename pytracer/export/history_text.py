"""A recorder that was always on, on one screen."""

import shlex
from collections.abc import Iterator
from typing import Any

from pytracer.basics.units import size_text, time_text
from pytracer.data.history import Look, Steps, middle, ranks_in_short
from pytracer.export.terminal import BOLD, PLAIN, Terminal

_MOST_EVENTS = 6
_REASONS = {
    "first": "the first steps",
    "departs": "after a step that went higher than all before",
    "grows": "memory grew",
    "due": "nothing had changed",
}


def render(history: Steps, terminal: Terminal = PLAIN) -> str:
    """The screen, without a line break at its end."""
    lines = [terminal.paint(_head(history), BOLD), ""]
    for one in history.devices:
        text = (
            f"usually {size_text(one.usual)} at a step's peak, least {size_text(one.least)}, highest "
            f"{size_text(one.highest)} in step {one.highest_step:,}; {size_text(one.now)} after the "
            "last step"
        )
        if one.reserved:
            text += f"; reserved up to {size_text(one.reserved)}"
        lines += terminal.paragraph(one.device, text)
    lines += [line for part in _events(history) for line in terminal.paragraph(*part)]
    for look in history.looks:
        lines += terminal.paragraph("look", _look(look))
    lines += ["", *_commands(history)]
    return "\n".join(line.rstrip() for line in lines)


def of_ranks(ranks: list[Steps], terminal: Terminal = PLAIN) -> str:
    """The ranks of a job, with which departs and which leaks."""
    rows = ranks_in_short(ranks)
    if not rows:
        return "no rank has ended a step yet"
    head = f"{len(rows)} ranks of {ranks[0].command or 'a program'}"
    lines = [terminal.paint(head, BOLD), ""]
    lines.append(f"{'rank':>5}{'steps':>11}{'usual':>11}{'highest':>11}{'in step':>11}{'now':>11}")
    for row in rows:
        sizes = (size_text(row.usual), size_text(row.highest), f"{row.highest_step:,}")
        numbers = "".join(f"{text:>11}" for text in (f"{row.steps:,}", *sizes, size_text(row.now)))
        lines.append(f"{row.rank:>5}{numbers}  {row.device}")
    lines.append("")
    usual = middle(row.usual for row in rows)
    for row in rows:
        if row.departs:
            text = f"rank {row.rank}: {size_text(row.usual)}, where the middle rank has {size_text(usual)}"
            lines += terminal.paragraph("departs", text)
    for row in rows:
        if row.behind:
            lines += terminal.paragraph("behind", f"rank {row.rank}: {row.steps:,} steps")
    for row in rows:
        if row.grows:
            lines += terminal.paragraph("grows", f"rank {row.rank}: {row.grows}")
    if not any(row.departs or row.behind or row.grows for row in rows):
        lines.append("All ranks are alike, and none grows.")
    lines += ["", f"Look at one:   pytracer summary {shlex.quote(str(ranks[0].folder))}"]
    return "\n".join(line.rstrip() for line in lines)


def _head(history: Steps) -> str:
    steps = f"{history.step_count:,} step{'s' * (history.step_count != 1)}"
    looks = f"{len(history.looks)} look{'s' * (len(history.looks) != 1)}"
    of = f" of {history.command}" if history.command else ""
    return f"{steps}{of} in {time_text(history.duration_ns)}, {looks}"


def _events(history: Steps) -> Iterator[tuple[str, str]]:
    """The last events of each kind: alarms once each, then what departed or grew."""
    for kind in ("alarm", "departs", "grows", "failed", "unread"):
        events = [event for event in history.events if event["kind"] == kind]
        if len(events) > _MOST_EVENTS:
            yield kind, f"{len(events)} times; the last ones:"
        for event in events[-_MOST_EVENTS:]:
            yield kind, f"step {event['step']:,}: {_event(event)}"


def _event(event: dict[str, Any]) -> str:
    if "text" in event:
        return str(event["text"])
    went = f"its peak on {event['device']} was {size_text(event['peak'])}"
    return f"{went}; {size_text(event['now'])} stayed"


def _look(look: Look) -> str:
    last = look.step + look.steps - 1
    steps = f"step {look.step:,}" if look.steps == 1 else f"steps {look.step:,} to {last:,}"
    return f"{steps}, {_REASONS.get(look.reason, look.reason)}: {look.file}"


def _commands(history: Steps) -> Iterator[str]:
    looks = history.looks
    if not looks:
        return
    files = [shlex.quote(str(history.folder / look.file)) for look in looks]
    yield f"Look at one:   pytracer summary {files[-1]}"
    if len(files) > 1:
        yield f"Compare two:   pytracer diff {files[0]} \\"
        yield f"                 {files[-1]}"
