"""The environment of this process: its rank, the number of ranks, and its folder.

Recordings call these functions as they end, when the program may have changed anything. So the
functions never raise.
"""

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

_NUMBER = re.compile(r"[0-9]{1,9}")


class _Launcher(NamedTuple):
    """The variables that a launcher sets for each of its processes."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


# A launcher is there if its first two variables are. A batch script of SLURM has SLURM_PROCID and
# SLURM_NTASKS too, but runs once: only a step of srun has SLURM_STEP_NUM_TASKS.
_LAUNCHERS = (
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # Lightning starts the other ranks of its host itself. They have no RANK.
    _Launcher("LOCAL_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def rank() -> int:
    """Returns this process's number in its job, as the launcher counts."""
    return _place()[0]


def world_size() -> int:
    """The number of processes in the job; 1 if there is no job."""
    return _place()[1]


def local_rank() -> int:
    """The process's number among those on its host."""
    launcher = _launcher()
    return (_number(launcher.local_rank) if launcher is not None else None) or 0


def local_world_size() -> int | None:
    """The number of processes on this host; None if the launcher does not say."""
    launcher = _launcher()
    return _number(launcher.local_world_size) if launcher is not None else None


def place_in_group() -> tuple[int, int] | None:
    """The rank and the number of ranks in torch's process group; None if there is no group."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized():
            return None
        return int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:  # this torch is built without it, or half imported
        return None


def _place() -> tuple[int, int]:
    """The rank and the number of ranks, as the launcher says, or else torch.

    Programs may start their ranks themselves. These learn their number when they join a process
    group. Before, Lightning's have one on their host.
    """
    launcher = _launcher()
    if launcher is not None and launcher.rank == "LOCAL_RANK":
        return place_in_group() or _place_by(launcher)
    return _place_by(launcher) if launcher is not None else place_in_group() or (0, 1)


def _launcher() -> _Launcher | None:
    for launcher in _LAUNCHERS:
        if _number(launcher.rank) is not None and _number(launcher.world_size):
            return launcher
    return None


def _place_by(launcher: _Launcher) -> tuple[int, int]:
    return _number(launcher.rank) or 0, _number(launcher.world_size) or 1


def _number(name: str) -> int | None:
    """The number at the start of a variable, as in "8" or SLURM's "8(x2)"; None if there is none."""
    text = os.environ.get(name, "").strip().partition("(")[0]
    return int(text) if _NUMBER.fullmatch(text) else None


def file_of_rank(path: Path) -> Path:
    """The path with this rank's number, if the job has several ranks."""
    if world_size() == 1:
        return path
    return path.with_name(f"{path.stem}.rank{rank()}{path.suffix}")


def working_directory() -> str:
    """The current folder; "" if it has been deleted."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""
