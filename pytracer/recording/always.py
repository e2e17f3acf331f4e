"""A recorder that is always on: totals of every step, and a look at some.

Between two looks only the allocators' events are counted (csrc/core/device_totals.h). A look is an
ordinary trace of one step or a few. Where memory grows, a process of its own reads the look by the same
rules as every trace: no thread of the program waits for that.

In the folder of a recorder (pytracer/data/step_totals.py reads and writes it):

    steps.totals             every step
    step-000012.pytrace      a look that begins with step 12
    events.jsonl             looks and their reasons, departures, growth, failed requests, alarms
"""

import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pytracer import errors
from pytracer.basics import environment
from pytracer.basics.units import parse_size, size_text
from pytracer.capture.allowance import Allowance
from pytracer.capture.session import Held, all_devices
from pytracer.data import step_totals
from pytracer.data._native import C
from pytracer.data.schema import device_name
from pytracer.data.step_totals import StepFile, StepRow
from pytracer.reading import look as reading_look
from pytracer.recording import beside
from pytracer.recording.api import is_out_of_memory, trace
from pytracer.recording.looks import Why, name_of

SHARE = 0.005  # of the training thread's time, for looks
DEFAULT_SIZE = 64_000_000

_MOST_EVENTS = 4_000_000  # of a look
_NO_LIMIT = 2**63 - 1
_NEAR = 0.95  # a peak above this share of the device's memory is an alarm
_LONGEST = 300  # of an exception's text
_LONGEST_WAIT = 3600.0  # seconds until a look that is wanted is asked for again
_LAST = 3  # looks that are kept because they are the last ones
_PATIENCE = 10.0  # seconds to wait for the reader as the program ends
_log = logging.getLogger("pytracer")


