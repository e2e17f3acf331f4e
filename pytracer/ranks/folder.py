"""Finds the files of a job's ranks in a folder, and makes a digest of each, one after another."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pytracer import errors, snapshot
from pytracer.data import meta
from pytracer.data.recorded import Trace, load
from pytracer.ranks import digest
from pytracer.ranks.digest import Digest
from pytracer.ranks.engines import Map

SUFFIXES = (".pytrace", ".pickle", ".pkl")
_DEPTHS = ("*", "*/*")  # a job may have a folder per host
_RANK = re.compile(r"rank[_-]?(\d{1,9})", re.IGNORECASE)
# Attempts and last steps of the same job.
_LATER = re.compile(r"\.restart\d+|-oom|-last")
# A process that a program started, and that has not become a rank.
_NO_RANK = re.compile(r"\.process\d+\.")


def files_of(path: str | Path) -> list[Path]:
    """The files of one job's ranks.

    Raises:
        errors.UnreadableTrace: there is no trace in the folder, or none matches the pattern.
        errors.UsageError: the folder has the files of several jobs.
    """
    place = Path(path)
    if "*" in str(place):
        files = sorted(place.parent.glob(place.name))
        if not files:
            raise errors.UnreadableTrace(
                f"no file matches {path}: name the folder of the ranks, or another pattern"
            )
    else:
        there = (file for depth in _DEPTHS for file in place.glob(depth))
        files = sorted(file for file in there if file.name.endswith(SUFFIXES))
    if not files:
        raise errors.UnreadableTrace(
            f"{path} is a directory without a trace: no file there ends in .pytrace"
        )
    files = [file for file in files if not _NO_RANK.search(file.name)] or files
    jobs = sorted({job_of(file) for file in files})
    # A job may have a folder per host, but no file twice.
    if len(jobs) == 1 and len({file.name for file in files}) < len(files):
        jobs = sorted({f"{file.parent.relative_to(place)}/{jobs[0]}" for file in files})
    if len(jobs) > 1:
        shown = ", ".join(jobs[:3]) + (", ..." if len(jobs) > 3 else "")
        pattern = place / f"{jobs[0]}*.pytrace"
        raise errors.UsageError(
            f"{path} has the files of {len(jobs)} runs ({shown}): name one, as in '{pattern}'"
        )
    return files


def job_of(file: Path) -> str:
    """The file's name without rank and attempt: ranks of one job have this in common."""
    name = _LATER.sub("", file.name.removesuffix(file.suffix))
    found = _RANK.search(name)
    return name if found is None else (name[: found.start()] + name[found.end() :]).strip(".-_")


def read(file: Path) -> Trace:
    """The trace in the file.

    Raises:
        errors.UnreadableTrace: there is none.
    """
    return snapshot.load(file) if snapshot.is_snapshot(file) else load(file)


def digest_of(file: Path) -> Digest:
    """The digest of one file. A file that cannot be read has one too, which says why."""
    named = _RANK.search(file.name)
    try:
        trace = read(file)
    except errors.UnreadableTrace as problem:
        rank = int(named[1]) if named else 0
        return Digest(rank, status="unreadable", file=str(file), problem=str(problem))
    facts = meta.of(trace)
    # A snapshot of torch's does not have its rank, so its name decides.
    by_name = facts.world_size == 1 and named is not None
    return digest.of(trace, int(named[1]) if named and by_name else facts.rank, str(file))


def ranks_of(files: Iterable[Path], each: Map = map) -> "Ranks":
    """A digest of each file. `each` is `map`, or does the same in several processes."""
    return latest(each(digest_of, files))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, in order, and what else was found beside them."""

    digests: tuple[Digest, ...]
    earlier: tuple[str, ...] = ()  # files of earlier steps, or of earlier attempts


def latest(digests: Iterable[Digest]) -> Ranks:
    """The last attempt of each rank."""
    by_rank: dict[int, Digest] = {}
    earlier = []
    for one in sorted(digests, key=lambda each: each.began_unix_ns):
        if one.rank in by_rank:
            earlier.append(by_rank[one.rank].file)
        by_rank[one.rank] = one
    return Ranks(tuple(by_rank[rank] for rank in sorted(by_rank)), tuple(earlier))
