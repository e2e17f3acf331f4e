"""A recording in progress as text: one screen, or one line a step.

This runs beside the training, perhaps on the same core. So it imports neither pandas nor torch, and
its memory does not grow with the recording. Totals, peaks and steps are counted as the file grows.
What the bytes are for is asked of the last whole step, by the rules of `pytracer summary`.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import east_asian_width

import numpy as np

from pytracer import errors
from pytracer.analysis.answers.step_memory import StepMemory, step_memory
from pytracer.analysis.facts.grouping import Holder
from pytracer.analysis.facts.window import Window
from pytracer.basics.files import most_memory
from pytracer.basics.names import is_bare, layers_alike, short_line
from pytracer.basics.units import size_text, time_text
from pytracer.data._native import core
from pytracer.data.meta import Meta, read as read_meta
from pytracer.data.model_names import module_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import ALWAYS_SHOWN, CATEGORY_ORDER, DEVICE_TYPES
from pytracer.export.table import category_color
from pytracer.export.terminal import BOLD, DIM, Paint, cut_in_front

_PIECE = 1 << 15  # bytes of the file, between two looks at the keyboard
_REST = 100  # the rules run at most one part in that many of the time
_RECENT = 100  # steps over which growth is measured
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"
_MARGIN = 9
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Step(NamedTuple):
    """A finished step, on the main device."""

    number: int
    peak: int
    end: int
    growth: int  # since the end of the step before
    took_ns: int | None  # None for the first known step


class Shown(NamedTuple):
    """What is known of the bytes of one step."""

    step: int | None  # None: no step has ended, and this is what is alive now
    memory: StepMemory


class Following:
    """Follows a trace while it is written."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Reads nothing until `advance`.

        Raises:
            errors.UnreadableTrace: the file does not exist, or is not a trace.
        """
        self.path = path
        self._follower = self._open()
        self._window = Window()
        self._meta_text = ""
        self._meta = read_meta({})
        self.state: dict[str, Any] = self._follower.state()
        self._shown: Shown | None = None
        self._shown_of: object = None  # the state of the file that it was made of
        self._rests_until = 0.0

    def _open(self) -> Any:
        try:
            return core.Follower(os.fsencode(self.path), most_memory())
        except core.FileError as error:
            raise errors.UnreadableTrace(str(error)) from None

    def advance(self) -> bool:
        """Reads a piece. Returns whether more can be read at once.

        Raises:
            errors.UnreadableTrace: the file is damaged, or cannot be read any more.
        """
        try:
            more: bool = self._follower.advance(_PIECE)
        except core.FileError as error:
            raise errors.UnreadableTrace(str(error)) from None
        self._window.add(self._follower.take_rows())
        if self._window.is_large:
            ends = [ticks for _, ticks, _, _ in self._follower.steps(0)]
            self._window.condense(self._follower.tables(), np.array(ends, np.uint64))
        return more

    def look(self) -> None:
        """Updates `state`.

        Raises:
            errors.UnreadableTrace: the file is damaged, or another recording replaced it.
        """
        self.state = self._follower.state()
        if self.state["state"] == "damaged":
            raise errors.UnreadableTrace(
                f"{self.path} is damaged at byte {self.state['bytes_read']:,}; pytracer summary "
                f"{self.path} shows the rest"
            )
        if self.state["state"] == "replaced":
            raise errors.UnreadableTrace(
                f"{self.path} was replaced by another recording; watch it again"
            )

    @property
    def finished(self) -> bool:
        """Whether the recording is over and complete."""
        return bool(self.state["state"] == "complete")

    @property
    def abandoned(self) -> bool:
        """Whether the recording process ended before it wrote the rest."""
        pid, is_here = self.meta.pid, self.meta.host == socket.gethostname()
        if self.finished or pid is None or pid < 1 or not is_here:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        return False

    @property
    def meta(self) -> Meta:
        """The facts about program and machine that the recording wrote at its start."""
        text = self._follower.meta()
        if text != self._meta_text:
            self._meta_text = text
            document = json.loads(text) if text else {}
            self._meta = read_meta(document if isinstance(document, dict) else {})
        return self._meta

    @property
    def main(self) -> Mapping[str, Any] | None:
        """The main device; None until something was allocated."""
        devices = self.state["devices"]
        return devices[self.state["main"]] if devices else None

    def steps(self, first: int) -> list[Step]:
        """The finished steps from this number on. The oldest may be gone."""
        rows = self._follower.steps(max(first - 1, 0))
        steps: list[Step] = []
        before: tuple[int, int] | None = None
        for number, ticks, peak, end in rows:
            took = None if before is None else self._ns(ticks - before[0])
            growth = 0 if before is None else end - before[1]
            if number >= first:
                steps.append(Step(number, peak, end, growth, took))
            before = (ticks, end)
        return steps

    def _ns(self, ticks: int) -> int:
        """The nanoseconds of a span of the fast clock, from the first and last reading of both clocks."""
        fast, slow = self.state["clock_ticks"], self.state["clock_unix_ns"]
        if len(fast) < 2 or fast[-1] <= fast[0] or slow[-1] <= slow[0]:
            return ticks
        return int(ticks * (slow[-1] - slow[0]) / (fast[-1] - fast[0]))

    @property
    def elapsed_ns(self) -> int:
        """The time from the start to the last written data."""
        slow = self.state["clock_unix_ns"]
        return int(slow[-1] - slow[0]) if len(slow) > 1 else 0

    def shown(self) -> Shown | None:
        """What the bytes of the last whole step are for; None until something was allocated.

        While the recording goes on, a picture may be of an earlier step: the rules rest for a time
        that is a multiple of what they took.
        """
        file = (self.state["step"], self.finished) if self.state["step"] else self.state["events"]
        begun = time.monotonic()
        rests = begun < self._rests_until and not self.finished
        if self.main is not None and file != self._shown_of and not rests:
            self._shown = self._by_the_rules(self.main) or self._shown
            self._shown_of = file
            self._rests_until = time.monotonic() + _REST * (time.monotonic() - begun)
        return self._shown

    def _by_the_rules(self, main: Mapping[str, Any]) -> Shown | None:
        """What the last whole step's bytes are for; None if too little of the step is kept."""
        trace: Trace = self._window.trace(self._follower.tables())
        device, last = device_name(main), self.state["last_ticks"]
        rows = self._follower.steps(max(self.state["step"] - 2, 0))
        if not rows:
            return Shown(None, step_memory(trace, device, last, last))
        number, end = rows[-1][:2]
        begin = rows[0][1] if len(rows) > 1 else 0
        if begin < self._window.complete_from:
            return None
        return Shown(number, step_memory(trace, device, begin, end))

    def modules(self) -> list[tuple[str, int]]:
        """The modules that held most at the last step's peak. Equal layers count as one."""
        shown = self.shown()
        return _sums(shown.memory.modules, _layer) if shown else []

    def lines(self) -> list[tuple[str, int]]:
        """The lines whose allocations held most at the last step's peak."""
        shown = self.shown()
        return _sums(shown.memory.lines, str) if shown else []


