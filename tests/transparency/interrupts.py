"""Ctrl-C at every line of pytracer's own Python, one interrupt a run, and what became of it.

Where Ctrl-C arrives is chance. A trace function makes it certain: it raises KeyboardInterrupt at
one line of a file of pytracer's, the n-th time that it runs. Each place gets a process of its own,
forked from one that has imported everything and run nothing: so no interrupt can spoil the next one.
"""

import collections
import functools
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import pytracer
from tests.transparency.observe import native_threads, registries

OURS = f"{Path(pytracer.__file__).parent}{os.sep}"
SECONDS = 60  # for one run; more is a hang
Program = Callable[["Interrupter"], None]
Place = tuple[str, int]  # a line, and how often it has run before


class Interrupter:
    """A trace function that counts lines of these files, or raises at one of them.

    Which line is a place: its name, and how often it has run before. Then frames of other code are
    left alone, which makes a run three times as fast.
    """

    def __init__(self, place: Place | None = None, files: str = OURS) -> None:
        self.raised: KeyboardInterrupt | None = None
        self.lines: list[tuple[CodeType, int]] = []  # that have run
        self._line, self._before = place or ("", 0)
        self._files = files
        self._looked_at: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        wanted = self._looked_at.get(code)
        if wanted is None:
            wanted = self._looked_at[code] = self._is_wanted(code)
        return self.line if wanted else None

    def _is_wanted(self, code: CodeType) -> bool:
        if not self._line:
            return code.co_filename.startswith(self._files)
        numbers = {number for _, _, number in code.co_lines() if number is not None}
        return any(name_of((code, number)) == self._line for number in numbers)

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            line = frame.f_code, frame.f_lineno
            if not self._line:
                self.lines.append(line)
            elif name_of(line) == self._line:
                self._before -= 1
                if self._before < 0:
                    self.raised = KeyboardInterrupt("injected")
                    raise self.raised
        return self.line


def name_of(line: tuple[CodeType, int]) -> str:
    code, number = line
    return f"{code.co_filename.removeprefix(OURS)}:{number} in {code.co_name}"


def places_of(program: Program, files: str = OURS) -> list[Place]:
    """Which lines of these files run, in order."""

    def count() -> list[str]:
        interrupter = Interrupter(files=files)
        run(program, interrupter)
        return [name_of(line) for line in interrupter.lines]

    gc.collect()
    gc.freeze()  # children collect only what is theirs
    status, lines = in_a_child(count)
    assert status == 0, (status, lines)
    ran: collections.Counter[str] = collections.Counter()
    places = []
    for line in lines:
        places.append((line, ran[line]))
        ran[line] += 1
    return places


def outcomes(program: Program, chosen: Iterable[Place], files: str = OURS) -> dict[str, list[str]]:
    """What went wrong, by the line that was interrupted; nothing is good news."""
    found: dict[str, list[str]] = {}
    for place in chosen:
        status, problems = in_a_child(lambda place=place: problems_of(program, place, files))
        if status != 0:
            problems = [f"ended by {status}: {problems}"]
        if problems:
            found[place[0]] = problems
    return found


def problems_of(program: Program, place: Place, files: str) -> list[str]:
    before, threads = registries(), native_threads()
    interrupter = Interrupter(place, files)
    arrived = run(program, interrupter)
    if interrupter.raised is None:
        return []  # in this run the line ran less often; that is no fault
    problems = []
    if arrived is not interrupter.raised:
        problems.append(f"what arrived is {arrived!r}")
    elif arrived is not None:
        arrived.__traceback__ = None
    problems += left_behind(before)
    problems += ["a thread is still running"] * (native_threads() > threads)
    try:
        problems += [f"the next trace {problem}" for problem in wrong_with_a_trace()]
    except BaseException as error:
        problems.append(f"the next trace raised {error!r}")
    return problems


def run(program: Program, interrupter: Interrupter) -> BaseException | None:
    """What comes out of the program."""
    sys.settrace(interrupter)
    try:
        program(interrupter)
    except BaseException as error:
        return error
    finally:
        sys.settrace(None)
    return None


def left_behind(before: dict[str, Any]) -> list[str]:
    gc.collect()
    after = registries()
    return [f"{name} stays changed" for name in before if before[name] != after[name]]


