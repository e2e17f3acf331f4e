"""A private view of the files, made by a library that stands before libc.

The library (csrc/view) sends each change to a folder of its own. The kernel's Landlock, where it
has it, refuses the writes that the library does not see.
"""

import os
import subprocess
import sys
from pathlib import Path

from pytracer.sandbox import written
from pytracer.sandbox.order import VIEW, Impossible, Order

LIBRARY = Path(__file__).parents[1] / "_view.so"


def variables(folder: str, outputs: list[str], *, network: bool) -> dict[str, str]:
    """The environment that puts a program and its children into the view in this folder."""
    before = os.environ.get("LD_PRELOAD")
    first = str(LIBRARY) if LIBRARY.exists() else ""
    return {
        "LD_PRELOAD": ":".join(filter(None, (first, before))),
        VIEW: folder,
        "PYTRACER_VIEW_OPEN": ":".join(outputs),
        **({"PYTRACER_VIEW_NETWORK": "1"} if network else {}),
    }


def changes(folder: Path) -> list[written.Change]:
    """What was changed in the view in this folder."""
    return list(written.changes(folder / "tree", Path("/")))


def write(folder: Path, found: list[written.Change]) -> None:
    """Makes the changes in the user's files."""
    written.write(found, lambda real: Path(f"{folder}/tree{real}"))


class View:
    """A private folder, and the variables that have a program use it."""

    def __init__(self, order: Order) -> None:
        """Makes the view, and tries it.

        Raises:
            Impossible: the library is missing, or the system does not load it.
        """
        self._folder = Path(order.folder)
        self.variables = variables(order.folder, order.outputs, network=order.network)
        probe = self._folder.with_name("probe")
        make = [sys.executable, "-ISc", f"import os; os.mkdir({str(probe)!r})"]
        tried = subprocess.run(make, env={**os.environ, **self.variables}, capture_output=True)
        mine = Path(f"{self._folder}/tree{probe}")
        if tried.returncode != 0 or probe.exists() or not mine.is_dir():
            raise Impossible(f"{LIBRARY.name} is missing, or the system does not load it")
        mine.rmdir()

    def enter(self) -> None:
        """The variables are enough."""

    def changes(self) -> list[written.Change]:
        """What the command has changed in its view."""
        return changes(self._folder)

    def write(self, found: list[written.Change]) -> None:
        """Makes the same changes in the user's files."""
        write(self._folder, found)