class always:  # noqa: N801 - reads as a word: `with always():`
    """Counts every step of a program for weeks, and looks at some, for half a per cent of its time.

    Example:
        with pytracer.always("run.always", alarm=page_the_team):
            train()

        print(pytracer.History("run.always"))

    Args:
        path: the folder to make. It gets the rank's number if the job has ranks.
        *targets: models and optimizers. Without them, pytracer finds them as they are used.
        size: the most bytes in the folder.
        share: of the time of the thread that trains, for looks.
        alarm: called with a sentence when memory grows and the reason is proved, when a peak comes near the
            card's memory, and when a request fails. Each is also a warning of the logger "pytracer".
        devices: "cpu", "cuda" or both. By default both, if there is CUDA.
        each: called with the rows of a step, one for each device, accelerators last.
        every: after how many steps `each` is called.
    """

    def __init__(
        self,
        path: str | Path = "pytracer.always",
        *targets: Any,
        size: int | str = DEFAULT_SIZE,
        share: float = SHARE,
        alarm: Callable[[str], object] | None = None,
        devices: tuple[str, ...] | str = (),
        each: Callable[[list[StepRow]], object] | None = None,
        every: int = 1,
    ) -> None:
        """Counts nothing until `begin`."""
        self._path = Path(path)
        self._targets, self._size, self._alarm = targets, parse_size(size), alarm
        self._devices = (devices,) if isinstance(devices, str) else devices
        self._each, self._every = each, max(every, 1)
        self._held = Held()
        self._allowance = Allowance(share=share)
        self._file: StepFile | None = None
        self._rows: Any = None  # csrc/core/step_rows.h
        self._look: Any = None
        self._look_from, self._look_reason = 0, Why.NOTHING
        self._reader = _Reader()
        self._kept: dict[int, Any] = {}  # looks that are on the disk: reason by first step
        self._grows_on = ""  # the device that grew last
        self._highest = (0, -1)  # peak in a look, and the look's first step
        self._told_once: set[str] = set()
        self._user_steps = self._counts = False
        self._owner = os.getpid()  # a forked child counts nothing
        self.folder: Path | None = None  # once it is made
        # With `each`: each device's bytes by category, at the peak of the last look that was read.
        self.categories: dict[str, dict[str, int]] = {}
        self.failed = False  # whether an allocation that failed ended the program
        self.last: Any = None  # the look that saw the end, if one did

    @property
    def step(self) -> int:
        """The number of steps that are over."""
        return 0 if self._rows is None else int(self._rows.steps)

    def begin(self) -> "always":
        """Begins to count.

        Raises:
            errors.CannotWrite: the folder is there already, or cannot be made.
            errors.CaptureError: these allocators cannot be counted, or are counted already.
        """
        self._devices = self._devices or all_devices()
        self._make_folder()
        problem = C.count_totals(cpu="cpu" in self._devices, device="cuda" in self._devices)
        if problem:
            self._give_up()
            self._remove_folder()
            raise errors.CaptureError(problem)
        self._counts = True
        self._begin_look()
        self._held.count_steps(self._told, self._rows)
        return self

    def end(self, error: BaseException | None = None) -> None:
        """Ends it. `error` is the exception that ended the program, if any."""
        if self._file is None or self._owner != os.getpid():
            return
        self._held.end()
        self.failed = error is not None and is_out_of_memory(error)
        if self.failed:
            self._note("failed", text=str(error).partition("\n")[0][:_LONGEST])
        if self._look is not None:
            self.last = self._look
            self._end_look(error)
        self._counts = False
        C.count_totals(cpu=False, device=False)
        self._hear(self._reader.finish())
        self._note("ended")
        self._close_file()
        if self.step == 0 and not self._kept:
            self._remove_folder()

    def mark_step(self) -> None:
        """Ends a step, in a program whose optimizer does not."""
        if not self._user_steps:
            self._user_steps = True
            self._held.end()
        if self._file is not None and self._rows.end_step():
            self._told()

    def __enter__(self) -> "always":
        """Begins to count."""
        return self.begin()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends it. An exception of the block goes on unchanged."""
        self.end(error)

    # ---------------------------------------------------------------- steps

    def _told(self) -> None:
        """A step is over of which csrc/core/step_rows.h tells.

        Whatever goes wrong here ends the recorder, and not the program.
        """
        if self._file is None:
            return
        try:
            if not self._rows.write_last():
                self._make_room(self._file)
                self._rows.write_last()
            self._take_step()
            if self._look is not None:
                if self.step - self._look_from >= self._look_reason.steps:
                    self._end_look()
            elif self._rows.looks.wanted != Why.NOTHING:
                self._look_if_allowed()
            self._hear(self._reader.done())
            self._rows.is_awaited = self._reader.is_busy
        except Exception as problem:  # the program's step must not fail
            _log.warning("always() stops, and the program goes on: %s", problem)
            self._give_up()

    def _take_step(self) -> None:
        """Notes what was special about the step, and sends it on."""
        rows = []
        for found, *counted in self._rows.last:
            row = StepRow(*counted)
            rows.append(row)
            if self._look is not None:
                self._highest = max(self._highest, (row.peak, self._look_from))
            if found != Why.NOTHING:
                name = device_name(*row.device)
                self._note(name_of(found), row.step, peak=row.peak, now=row.now, device=name)
                self._grows_on = name if found == Why.GROWS else self._grows_on
            if row.failed:
                text = f"step {row.step}: {row.failed} requests for memory failed"
                self._warn(text, f"failed {row.device}", row.step)  # the rows count the others
            self._compare_with_the_card(row)
        if self._each is not None and self.step % self._every == 0:
            try:
                self._each(rows)
            except Exception as problem:  # such as a logger's connection
                _log.warning("no figures are sent any more: %s", problem)
                self._each, self._rows.every = None, 0

    def _compare_with_the_card(self, row: StepRow) -> None:
        """Tells once that a peak is near the card's memory. Learns how much that is."""
        import torch

        kind, index = row.device
        limit = _NO_LIMIT
        if kind and f"near {index}" not in self._told_once:
            most = torch.cuda.get_device_properties(index).total_memory
            limit = int(_NEAR * most)
            if row.peak > limit:
                sizes = f"{size_text(row.peak)} of {size_text(most)}"
                self._warn(
                    f"step {row.step}: cuda:{index} is at {sizes}", f"near {index}", row.step
                )
                limit = _NO_LIMIT
        self._rows.set_limit(row.device, limit)

    # ---------------------------------------------------------------- looks

    def _look_if_allowed(self) -> None:
        """Looks at the next step, or says when to ask again."""
        wait = self._allowance.wait()
        if wait <= 0:
            self._begin_look()
        else:
            self._rows.asks_from = time.time_ns() + int(min(wait, _LONGEST_WAIT) * 1e9)

    def _begin_look(self) -> None:
        assert self.folder is not None
        self._look_from, self._look_reason = self.step, self._rows.looks.wanted
        look = trace(
            *self._targets,
            devices=self._devices,
            stacks=True,
            path=self._path_of(self.step),
            max_events=_MOST_EVENTS,
            table=False,
        )
        look.is_read = self._look_reason == Why.GROWS  # then the variables are needed
        look.first_step = self.step
        with self._allowance.begins(), errors.collected_warnings():
            self._look = look.__enter__()
        self._rows.is_looking = True

    def _end_look(self, error: BaseException | None = None) -> None:
        look, self._look = self._look, None
        self._rows.is_looking = False
        reason, first = self._look_reason, self._look_from
        with self._allowance.ends(), errors.collected_warnings():
            look.__exit__(None if error is None else type(error), error, None)
        self._rows.looks.looked(reason, max(self.step - 1, 0))
        if not _has_tensors(look):
            return
        self._note("look", reason=name_of(reason), first=first, steps=self.step - first)
        self._kept[first] = reason
        if reason == Why.GROWS:
            self._reader.find(self._path_of(first), self._grows_on)
        if self._each is not None:
            self._reader.split(self._path_of(first))
        self._drop_looks()

    def _drop_looks(self) -> None:
        """Keeps the first look, the last few, the highest, and what departs, as far as there is room."""
        sizes = {first: self._bytes_of(first) for first in self._kept}
        last = sorted(self._kept)[-_LAST:]
        always = {min(self._kept), self._highest[1], *last}
        value = {first: (reason != Why.DUE, first) for first, reason in self._kept.items()}
        for first in sorted(set(self._kept) - always, key=value.__getitem__):
            is_plain = not value[first][0]
            if not is_plain and sum(sizes.values()) <= self._size // 2:
                break
            del self._kept[first], sizes[first]
            self._path_of(first).unlink(missing_ok=True)

    def _hear(self, findings: Iterable[dict[str, Any]]) -> None:
        """Takes what the reader's process has found in looks."""
        for finding in findings:
            if finding["kind"] == "categories":
                self.categories[finding["device"]] = finding["bytes"]
            if finding["kind"] == "unread":
                self._note("unread", text="the process that reads looks has failed")
            if finding["kind"] == "growth" and finding["change"]:
                self._warn(f"{finding['evidence']}: {finding['change']}")

    def _bytes_of(self, first: int) -> int:
        with contextlib.suppress(OSError):
            return self._path_of(first).stat().st_size
        return 0

    def _path_of(self, first: int) -> Path:
        assert self.folder is not None
        return self.folder / step_totals.name_of_look(first)

    # ---------------------------------------------------------------- what is told

    def _note(self, kind: str, step: int | None = None, **about: Any) -> None:
        """Writes a line about a step, or the one that goes on, into the folder."""
        assert self.folder is not None
        step = self.step if step is None else step
        line = json.dumps({"kind": kind, "step": step, "unix_ns": time.time_ns(), **about})
        with (self.folder / step_totals.EVENTS).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _warn(self, text: str, once: str = "", step: int | None = None) -> None:
        """Raises an alarm, but no second one of the same `once`, or of the same text."""
        if (once or text) in self._told_once:
            return
        self._told_once.add(once or text)
        self._note("alarm", step, text=text)
        _log.warning("%s", text)
        if self._alarm is not None:
            self._alarm(text)

    def _make_folder(self) -> None:
        path = environment.file_of_rank(self._path)
        header = {
            "command": Path(sys.argv[0]).name if sys.argv else "",
            "pid": os.getpid(),
            "rank": environment.rank(),
            "host": platform.node(),
            "began_unix_ns": time.time_ns(),
        }
        try:
            path.mkdir(parents=True)
            self._file = StepFile(path / step_totals.NAME, header, self._size // 2)
            self._rows = C.StepRows()
            self._rows.every = self._every if self._each is not None else 0
            self._rows.write_to(self._file.room())
        except FileExistsError:
            raise errors.CannotWrite(f"{path} exists, and is not replaced: name another") from None
        except OSError as problem:
            raise errors.CannotWrite(f"cannot make {path}: {problem.strerror}") from None
        self.folder = path.absolute()

    def _make_room(self, file: StepFile) -> None:
        written = self._rows.written
        self._rows.write_to(None)
        self._rows.write_to(file.room(written))

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            written = self._rows.written
            self._rows.write_to(None)
            file.close(written)

    def _remove_folder(self) -> None:
        """The program has made no tensors: nothing stays of it."""
        assert self.folder is not None
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    def _give_up(self) -> None:
        """Ends without a result: something of ours has failed."""
        self._held.end()
        self._close_file()
        self._reader.stop()
        if self._counts:
            self._counts = False
            C.count_totals(cpu=False, device=False)
        if self._look is not None:
            with contextlib.suppress(Exception):
                self._look.__exit__(None, None, None)


def _has_tensors(look: Any) -> bool:
    try:
        return bool(look.data.has_allocations)
    except errors.CaptureError:  # nothing was recorded
        return False


class _Reader:
    """Reads looks, in a process beside the program, one after the other."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, tuple[str, ...]]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._reads = ""  # what it does

    def find(self, path: Path, device: str) -> None:
        """Finds what is wrong with a device in a look."""
        self._waiting.append((reading_look.print_findings.__name__, (str(path), device)))
        self._begin()

    def split(self, path: Path) -> None:
        """Splits the peak of a look by category. Nobody asks for an earlier look any more."""
        function = reading_look.print_categories.__name__
        self._waiting = [one for one in self._waiting if one[0] != function]
        self._waiting.append((function, (str(path),)))
        self._begin()

    def done(self) -> list[dict[str, Any]]:
        """What was read in a look since the last call; one of kind "unread" if it failed."""
        if self._process is None or self._process.poll() is None:
            return []
        process, self._process = self._process, None
        text, _ = process.communicate()
        self._begin()
        try:
            return list(json.loads(text))
        except ValueError:
            return [{"kind": "unread"}]

    @property
    def is_busy(self) -> bool:
        """Whether a look is being read."""
        return self._process is not None

    def finish(self) -> list[dict[str, Any]]:
        """Waits a while for what is wrong in the last look: the ones before it say the same."""
        findings = reading_look.print_findings.__name__
        self._waiting = [one for one in self._waiting if one[0] == findings][-1:]
        found, until = [], time.monotonic() + _PATIENCE
        while self._process is not None:
            is_wanted = self._reads == findings
            if not is_wanted:
                self._process.kill()  # no step will be told of it
            try:
                self._process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                self.stop()
            read = self.done()
            found += read if is_wanted else []
        return found

    def stop(self) -> None:
        """Reads no more."""
        self._waiting.clear()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _begin(self) -> None:
        if self._process is not None or not self._waiting:
            return
        self._reads, words = self._waiting.pop(0)
        self._process = beside.call(
            reading_look.__name__, self._reads, words, output=subprocess.PIPE
        )
