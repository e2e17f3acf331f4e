"""cuDNN in a process of its own, which answers questions about convolutions on a card that is not there.

It is the cuDNN of torch's own CUDA build, or that of `pip install "pytracer[cudnn]"`.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MEASURED = (91900,)  # the versions whose answers were held against a card
ADVICE = 'pip install "pytracer[cudnn]"'
_CHILD = Path(__file__).with_name("cudnn_child.py")
# These have the names of CUDA's driver and of cuBLASLt.
_STAND_INS = [str(Path(__file__).parents[1] / f"_{one}.so") for one in ("driver", "products")]
_LIBRARY = "libcudnn.so.9"
_SECONDS = 60  # for an answer, of which each takes milliseconds


class Cudnn:
    """A process that has loaded cuDNN."""

    def __init__(self, library: Path, child: Path = _CHILD) -> None:
        """Starts nothing yet.

        Args:
            library: cuDNN's library.
            child: the program that asks it.
        """
        self.path = library
        self._command = [sys.executable, "-I", "-S", str(child), str(library), *_STAND_INS]
        self._process: subprocess.Popen[str] | None = None
        self._answers: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.version = 0  # until it has started

    def start(self) -> bool:
        """Loads the library, and returns whether that worked.

        The process sees no card, because cuDNN's answers follow a card that it sees.
        """
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version = int(self._read().get("version", 0))
        return self.version > 0

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer, which is empty where cuDNN has none. The same question is asked once."""
        text = json.dumps(question)
        with self._lock:
            if text not in self._answers:
                self._answers[text] = self._asked(text)
            return self._answers[text]

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError), process:
                process.kill()

    def _asked(self, text: str) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            return {}
        try:
            self._process.stdin.write(f"{text}\n")
            self._process.stdin.flush()
        except OSError:  # it has ended
            self.close()
            return {}
        return self._read()

    def _read(self) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdout is None:
            return {}
        late = threading.Timer(_SECONDS, process.kill)
        late.start()
        line = process.stdout.readline()
        late.cancel()
        try:
            answer = json.loads(line)
        except ValueError:  # it has ended, or said something else
            self.close()
            return {}
        return answer if isinstance(answer, dict) else {}


def installed() -> Cudnn | None:
    """The cuDNN that is installed, if one is, and with it the compiler of its kernels."""
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or []) if found else []:
        file = Path(folder) / "lib" / _LIBRARY
        if file.is_file() and any(Path(folder).parent.glob("*/lib/libnvrtc.so.*")):
            return Cudnn(file)
    return None
