"""The messages of a recording: what it prints while the program runs, and when it is over."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pytracer import errors
from pytracer.cli import output, progress
from pytracer.recording import beside
from pytracer.recording.start import tell


class Messages:
    """Prints the messages of `run`. Only rank 0 prints, but every rank reports its failure."""

    def __init__(
        self,
        json_file: Path | None,
        force: bool,
        every: str = "--steps all",
        *,
        unwatch: str = "",
        stop: bool = False,
        digests: Path | None = None,
    ) -> None:
        """Prints nothing yet.

        Args:
            json_file: a file for the summary.
            force: whether to overwrite it.
            every: the option that records every step.
            unwatch: the option that turns off watching; "" if nothing is watched.
            stop: whether to end the program after the steps to keep.
            digests: a folder for the digest of each rank.
        """
        from pytracer.basics import environment
        from pytracer.basics.files import refuse_to_overwrite

        self.rank, self._every, self._stop = environment.rank(), every, stop
        self._watching = f"; watching the rest (not with {unwatch})" if unwatch else ""
        # The program may change its folder.
        self._json = json_file.absolute() if json_file is not None else None
        self._digests = digests.absolute() if digests is not None else None
        self._beside: subprocess.Popen[bytes] | None = None
        self._digest: subprocess.Popen[bytes] | None = None
        self._later: Callable[[], None] = lambda: None
        if self.rank == 0 and json_file is not None:
            refuse_to_overwrite(json_file, overwrite=force)

    def line(self, text: str) -> None:
        """Prints one line."""
        if self.rank == 0:
            tell(f"pytracer: {' '.join(text.split())}")

    def recorded(
        self, traced: Any, path: Path, file: Path | None, which: str, problem: str = ""
    ) -> None:
        """Shows the table and the next commands. With `--stop` the program ends here."""
        caption = f"{which.capitalize()} ({self._every}: every step):\n" if which else ""
        shown = Shown(str(path), str(file or ""), caption, str(self._json or ""))
        if self._digests is not None and file is not None:
            self._digest = beside.call(__name__, "write_digest", (str(file), str(self._digests)))
        if self.rank == 0 and which and file is not None and not self._stop:
            self._show_beside(traced, shown, which)
        elif self.rank == 0:
            if which and self._watching and not self._stop:
                self.line(f"recorded {which}{self._watching}")
            show(traced, shown, "analysing what was recorded")
        if self._stop and which:
            if problem:
                self.stop(problem)
            _end_now(0)

    def stop(self, text: str) -> None:
        """Prints a line and ends the program."""
        self.line(text)
        _end_now(errors.UsageError.exit_code)

    def finish(self) -> None:
        """Waits until the table is shown, even if the program was short."""
        was_shown = self._beside is None or self._beside.wait() == 0
        if self._digest is not None:
            self._digest.wait()
        later, self._later = self._later, lambda: None
        if not was_shown or self._beside is None:
            later()

    def _show_beside(self, traced: Any, shown: "Shown", which: str) -> None:
        """Shows the table from another process, because the program is in the middle of a step.

        A thread would take the GIL from the program at each operator.
        """
        self.line(f"recorded {which}{self._watching or '; analysing ...'}")
        self._beside = beside.call(__name__, "show_file", shown)
        self._later = partial(show, traced, shown)  # if that process cannot

    def page(self, text: str) -> None:
        """Prints a page about a failure. Ranks other than 0 print only its last line."""
        if self.rank == 0:
            tell(f"\n{text}")
        else:
            last = text.splitlines()[-1]
            tell(f"pytracer: rank {self.rank}: {' '.join(last.split())}")


def _end_now(code: int) -> None:
    """Ends the process. Nothing more of the program runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have put anything there
            stream.flush()
    os._exit(code)


class Shown(NamedTuple):
    """A recorded file, as it is shown."""

    name: str  # the path as the user wrote it
    file: str  # the absolute path, because the program may change its folder
    caption: str
    json: str  # a file to write, or ""


def show_file(fields: Sequence[str]) -> None:
    """Shows a file from a process of its own, at low priority. `fields` are those of `Shown`."""
    from pytracer.reading import views

    output.ready_streams()
    shown = Shown(*fields)
    try:
        show(views.read(Path(shown.file)), shown)
    except errors.PytracerError as problem:  # the program may have removed the file
        tell(f"pytracer: {problem}")


def write_digest(fields: Sequence[str]) -> None:
    """Writes the digest of a file into a folder of digests, from a process of its own."""
    from pytracer.ranks import dataset, folder

    output.ready_streams()
    file, target = fields
    try:
        dataset.write([folder.digest_of(Path(file))], target, overwrite=True)
    except errors.PytracerError as problem:
        tell(f"pytracer: no digest: {problem}")


def _other_ranks(name: str, ranks: int) -> str:
    """The lines about the files of the other ranks, if there are any."""
    start, rank0, end = name.rpartition(".rank0")
    others = range(1, ranks) if rank0 else range(0)
    if not others:
        return ""
    first, last = (f"{start}.rank{rank}{end}" for rank in (others[0], others[-1]))
    files = first if len(others) == 1 else f"{first} to {last}"
    return (
        f"\nThe other ranks write {files}. Compare all with:\n"
        f"  pytracer summary {shlex.quote(f'{start}.rank*{end}')}"
    )


def _before(shown: "Shown") -> str:
    """The file of the run before, as the user would write it: train.pytrace for train.1.pytrace."""
    match = re.fullmatch(r"(.+)\.(\d{1,9})\.pytrace", shown.name)
    if match is None:
        return ""
    number = int(match[2]) - 1
    name = f"{match[1]}.{number}.pytrace" if number > 0 else f"{match[1]}.pytrace"
    return name if Path(shown.file).with_name(Path(name).name).exists() else ""


def show(traced: Any, shown: Shown, doing: str = "") -> None:
    """Prints the table and the next commands in one write, so the program cannot print in between.

    `doing` is what to say if it takes long; "" while the program runs, which prints itself.
    """
    from pytracer.analysis.facts import timelines  # imports numpy, which a program may do first
    from pytracer.data import meta
    from pytracer.export import table, terminal

    with progress.doing(doing) if doing else contextlib.nullcontext():
        screen = table.render(traced.data, terminal.here(sys.__stderr__))
    if len(traced.data.events.ticks) and not len(timelines.timeline(traced.data).step_ends):
        screen += "\n\nNo optimizer step was seen, so everything was recorded to the end."
    if not shown.file:
        tell(f"\n{shown.caption}{screen}\n\nKept in memory only: no file could be written.")
        return
    file = shlex.quote(shown.name)
    before = _before(shown)
    since = (
        f"  pytracer diff {shlex.quote(before)} {file}    since the run before\n" if before else ""
    )
    others = _other_ranks(shown.name, meta.of(traced.data).world_size)
    tell(
        f"\n{shown.caption}{screen}\n\nWritten to {shown.name}. Look again with:\n"
        f"  pytracer summary {file}\n{since}"
        f"  pytracer export {file}    a timeline for Perfetto{others}"
    )
    try:
        json_file = Path(shown.json) if shown.json else None
        output.write_json(json_file, output.summary_document(traced) if json_file else {})
    except errors.CannotWrite as problem:  # the training goes on
        tell(f"pytracer: {problem}")