def _layer(path: str) -> str:
    """The module, as it is shown among layers that are alike."""
    name = module_text(path)
    return name if is_bare(name) else layers_alike(name)


def _sums(holders: Sequence[Holder], name_of: Callable[[str], str]) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for holder in holders:
        name = name_of(holder.name)
        sums[name] = sums.get(name, 0) + holder.bytes
    return sorted(sums.items(), key=lambda row: (-row[1], row[0]))


# ---------------------------------------------------------------------- one line a step


def step_line(step: Step) -> str:
    """The step on one line, for a terminal without a cursor."""
    took = "" if step.took_ns is None else f"   {time_text(step.took_ns)}"
    grew = f"{'+' if step.growth >= 0 else ''}{size_text(step.growth)}"
    return f"step {step.number}   peak {size_text(step.peak)}   end {size_text(step.end)}  {grew}{took}"


# ---------------------------------------------------------------------- one screen


def screen(
    live: Following,
    size: tuple[int, int],
    *,
    paint: Paint,
    fine: bool = True,
    users: Sequence[str] = (),
    program: str = "",
) -> list[str]:
    """As many lines as fit, none longer than the terminal is wide.

    Args:
        live: the recording.
        size: columns and lines of the terminal.
        paint: adds colours, or does not.
        fine: whether the terminal can show block characters.
        users: the other users of the device, a line each.
        program: the last line that the program printed.
    """
    width, height = size
    body = [*_head(live, paint, width)]
    if live.main is not None:
        body += ["", *_categories(live.shown(), paint, width, fine=fine), ""]
        body += _history(live, width, fine=fine)
        body += _holders(live, width)
    body += _listed("devices", list(users), width)
    body += _others(live, width)
    foot = [cut(f"program  {_CONTROL.sub(' ', program)}", width)] if program else []
    foot.append(paint(cut("q leaves; the training goes on", width), DIM))
    room = max(height - len(foot), 0)
    return [*body[:room], *[""] * (room - len(body)), *foot][:height]


def cut(text: str, width: int) -> str:
    """The part of the text that fits on a line of the terminal."""
    text = _CONTROL.sub(" ", text)
    if not text.isascii():  # a wide character takes two columns
        text = "".join("?" if east_asian_width(each) in "WF" else each for each in text)
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[: min(width, 3)]


def _head(live: Following, paint: Paint, width: int) -> Iterator[str]:
    doing = "recording"
    if live.finished:
        doing = "finished"
    elif live.abandoned:
        doing = "its process is gone"
    parts = [live.path.name, doing, f"step {live.state['step']:,}"]
    if live.elapsed_ns:
        parts.append(time_text(live.elapsed_ns))
    yield paint(cut("   ".join(parts), width), BOLD)
    device = live.main
    if device is None:
        yield cut("nothing was allocated yet", width)
        return
    peak = device["peak"]
    name = device_name(device)
    text = f"{name}   now {size_text(device['now'])}   peak {size_text(peak['bytes'])}"
    text += f" in step {peak['step']:,}"
    if device["type"] and device["reserved"] > 0:
        text += f"   reserved {size_text(device['reserved'])}"
    yield cut(text, width)


