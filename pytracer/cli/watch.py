"""`pytracer watch` and `pytracer run --live`: a recording on a terminal while it goes on.

It takes part in nothing: it reads the growing file. So it cannot slow the training down but by the
little of a core that it takes, and may be begun and left at any time, over ssh too.
"""

import argparse
import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from pytracer import driver, errors
from pytracer.cli import output
from pytracer.cli.command import Command
from pytracer.export import live
from pytracer.export.table import Paint, wants_color
from pytracer.units import size_text

_LOOK_EVERY_S = 0.5
_ASK_DRIVER_EVERY_S = 5.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_MOST_PROGRAM_BYTES = 4096  # of the program's output that are looked at for its last line


class Watch(Command):
    """Show a recording while it runs.

    Shows a trace that is still being written: categories now and at the peak, steps, growth,
    modules, lines, the device's other users. q leaves. Where the output is no terminal, or TERM
    is dumb, it prints a line for each step.
    """

    name = "watch"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="a .pytrace file that a program is writing")

    def run(self, options: argparse.Namespace) -> int:
        following = live.Following(options.file)
        if has_screen(sys.stdout):
            Screen(following).show()
            print(_last_words(following))
        else:
            print_steps(following, lambda text: print(text, flush=True))
        return 0


def has_screen(stream: Any) -> bool:
    """Whether a picture can be drawn there, and somebody can press a key."""
    there = stream is not None and stream.isatty() and sys.stdin is not None and sys.stdin.isatty()
    return there and os.environ.get("TERM", "dumb") not in ("dumb", "")


def _last_words(following: live.Following) -> str:
    device = following.main
    peak = "" if device is None else f", peak {size_text(device['peak']['bytes'])}"
    file = shlex.quote(str(following.path))
    return f"step {following.state['step']:,}{peak}. All of it:  pytracer summary {file}"


