"""The environment of this process: its rank, the number of ranks, and its folder.

Recordings call these functions as they end, when the program may have changed anything. So the
functions never raise.
"""

import os
import re
from pathlib import Path

_NUMBER = re.compile(r"[0-9]{1,9}")


def rank() -> int:
    """Returns this process's number among those that the launcher started."""
    return _from_launcher("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", otherwise=0)


def world_size() -> int:
    """The number of processes that the launcher started."""
    return _from_launcher("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", otherwise=1)


def local_rank() -> int:
    """The process's number among those on its host."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    return _from_launcher(*names, otherwise=0)


def local_world_size() -> int | None:
    """The number of processes on this host; None if the launcher does not say."""
    number = _from_launcher("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", otherwise=0)
    if number:
        return number
    per_node = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(per_node) if _NUMBER.fullmatch(per_node) and int(per_node) else None


def _from_launcher(*names: str, otherwise: int) -> int:
    for name in names:
        text = os.environ.get(name, "").strip()
        if _NUMBER.fullmatch(text):
            return int(text)
    return otherwise


def working_directory() -> str:
    """The current folder; "" if it has been deleted."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""