def wrong_with_a_trace() -> list[str]:
    model = torch.nn.Linear(4, 4)
    with pytracer.trace(model, table=False) as recorded:
        model(torch.ones(2, 4)).sum().backward()
        inside = torch.empty(1001)
    del inside
    data = recorded.data
    sizes = data.events.bytes.tolist()
    names = set(data.strings)
    wrong = {
        "did not see an allocation": 4004 not in sizes,
        "did not see the module": "Linear" not in names,
        "lost something": data.losses != {},
        "has errors": data.meta["callback_errors"] != 0,
    }
    return [text for text, is_so in wrong.items() if is_so]


def in_a_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """The exit status of a forked child (or minus a signal), and what it returned or raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_end(work, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(text) if text else None


def _work_and_end(work: Callable[[], Any], writing: int) -> None:
    status = 1
    try:
        signal.alarm(SECONDS)
        result = work()
        status = 0
    except BaseException:
        result = traceback.format_exc()
    finally:
        with os.fdopen(writing, "w") as pipe:
            json.dump(result, pipe)
        os._exit(status)


# -------------------------------------------------------------------------- the programs


def train(*, options: dict[str, Any], looks: bool) -> None:
    """Enters a trace, trains for two steps, may look at it meanwhile, and leaves."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytracer.trace(model, optimizer, table=False, **options) as recorded:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        if looks:
            recorded.summary()
            str(recorded)


def two_steps(_: Interrupter, **options: Any) -> None:
    train(options=options, looks=False)


def two_steps_into_a_file(_: Interrupter) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pytrace"
        try:
            train(options={"path": path}, looks=False)
        finally:
            if path.exists():
                pytracer.load(path)


def two_steps_and_a_look(_: Interrupter) -> None:
    train(options={}, looks=True)


def models_that_die(_: Interrupter) -> None:
    """What is forgotten of the dead is forgotten in callbacks, out of which nothing comes."""
    with pytracer.trace(table=False):
        for _ in range(2):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            del model, optimizer
            gc.collect()


def first_optimizer(_: Interrupter) -> None:
    """The first optimizer of a process imports torch._dynamo."""
    torch.optim.AdamW([torch.ones(1, requires_grad=True)])


def first_optimizer_in_a_trace(interrupter: Interrupter) -> None:
    with pytracer.trace(table=False):
        first_optimizer(interrupter)


PROGRAMS: dict[str, Program] = {
    "two steps": two_steps,
    "category": functools.partial(two_steps, detail="category"),
    "stacks": functools.partial(two_steps, stacks=True),
    "hooks": functools.partial(two_steps, saved_tensors="hooks"),
    "into a file": two_steps_into_a_file,
    "a look meanwhile": two_steps_and_a_look,
    "models that die": models_that_die,
}


def each_line(places: list[Place], times: int) -> list[Place]:
    """Each line at the last time it ran, and the first ones; at every time if `times` is 0."""
    if not times:
        return places
    last = dict(places)
    return [(line, before) for line, before in places if before < times - 1 or before == last[line]]


def interrupted(name: str, times: int, share: int, shares: int) -> tuple[int, dict[str, list[str]]]:
    """At how many places a program was interrupted, and what went wrong.

    What is as in the plain program while somebody looks is interrupted there only.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    if name == "a look meanwhile":
        import pandas as pd  # noqa: F401 - its import, too, would take most of the time
    places = each_line(places_of(PROGRAMS[name]), times)
    plain = dict(places_of(two_steps)) if name == "a look meanwhile" else {}
    chosen = [place for place in places if place[0] not in plain][share::shares]
    return len(chosen), outcomes(PROGRAMS[name], chosen)


def interrupted_imports(times: int) -> list[dict[str, list[str]]]:
    """The same at lines of torch._dynamo while it is imported, untraced and traced."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dynamo = f"{Path(torch.__file__).parent / '_dynamo'}{os.sep}"
    places = places_of(first_optimizer, dynamo)
    chosen = places[:: max(len(places) // times, 1)]
    programs = (first_optimizer, first_optimizer_in_a_trace)
    return [outcomes(program, chosen, dynamo) for program in programs]