def catch_up(following: live.Following, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Reads all that is there, and makes the state that of now."""
    while following.advance():
        if interrupted():
            break
    following.look()


def print_steps(
    following: live.Following,
    say: Callable[[str], None],
    over: Callable[[], bool] = lambda: False,
) -> None:
    """One line a step, until the recording is over."""
    next_step = 0
    while True:
        is_over = over() or following.abandoned  # first: what it wrote before is then read
        catch_up(following)
        for step in following.steps(next_step):
            say(live.step_line(step))
            next_step = step.number + 1
        if following.finished or is_over:
            if not following.finished:
                say("the recording has no end: its process is gone")
            return
        time.sleep(_LOOK_EVERY_S)


class Screen:
    """The whole terminal, drawn anew twice a second in one write."""

    def __init__(
        self,
        following: live.Following,
        over: Callable[[], bool] = lambda: False,
        program: Callable[[], str] = lambda: "",
    ) -> None:
        """`over`: whether to leave without being asked. `program`: its last line of output."""
        self._following, self._over, self._program = following, over, program
        self._paint = Paint(wants_color(sys.stdout))
        encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
        self._encoding, self._fine = encoding, encoding.replace("-", "") == "utf8"
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._users: list[str] = []
        self._asked_driver = -_ASK_DRIVER_EVERY_S
        self._leaves = False

    def show(self) -> None:
        """Until `q`, or until it is over."""
        with _own_terminal(self._in, self._out) as wake:
            while not self._is_over():
                catch_up(self._following, lambda: self._is_disturbed(0, wake))
                self._draw()
                self._is_disturbed(0 if self._is_over() else _LOOK_EVERY_S, wake)

    def _is_over(self) -> bool:
        return self._leaves or self._over()

    def _is_disturbed(self, wait_s: float, wake: int) -> bool:
        """Within that time: by a key to leave, which stays known, or by another size."""
        key = self._key(wait_s, wake)
        self._leaves = self._leaves or key == "q"
        return key != ""

    def _key(self, wait_s: float, wake: int) -> str:
        """What was pressed within that time; "resize" when the terminal changed its size."""
        try:
            ready, _, _ = select.select([self._in, wake], [], [], wait_s)
        except InterruptedError:
            return "resize"
        if wake in ready:
            return "q" if b"q" in os.read(wake, 4096) else "resize"
        if not ready:
            return ""
        pressed = os.read(self._in, 64)
        return "q" if not pressed or b"q" in pressed.lower() or b"\x03" in pressed else ""

    def _draw(self) -> None:
        columns, height = os.get_terminal_size(self._out)
        lines = live.screen(
            self._following,
            (columns or 80, height or 24),  # a terminal may not know its size
            paint=self._paint,
            fine=self._fine,
            users=self._gpu_users(),
            program=self._program(),
        )
        picture = _HOME + f"{_TO_LINE_END}\r\n".join(lines) + _TO_LINE_END + _TO_SCREEN_END
        write_all(self._out, picture.encode(self._encoding, "replace"))

    def _gpu_users(self) -> list[str]:
        """Asked of the driver now and then: it takes a while."""
        device = self._following.main
        if device is None or device["type"] == 0:
            return []
        now = time.monotonic()
        if now - self._asked_driver >= _ASK_DRIVER_EVERY_S:
            self._asked_driver = now
            nvml = driver.open_nvml()
            if isinstance(nvml, str):
                self._users = [nvml]
            else:
                gpus = driver.read_gpus(nvml, driver.all_uuids(nvml))
                driver.name_processes(nvml, gpus)
                self._users = live.gpu_users(gpus, self._following.meta.pid)
        return self._users


def write_all(file: int, data: bytes) -> None:
    """A terminal over ssh may take a part at a time."""
    while data:
        data = data[os.write(file, data) :]


@contextlib.contextmanager
def _own_terminal(keys: int, picture: int) -> Iterator[int]:
    """A second screen, keys as they are pressed; and a pipe that tells of a new size and of Ctrl-C.

    An exception may come in the middle of a finalizer, where Python drops it: so Ctrl-C raises none.
    """
    before = termios.tcgetattr(keys)
    wake, told = os.pipe()
    os.set_blocking(told, False)

    def told_by(number: int, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(told, b"q" if number == signal.SIGINT else b".")

    heard = {signal.SIGWINCH: signal.signal(signal.SIGWINCH, told_by)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        heard[signal.SIGINT] = signal.signal(signal.SIGINT, told_by)
    try:
        tty.setcbreak(keys)
        write_all(picture, _ENTER.encode())
        yield wake
    finally:
        with contextlib.suppress(OSError):  # the terminal may be gone
            write_all(picture, _LEAVE.encode())
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        for number, handler in heard.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(told)


# ---------------------------------------------------------------------- run --live


def run_live(arguments: Sequence[str], path: Path) -> int:
    """Runs `pytracer run` in a process of its own and shows what it records.

    Args:
        arguments: of `run`, with all that it needs to write to `path`.
        path: where the trace will be.

    Returns:
        The program's exit code.
    """
    command = [sys.executable, "-m", "pytracer", "run", *arguments]
    with contextlib.ExitStack() as stack:
        # Ctrl-C is the program's; the terminal sends it to both.
        old = signal.signal(signal.SIGINT, lambda *_: None)
        stack.callback(signal.signal, signal.SIGINT, old)
        began = time.time()
        if has_screen(sys.stdout):
            printed = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
            )
            _show_live(process, path, began, printed)
        else:
            process = subprocess.Popen(command)
            following = _await_file(process, path, began)
            if following is not None:
                with contextlib.suppress(errors.UnreadableTrace):
                    print_steps(following, output.tell, lambda: process.poll() is not None)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _show_live(process: subprocess.Popen[bytes], path: Path, began: float, printed: Any) -> None:
    def over() -> bool:
        return process.poll() is not None

    try:
        following = _await_file(process, path, began)
        if following is not None:
            Screen(following, over, lambda: _last_line(printed)).show()
    except errors.UnreadableTrace as error:
        output.tell(f"pytracer: {error}")
    # What it printed meanwhile, and what it prints from now on.
    shown = 0
    while True:
        is_over = over()
        shown = _print_from(printed, shown)
        if is_over:
            return
        time.sleep(_LOOK_EVERY_S / 5)


def _await_file(
    process: subprocess.Popen[bytes], path: Path, began: float
) -> live.Following | None:
    """The recording, once it has begun; None if the program ends without one."""
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_size > 0 and status.st_mtime >= began - 1:  # not one that it replaces
                return live.Following(path)
        time.sleep(_LOOK_EVERY_S / 5)
    return None


def _last_line(printed: IO[bytes]) -> str:
    size = os.fstat(printed.fileno()).st_size
    tail = os.pread(printed.fileno(), _MOST_PROGRAM_BYTES, max(size - _MOST_PROGRAM_BYTES, 0))
    lines = tail.decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")


def _print_from(printed: IO[bytes], at: int) -> int:
    while piece := os.pread(printed.fileno(), 1 << 16, at):
        write_all(sys.stdout.fileno(), piece)
        at += len(piece)
    return at
