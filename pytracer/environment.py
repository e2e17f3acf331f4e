"""Reads this process's surroundings: its place among a launcher's processes, and its folder.

Nothing here raises: recordings ask as they end, when the program may have changed all of it.
"""

import os
import re
from pathlib import Path

_NUMBER = re.compile(r"[0-9]{1,9}")


def rank() -> int:
    """Returns this process's number among those that the launcher started."""
    return _from_launcher("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", otherwise=0)


def world_size() -> int:
    """Returns how many processes the launcher started."""
    return _from_launcher("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", otherwise=1)


def _from_launcher(*names: str, otherwise: int) -> int:
    for name in names:
        text = os.environ.get(name, "").strip()
        if _NUMBER.fullmatch(text):
            return int(text)
    return otherwise


def working_directory() -> str:
    """Returns the working directory; "" if it has been deleted."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""
