"""Runs one of PyTorch's own test files, untraced or traced, for tools/torch_tests.py.

    python tools/run_torch_tests.py FILE MODE OUT [TEST ...]

Each test's body is a block of its own. The modes differ only in the context that the block enters.
A line of JSON goes to OUT when a test begins and another when it ends, so that a crash loses only
one test: tests with an outcome in OUT are not run again.
"""

import contextlib
import importlib
import json
import os
import random
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

UNTRACED, WHOLE = "untraced", "one trace"
CONTROL = "hooks of the identity"  # hooks of torch, without a trace
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "category": {"detail": "category"},
    "stacks": {"stacks": True},
    "hooks": {"saved_tensors": "hooks"},
    WHOLE: {},
}


class Journal:
    """The file of lines: the outcome of each test, and which one was running."""

    def __init__(self, path: Path) -> None:
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.running = ""
        self.ended = False
        for line in path.read_text().splitlines() if path.exists() else ():
            self._read(json.loads(line))

    def _read(self, row: dict[str, Any]) -> None:
        self.ended |= "end" in row
        if "begin" in row:
            self.running = row["begin"]
        elif "test" in row:
            self.outcomes[row["test"]] = row
            self.running = ""


class Writing(unittest.TestResult):
    """Writes each outcome down as it comes."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self._out = out
        self._begun = 0.0
        self._said = False

    def write(self, **row: Any) -> None:
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()

    def _say(self, test: Any, outcome: str, why: str = "") -> None:
        self._said = True
        seconds = round(time.monotonic() - self._begun, 3)
        self.write(test=name_of(test), outcome=outcome, why=why[:300], seconds=seconds)

    def startTest(self, test: Any) -> None:  # noqa: N802 - unittest's names
        super().startTest(test)
        self._begun, self._said = time.monotonic(), False
        self.write(begin=name_of(test))

    def stopTest(self, test: Any) -> None:  # noqa: N802
        super().stopTest(test)
        if not self._said:  # its subtests have failed
            self._say(test, "failed", "a subtest")

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._say(test, "passed")

    def addFailure(self, test: Any, error: Any) -> None:  # noqa: N802
        self._say(test, "failed", last_words(error))

    def addError(self, test: Any, error: Any) -> None:  # noqa: N802
        self._say(test, "failed", last_words(error))

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._say(test, "skipped", reason)

    def addExpectedFailure(self, test: Any, error: Any) -> None:  # noqa: N802
        self._say(test, "failed as expected")

    def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802
        self._say(test, "passed unexpectedly")


def last_words(error: Any) -> str:
    return f"{error[0].__name__}: {error[1]}".strip().partition("\n")[0]


def name_of(test: Any) -> str:
    """Returns TestClass.test_name, without the name of the file."""
    if isinstance(test, unittest.TestCase):
        return f"{type(test).__qualname__}.{test._testMethodName}"
    return str(test)  # setUpClass (...)


def blocks(mode: str) -> tuple[Any, Callable[[], Any]]:
    """Returns the contexts to enter around the whole run and around each test's body."""
    if mode == UNTRACED:
        return contextlib.nullcontext(), contextlib.nullcontext
    if mode == CONTROL:
        return contextlib.nullcontext(), hooks_of_the_identity
    from pytracer import trace

    if mode == WHOLE:
        return trace(table=False), contextlib.nullcontext
    return contextlib.nullcontext(), lambda: trace(table=False, **MODES[mode])


def hooks_of_the_identity() -> Any:
    """Returns saved-tensor hooks that change nothing, to see the effects of torch's hooks alone."""
    from torch.autograd.graph import saved_tensors_hooks

    return saved_tensors_hooks(lambda saved: saved, lambda packed: packed)


def flatten(suite: Any) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


def make_traced(test: unittest.TestCase, block: Callable[[], Any]) -> None:
    call: Any = test._callTestMethod  # type: ignore[attr-defined]

    def within_the_block(method: Any) -> Any:
        seed()
        with block():
            return call(method)

    test._callTestMethod = within_the_block  # type: ignore[attr-defined]


def seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what the tests use
    torch.manual_seed(0)


def load(file: Path) -> unittest.TestSuite:
    """Loads a file's tests. It can import its neighbours, and those of the folder of all tests."""
    sys.argv = [str(file)]
    sys.path[:0] = [str(file.parent), os.getcwd()]  # noqa: PTH109
    module = importlib.import_module(file.stem)
    return unittest.TestLoader().loadTestsFromModule(module)


def main(file: str, mode: str, out: str, *only: str) -> None:
    journal = Journal(Path(out))
    tests = list(flatten(load(Path(file))))
    with contextlib.suppress(ImportError):
        # The first record_function imports it, and a profile with stacks then reads freed names.
        importlib.import_module("torch.profiler._cupti_monitor")
    if only:
        tests = [test for test in tests if name_of(test) in only]
    left = [test for test in tests if name_of(test) not in journal.outcomes]
    around, block = blocks(mode)
    for test in left:
        make_traced(test, block)
    with Path(out).open("a") as stream:
        result = Writing(stream)
        with around:
            unittest.TestSuite(left).run(result)
        result.write(end=True, tests=len(tests))
        stream.flush()
        os._exit(0)  # threads and objects of the tests must not keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
