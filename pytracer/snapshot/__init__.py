"""Reads memory snapshots of torch (`torch.cuda.memory._dump_snapshot`) as a Trace.

csrc/core/pickle.h reads the file and executes nothing. `importing` makes events of it, `stacks` says
what the frames show, `timeline` what the program was doing, and `evidence` what each block is for:
rules that look at the columns of `facts`.
"""

import os
from pathlib import Path

from pytracer import errors
from pytracer.basics import share_done
from pytracer.data._native import core
from pytracer.data.recorded import Trace
from pytracer.snapshot.importing import Import


def is_snapshot(path: str | Path) -> bool:
    """Whether the file begins like a pickle. False if it cannot be read."""
    try:
        if not Path(path).is_file():  # opening a pipe would wait for a writer
            return False
        with Path(path).open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return len(head) == 2 and head[0] == 0x80 and head[1] <= 5


def load(path: str | Path) -> Trace:
    """Reads a memory snapshot of torch.

    Raises:
        errors.UnreadableTrace: the file is no snapshot, is cut short, or would run code.
    """
    try:
        columns = core.read_snapshot(os.fsencode(path))
    except core.FileError as error:
        raise errors.UnreadableTrace(str(error)) from None
    share_done.tell(0.3)  # of the time; so are the shares that follow
    imported = Import(columns)
    share_done.tell(0.4)
    return imported.trace(Path(path))
