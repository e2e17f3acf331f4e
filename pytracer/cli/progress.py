"""What a command does now, on the terminal, if it takes longer than two seconds.

The line is on stderr and only on a terminal. It says what is done, how much of it if the work tells
that, and for how long. It is gone when the work is over.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pytracer.basics import share_done
from pytracer.basics.units import time_text

_PATIENCE_S = 2.0
_EVERY_S = 1.0
_BAR = 20  # columns
_ERASED = "\r\x1b[K"


class _Line:
    """The line on the terminal, which a thread draws anew each second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing: list[tuple[str, float]] = []  # the last is what is done now
        self._over = threading.Event()
        self._is_drawn = False

    def begin(self, doing: str) -> None:
        """Adds what is done now. The first one starts the thread."""
        share_done.tell(0)
        with self._lock:
            self._doing.append((doing, time.monotonic()))
            if len(self._doing) > 1:
                return
            self._over = threading.Event()
        thread = threading.Thread(target=self._draw_on, args=(self._over,), daemon=True)
        with suppress(RuntimeError):  # Python 3.12 starts no thread while it ends
            thread.start()

    def end(self) -> None:
        """Removes what was done last, and the line."""
        share_done.tell(0)
        with self._lock:
            self._doing.pop()
            self._erase()
            if not self._doing:
                self._over.set()

    def hide(self) -> None:
        """Makes room for other output."""
        with self._lock:
            self._erase()

    def _draw_on(self, over: threading.Event) -> None:
        wait_s = _PATIENCE_S
        while not over.wait(wait_s):
            wait_s = _EVERY_S
            with self._lock:
                if self._doing and not over.is_set():
                    self._draw(*self._doing[-1])

    def _draw(self, doing: str, since: float) -> None:
        from pytracer.export import terminal

        lasts = f" {_bar(share_done.told())}{time_text(int((time.monotonic() - since) * 1e9))}"
        room = terminal.here(sys.__stderr__).width - len(lasts) - 1
        text = f"pytracer: {doing} ..."
        self._write(f"{_ERASED}{text[:room]}{lasts}")
        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(_ERASED)
            self._is_drawn = False

    def _write(self, text: str) -> None:
        stream = sys.__stderr__
        with suppress(OSError, ValueError):  # the terminal may be gone
            if stream is not None:
                stream.write(text)
                stream.flush()


def _bar(share: float) -> str:
    full = int(share * _BAR)
    return f"[{'#' * full}{'-' * (_BAR - full)}] {share:.0%} " if share else ""


_LINE = _Line()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Says what is done inside, such as `planning`, if it takes longer than two seconds."""
    from pytracer.export import terminal

    if not terminal.is_terminal(sys.__stderr__):
        yield
        return
    _LINE.begin(what)
    try:
        yield
    finally:
        _LINE.end()


def hide() -> None:
    """Removes the line, before something else is printed."""
    _LINE.hide()
