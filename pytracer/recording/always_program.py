"""Records a program that runs under `pytracer run --always`, from its import of torch to its end."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pytracer import errors
from pytracer.basics import environment
from pytracer.basics.names import short_path
from pytracer.recording import traced_program
from pytracer.recording.place import unused
from pytracer.recording.start import our_name_is_taken, safely
from pytracer.recording.traced_program import Messages, Plan, Recorder

if TYPE_CHECKING:
    from pytracer.recording.always import always

_SUFFIX = ".always"


def recorder(plan: Plan, tell: Messages) -> Recorder:
    """What records a program by this plan.

    Raises:
        errors.PytracerError: the program's user has asked for a place where no file can be.
    """
    return AlwaysProgram(plan, tell) if plan.always else traced_program.recorder(plan, tell)


class AlwaysProgram:
    """Counts a program for weeks, with a look now and then. See `always`."""

    def __init__(self, plan: Plan, tell: Messages) -> None:
        """Counts nothing until `begin`."""
        self._plan, self._tell = plan, tell
        self._always: always | None = None
        self._owner = os.getpid()
        self._why = ""
        self.exit_code = 0

    def begin(self) -> None:
        """Begins to count: the program has imported torch."""
        self._owner = os.getpid()
        if not our_name_is_taken() and self._plan.records_this_rank:
            safely(self._begin)

    def end(self, error: BaseException | None, *, gave_up: bool = False) -> None:
        """Ends it: the program is over, has failed, or exited with a code."""
        if self._always is not None and self._owner == os.getpid():
            safely(self._end, self._always, error)

    def say_why(self) -> None:
        """Explains below the traceback how memory was involved."""
        if self._why:
            safely(self._tell.page, self._why)

    def _begin(self) -> None:
        from pytracer.recording.always import DEFAULT_SIZE, always

        try:
            self._always = always(
                self._folder(),
                devices=self._plan.devices,
                size=self._plan.max_size or DEFAULT_SIZE,
            ).begin()
        except errors.PytracerError as problem:
            self._tell.line(f"not recorded: {problem}")

    def _folder(self) -> Path:
        """The folder to make. Without a name from the user, one that nobody has."""
        if self._plan.output is not None:
            return self._plan.output
        name = self._plan.name
        if self._plan.is_child and environment.world_size() == 1:
            name += f".process{os.getpid()}"
        return unused(Path(f"{name}{_SUFFIX}"))

    def _end(self, recorder: "always", error: BaseException | None) -> None:
        recorder.end(error)
        self._tell.finish()
        folder = recorder.folder
        if folder is None or not folder.exists():
            return
        look = f"pytracer summary {shlex.quote(short_path(str(folder), ''))}"
        if error is None:
            self._tell.line(f"{recorder.step:,} steps; look at them:  {look}")
            return
        page = recorder.last.post_mortem() if recorder.failed and recorder.last else ""
        if recorder.failed and not page:
            from pytracer.reading.history import History

            page = History(folder).post_mortem()
        page = page and f"{page}\n\n"
        self._why = f"{page}Look at the {recorder.step:,} steps before it:  {look}"
