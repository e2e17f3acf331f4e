"""A private view of the files, made of namespaces and overlays.

The view is a new root: each folder is an overlay whose changes lie in memory. Folders above a mount
point cannot be overlaid, so they are made again, with a copy of each small file. An overlay renames no folder that was there
before: the library that `preload.py` describes copies it instead.
"""

import ctypes
import fcntl
import os
import shutil
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytracer.sandbox import preload, written
from pytracer.sandbox.order import Impossible, Order

_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_UP = 1  # IFF_UP
_SETS_FLAGS = 0x8914  # SIOCSIFFLAGS
_REAL = ("/dev", "/proc", "/sys")  # devices and the kernel's own answers
_MOST_COPIED = 64 << 20  # bytes of a file; a larger one beside a mount point can only be read


class View:
    """A private root of this process and the command that it runs."""

    def __init__(self, order: Order) -> None:
        """Makes the view.

        Raises:
            Impossible: this machine does not allow it.
        """
        folder, network = Path(order.folder), order.network
        self.variables = preload.variables("namespaces", [], network=network)
        self._cwd = Path.cwd()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._unshare(_NEWNS | (0 if network else _NEWNET))
        self._call("making the mounts private", "mount", None, b"/", None, _REC | _PRIVATE, None)
        self._mounts = _mounts()
        self._folder, self._root = folder, folder / "root"
        self._mount("tmpfs", folder, "tmpfs", 0, "mode=755")
        try:
            os.setxattr(folder, "user.pytracer", b"")
        except OSError:  # before Linux 6.6; an overlay would fail where a folder is made again
            raise Impossible("this kernel's tmpfs has no attributes for overlays") from None
        # What is private, what it hides, and names of folders in it that have a place of their own.
        self._layers: list[tuple[Path, Path, set[str]]] = []
        self._root.mkdir()
        self._cover(Path("/"))
        if self._is_guest:
            self._cover_beside_others()
        for output in order.outputs:
            self._mount(output, self._at(Path(output)), "", _BIND | _REC)
        if not network:
            _raise_loopback()

    def enter(self) -> None:
        """Puts the process of the command into the view."""
        os.chroot(self._root)
        os.chdir(self._cwd)

    def changes(self) -> list[written.Change]:
        """What the command has changed in its view."""
        return [one for layer in self._layers for one in written.changes(*layer)]

    def write(self, changes: list[written.Change]) -> None:
        """Makes the same changes in the user's files."""
        written.write(changes, self._at)

    # ---------------------------------------------------------------- how it is made

    def _unshare(self, kinds: int) -> None:
        self._is_guest = self._libc.unshare(kinds) != 0  # has a user namespace, and no rights
        if not self._is_guest:
            return
        user, group = os.geteuid(), os.getegid()
        self._call("making namespaces", "unshare", kinds | _NEWUSER)
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        except OSError as problem:
            raise Impossible(f"keeping the user's number: {problem.strerror}") from None

    def _cover(self, real: Path) -> None:
        """Puts the folder or file into the view."""
        if str(real) in _REAL:
            self._at(real).mkdir()
            self._mount(real, self._at(real), "", _BIND | _REC)
            if (real / "shm").is_dir():
                self._overlay_or_protect(real / "shm")
        elif real.is_symlink():
            self._at(real).symlink_to(real.readlink())
        elif not real.is_dir():
            self._copy(real)
        elif self._below(real):
            here = self._at(real)
            here.mkdir(exist_ok=True)
            _copy_mode(real, here)
            inside: list[Path] = []
            with suppress(PermissionError):
                inside = sorted(real.iterdir())
            for each in inside:
                self._cover(each)
            os.utime(here, ns=_times(real))
            folders = {one.name for one in here.iterdir() if one.is_dir() and not one.is_symlink()}
            (here / written.OPAQUE).touch()
            self._layers.append((here, real, folders))
        else:
            self._at(real).mkdir()
            self._overlay_or_protect(real)

    def _cover_beside_others(self) -> None:
        """Gives an overlay to the user's folders that are inside of other people's.

        Before a file changes, an overlay copies the folders above it with their owners, which a
        user namespace does not have.
        """
        names = (self._cwd, os.environ.get("HOME", "/"), os.environ.get("TMPDIR", "/tmp"))
        for real in sorted({Path(name).resolve() for name in names if Path(name).is_dir()}):
            between = real.parents[:-2]  # without the root and its folders
            others = any(one.stat().st_uid != os.geteuid() for one in between)
            if others and all(real != known for _, known, _ in self._layers):
                self._overlay_or_protect(real)

    def _below(self, folder: Path) -> list[Path]:
        return [one for one in self._mounts if folder in one.parents]

    def _at(self, real: Path) -> Path:
        return self._root / str(real).lstrip("/")

    def _overlay_or_protect(self, real: Path) -> None:
        """An overlay of the folder; where the kernel makes none, it can only be read."""
        number = str(len(self._layers))
        mine, work = self._folder / "mine" / number, self._folder / "work" / number
        mine.mkdir(parents=True)
        work.mkdir(parents=True)
        _copy_mode(real, mine)
        lower = str(real).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
        options = f"lowerdir={lower},upperdir={mine},workdir={work},userxattr"
        try:
            self._mount("overlay", self._at(real), "overlay", 0, options)
            self._layers.append((mine, real, set()))
        except Impossible:
            self._mount(real, self._at(real), "", _BIND | _REC)
            self._protect(self._at(real))

    def _copy(self, real: Path) -> None:
        try:
            status = real.lstat()
            is_small = stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_COPIED
            if is_small and real not in self._mounts:
                shutil.copy2(real, self._at(real))
                return
            self._at(real).touch()
            self._mount(real, self._at(real), "", _BIND)
            if stat.S_ISREG(status.st_mode):
                self._protect(self._at(real))
        except (OSError, Impossible):  # nobody here may read it
            return

    def _protect(self, at: Path) -> None:
        """Makes the mount one that can only be read."""
        read_only = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
        what = f"protecting {at}"
        self._call(
            what, "syscall", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(at), _AT_RECURSIVE, read_only,
            len(read_only),
        )  # fmt: skip

    def _mount(self, what: Any, at: Path, kind: str, flags: int, options: str = "") -> None:
        words = (os.fsencode(str(each)) for each in (what, at, kind))
        self._call(f"mounting {at}", "mount", *words, flags, os.fsencode(options))

    def _call(self, what: str, name: str, *arguments: Any) -> None:
        whole = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
        if getattr(self._libc, name)(*whole) != 0:
            raise Impossible(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mounts() -> list[Path]:
    """The mount points, without the root."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        text = line.split()[4].encode().decode("unicode_escape").encode("latin-1")
        points.append(Path(os.fsdecode(text)))
    return sorted({point for point in points if str(point) != "/" and os.path.lexists(point)})


def _copy_mode(real: Path, mine: Path) -> None:
    """Gives the private folder the owner, mode and time of the real one, as far as it may."""
    status = real.stat()
    with suppress(OSError):
        os.chown(mine, status.st_uid, status.st_gid)
    may = 0o7777 if os.access(real, os.W_OK, effective_ids=True) else 0o5555
    mine.chmod(stat.S_IMODE(status.st_mode) & may)
    os.utime(mine, ns=_times(real))


def _times(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_atime_ns, status.st_mtime_ns


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, _SETS_FLAGS, struct.pack("16sh14x", b"lo", _UP))