def device_name(device: Mapping[str, Any]) -> str:
    """`cpu` or `cuda:0`."""
    kind = device["type"]
    name = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"device{kind}"
    return name if name == "cpu" else f"{name}:{device['index']}"


def _categories(shown: Shown | None, paint: Paint, width: int, *, fine: bool) -> Iterator[str]:
    if shown is None or shown.step is None:
        yield cut("  categories follow when a step has ended", width)
        return
    end, peak = shown.memory.end.by_category, shown.memory.peak.by_category
    yield cut(f"  {f'of step {shown.step:,}':<16}{'at its end':>10}{'at its peak':>13}", width)
    largest, room = max(*peak.values(), 1), max(width - 51, 0)
    for name in CATEGORY_ORDER:
        if not (end[name] or peak[name] or name in ALWAYS_SHOWN):
            continue
        share = peak[name] / max(shown.memory.peak.bytes, 1)
        row = f"  {name:<16}{size_text(end[name]):>10}{size_text(peak[name]):>13}{share:>8.1%}"
        bar = ("█" if fine else "#") * round(room * max(peak[name], 0) / largest)
        yield cut(row, width) + (paint(f"  {bar}", category_color(name)) if bar else "")


def _history(live: Following, width: int, *, fine: bool) -> Iterator[str]:
    steps = live.steps(max(live.state["step"] - max(width - _MARGIN, _RECENT), 0))
    if not steps:
        return
    shown = [step.peak for step in steps[-max(width - _MARGIN, 1) :]]
    low, high, marks = min(shown), max(shown), _BARS if fine else _PLAIN_BARS
    levels = [(peak - low) * (len(marks) - 1) // max(high - low, 1) for peak in shown]
    yield cut(f"{'peaks':<{_MARGIN}}{''.join(marks[level] for level in levels)}", width)
    between = f"{size_text(low)} to {size_text(high)}" if low != high else f"{size_text(low)} each"
    yield cut(f"{'':<{_MARGIN}}{between}, the last {len(shown)} steps", width)
    recent = steps[-_RECENT:]
    if len(recent) > 1:
        grew = (recent[-1].end - recent[0].end) / (len(recent) - 1)
        took = sorted(step.took_ns for step in recent if step.took_ns is not None)
        text = f"{'+' if grew >= 0 else ''}{size_text(round(grew))} a step over {len(recent)} steps"
        text += f"   a step {time_text(took[len(took) // 2])}"
        yield cut(f"{'growth':<{_MARGIN}}{text}", width)


def _holders(live: Following, width: int) -> Iterator[str]:
    yield from _listed("modules", [f"{n} {size_text(b)}" for n, b in live.modules()[:3]], width)
    lines = [f"{short_line(n)} {size_text(b)}" for n, b in live.lines()[:3]]
    yield from _listed("lines", lines, width)


def _listed(title: str, items: list[str], width: int) -> Iterator[str]:
    """A line for each item. A long name keeps its end, which is the distinctive part."""
    for item in items:
        room = max(width - _MARGIN, 0)
        yield cut(f"{title:<{_MARGIN}}{cut_in_front(_CONTROL.sub(' ', item), room)}", width)
        title = ""


def _others(live: Following, width: int) -> Iterator[str]:
    main = live.main
    also = [
        f"{device_name(device)} {size_text(device['now'])}, peak {size_text(device['peak']['bytes'])}"
        for device in live.state["devices"]
        if device is not main
    ]
    yield from _listed("also", also, width)
    if live.state["failed_bytes"]:
        failed = size_text(live.state["failed_bytes"])
        yield cut(f"{'failed':<{_MARGIN}}an allocation of {failed} did", width)
    lost = [f"{count:,} {name}" for name, count in live.state["losses"] if count]
    yield from _listed("lost", lost, width)


def gpu_users(gpus: Mapping[str, Mapping[str, Any]], own: int | None) -> list[str]:
    """A line for each GPU: its memory in use, and the memory of other processes."""
    lines = []
    for number, gpu in enumerate(gpus.values()):
        if not gpu:
            continue
        others = [p for p in gpu.get("processes") or () if p["pid"] != own]
        named = ", ".join(
            f"{p.get('name') or 'process'} {p['pid']} "
            + ("unknown" if p["bytes"] is None else size_text(p["bytes"]))
            for p in others
        )
        used = f"GPU {number}: {size_text(gpu['used'])} of {size_text(gpu['total'])} in use"
        lines.append(f"{used}; others: {named or 'none'}")
    return lines
