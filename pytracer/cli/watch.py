"""`pytracer watch` and `pytracer run --live`: show a recording on a terminal while it runs.

The watcher only reads the growing file. So it slows the training down only by its small share of a
core, and it can begin and end at any time, over ssh too.
"""

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

from pytracer import errors
from pytracer.basics import driver
from pytracer.basics.units import size_text
from pytracer.cli import output
from pytracer.data.history import Steps
from pytracer.export import history_text, live, terminal

_LOOK_EVERY_S = 0.5
_ASK_DRIVER_EVERY_S = 5.0
_HISTORY_EVERY_S = 2.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_MOST_PROGRAM_BYTES = 4096  # the end of the program's output, which has its last line


def watch(path: Path) -> None:
    """Shows the file while a program writes it."""
    following = live.Following(path)
    if has_screen(sys.stdout):
        Screen(following).show()
        print(_closing_line(following))
    else:
        print_steps(following, lambda text: print(text, flush=True))


def has_screen(stream: Any) -> bool:
    """Whether the stream is a terminal that can show the screen and take keys."""
    there = stream is not None and stream.isatty() and sys.stdin is not None and sys.stdin.isatty()
    return there and os.environ.get("TERM", "dumb") not in ("dumb", "")


def watch_histories(folders: Sequence[Path]) -> None:
    """Shows recorders that are always on, one for each rank, until all of them are over."""
    on_screen = has_screen(sys.stdout)
    shown = ""
    keys = _own_terminal(sys.stdin.fileno(), sys.stdout.fileno()) if on_screen else _no_terminal()
    with keys as wake:
        while True:
            ranks = [Steps(folder) for folder in folders]
            text = history_text.of_ranks(ranks) if len(ranks) > 1 else history_text.render(ranks[0])
            if on_screen:
                lines = text.splitlines()[: (os.get_terminal_size().lines or 24) - 1]
                picture = _HOME + f"{_TO_LINE_END}\r\n".join(lines) + _TO_LINE_END + _TO_SCREEN_END
                write_all(sys.stdout.fileno(), picture.encode("utf-8", "replace"))
            elif text != shown:
                print(f"{text}\n", flush=True)
            shown = text
            if all(rank.is_over for rank in ranks) or (
                on_screen and _is_left(_HISTORY_EVERY_S, wake)
            ):
                break
            if not on_screen:
                time.sleep(_HISTORY_EVERY_S)
    if on_screen:
        print(shown)


@contextlib.contextmanager
def _no_terminal() -> Iterator[int]:
    yield -1


def _is_left(wait_s: float, wake: int) -> bool:
    """Whether the key to leave, or Ctrl-C, comes within that time."""
    ready, _, _ = select.select([sys.stdin.fileno(), wake], [], [], wait_s)
    pressed = [os.read(one, 4096) for one in ready]
    return any(not keys or b"q" in keys.lower() for keys in pressed)


def _closing_line(following: live.Following) -> str:
    device = following.main
    peak = "" if device is None else f", peak {size_text(device['peak']['bytes'])}"
    file = shlex.quote(str(following.path))
    return f"step {following.state['step']:,}{peak}. All of it:  pytracer summary {file}"


def catch_up(following: live.Following, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Reads all written data, and updates the state."""
    while following.advance():
        if interrupted():
            break
    following.look()


def print_steps(
    following: live.Following,
    say: Callable[[str], None],
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Prints one line a step, until the recording is over."""
    next_step = 0
    while True:
        # Asked before reading, so that the last data are read.
        is_over = over() or following.abandoned
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
    """The whole terminal, redrawn twice a second in one write."""

    def __init__(
        self,
        following: live.Following,
        over: Callable[[], bool] = lambda: False,
        program: Callable[[], str] = lambda: "",
    ) -> None:
        """`over`: whether the program has ended. `program`: its last line of output."""
        self._following, self._over, self._program = following, over, program
        self._paint = terminal.here(sys.stdout).paint
        encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
        self._encoding, self._fine = encoding, encoding.replace("-", "") == "utf8"
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._users: list[str] = []
        self._asked_driver = -_ASK_DRIVER_EVERY_S
        self._leaves = False

    def show(self) -> None:
        """Draws until `q`, or until the program has ended."""
        with _own_terminal(self._in, self._out) as wake:
            while not self._is_over():
                catch_up(self._following, lambda: self._is_disturbed(0, wake))
                self._draw()
                self._is_disturbed(0 if self._is_over() else _LOOK_EVERY_S, wake)

    def _is_over(self) -> bool:
        return self._leaves or self._over()

    def _is_disturbed(self, wait_s: float, wake: int) -> bool:
        """Whether a key or a resize came within that time. Remembers the key to leave."""
        key = self._key(wait_s, wake)
        self._leaves = self._leaves or key == "q"
        return key != ""

    def _key(self, wait_s: float, wake: int) -> str:
        """The key pressed within that time, or "resize" if the terminal changed its size."""
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
        """The GPUs' users. The driver is asked only now and then, because it takes a while."""
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
    """Writes all data. A terminal over ssh may take only a part at a time."""
    while data:
        data = data[os.write(file, data) :]


@contextlib.contextmanager
def _own_terminal(keys: int, picture: int) -> Iterator[int]:
    """Opens a second screen with unbuffered keys. Yields a pipe that reports resizes and Ctrl-C.

    Ctrl-C raises no exception, because Python drops exceptions in the middle of a finalizer.
    """
    before = termios.tcgetattr(keys)
    wake, signalled = os.pipe()
    os.set_blocking(signalled, False)

    def report(number: int, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(signalled, b"q" if number == signal.SIGINT else b".")

    replaced = {signal.SIGWINCH: signal.signal(signal.SIGWINCH, report)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        replaced[signal.SIGINT] = signal.signal(signal.SIGINT, report)
    try:
        tty.setcbreak(keys)
        write_all(picture, _ENTER.encode())
        yield wake
    finally:
        with contextlib.suppress(OSError):  # the terminal may be gone
            write_all(picture, _LEAVE.encode())
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        for number, handler in replaced.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(signalled)


# ---------------------------------------------------------------------- run --live


def run_live(arguments: Sequence[str], path: Path) -> int:
    """Runs `pytracer run` in a process of its own and shows what it records.

    Args:
        arguments: of `run`, with all that it needs to write to `path`.
        path: the file of the trace.

    Returns:
        The program's exit code.
    """
    command = [sys.executable, "-m", "pytracer", "run", *arguments]
    with contextlib.ExitStack() as stack:
        # The terminal sends Ctrl-C to both processes; only the program handles it.
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
    # Prints the program's output so far, and then its further output.
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
    """Waits for the recording to begin. None if the program ends without one."""
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            # An old file will be replaced.
            if status.st_size > 0 and status.st_mtime >= began - 1:
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
