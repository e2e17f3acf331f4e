"""Each sentence of docs/threads.md, by its words."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pytracer
from pytracer import errors

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "threads.md").read_text().split())


def says(sentence: str) -> Callable[[Any], Any]:
    """The page has the sentence that the test proves."""
    assert sentence in PAGE, sentence
    return lambda test: test


def a_trace(**options: Any) -> pytracer.trace:
    return pytracer.trace(devices="cpu", table=False, **options)


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    (result,) = found
    return result


def allocate(elements: int) -> None:
    torch.empty(elements)


def sizes(t: pytracer.trace) -> list[int]:
    """What was allocated of the sizes that only these tests use."""
    rows = t.allocations()
    return sorted(bytes_ for bytes_ in rows.requested_bytes.tolist() if bytes_ % 4096 == 2052)


ONE, TWO, THREE = 1537, 2561, 3585  # elements: of 4 bytes


@says("A trace records all threads of its process, whichever one began it.")
def test_all_threads_are_recorded() -> None:
    with a_trace() as t:
        in_a_thread(lambda: allocate(ONE))
        allocate(TWO)
    assert sizes(t) == [4 * ONE, 4 * TWO]
    assert len(set(t.allocations().thread.dropna())) == 2


@says("A trace may begin in any thread, and end in another.")
def test_a_trace_may_end_in_another_thread() -> None:
    t = a_trace()
    in_a_thread(t.__enter__)
    allocate(ONE)
    in_a_thread(lambda: t.__exit__(None, None, None))
    allocate(TWO)
    assert sizes(t) == [4 * ONE]


@says("Traces may be nested: the inner one has what happened inside it, the outer one has all.")
def test_nested_traces_have_each_their_own_time() -> None:
    with a_trace() as outer:
        allocate(ONE)
        with a_trace() as inner:
            allocate(TWO)
        allocate(THREE)
    assert sizes(inner) == [4 * TWO]
    assert sizes(outer) == [4 * ONE, 4 * TWO, 4 * THREE]


@says("Each counts its own steps.")
def test_nested_traces_count_their_own_steps() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with a_trace() as outer:
        step()
        with a_trace() as inner:
            step()
        step()
    assert (len(inner.steps()), len(outer.steps())) == (1, 3)


@says("They may overlap as well, and end in any order.")
def test_traces_may_overlap() -> None:
    first, second = a_trace(), a_trace()
    first.__enter__()
    allocate(ONE)
    second.__enter__()
    allocate(TWO)
    first.__exit__(None, None, None)
    allocate(THREE)
    second.__exit__(None, None, None)
    assert sizes(first) == [4 * ONE, 4 * TWO]
    assert sizes(second) == [4 * TWO, 4 * THREE]


@says("Two traces in two threads at the same time record both threads, each of them.")
def test_traces_of_two_threads_see_both() -> None:
    both_record, both_allocated = threading.Barrier(2), threading.Barrier(2)

    def work(elements: int) -> list[int]:
        with a_trace() as t:
            both_record.wait(60)
            allocate(elements)
            both_allocated.wait(60)
        return sizes(t)

    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, work(n))) for n in (ONE, TWO)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {ONE: [4 * ONE, 4 * TWO], TWO: [4 * ONE, 4 * TWO]}


@says("One trace is one block at a time: to enter it again while it records is a `CaptureError`.")
def test_a_trace_is_not_entered_twice() -> None:
    with a_trace() as t:
        with pytest.raises(errors.CaptureError, match="recording already"):
            in_a_block(t)
        allocate(ONE)
    assert sizes(t) == [4 * ONE]


def in_a_block(t: pytracer.trace) -> None:
    with t:
        pass


@says("After its block it may be entered again, and then has what came the second time.")
def test_a_trace_may_be_entered_again_later() -> None:
    t = a_trace()
    with t:
        allocate(ONE)
    with t:
        allocate(TWO)
    assert sizes(t) == [4 * TWO]


@says("While a trace records, views show what there is so far, from any thread.")
def test_views_while_recording_show_what_there_is_so_far() -> None:
    with a_trace() as t:
        allocate(ONE)
        assert sizes(t) == in_a_thread(lambda: sizes(t)) == [4 * ONE]
        allocate(TWO)
        assert sizes(t) == [4 * ONE, 4 * TWO]
    assert sizes(t) == [4 * ONE, 4 * TWO]


@says("A look may come while other threads allocate: it has a beginning of what the end has.")
def test_a_look_while_others_allocate_is_a_beginning() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            allocate(ONE)

    threads = [threading.Thread(target=work) for _ in range(3)]
    with a_trace() as t:
        for thread in threads:
            thread.start()
        looks = [len(t.allocations()) for _ in range(5)]
        stop.set()
        for thread in threads:
            thread.join()
    assert looks == sorted(looks)
    assert looks[-1] <= len(t.allocations())
    assert len(t.health()) == 0


@says("With `path=` the rows are in the file, and views while recording are a `CaptureError` that")
def test_views_of_a_trace_that_is_being_written_are_in_its_file(tmp_path: Path) -> None:
    with a_trace(path=tmp_path / "run.pytrace") as t:
        allocate(ONE)
        with pytest.raises(errors.CaptureError, match="load"):
            t.summary()
    assert sizes(t) == [4 * ONE]


@says("A finished trace never changes: any number of threads may ask it.")
def test_a_finished_trace_may_be_asked_by_many() -> None:
    with a_trace() as t:
        for _ in range(50):
            allocate(ONE)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(t.summary())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert all(answer.equals(answers[0]) for answer in answers)


# ---------------------------------------------------------------------- warnings


@says(
    "Warnings are Python's: where a program has called `logging.captureWarnings(True)` they go to"
)
def test_warnings_go_to_logging_where_the_program_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_trace() as t:
        allocate(ONE)
    whole = t.save(tmp_path / "run.pytrace")
    whole.write_bytes(whole.read_bytes()[:-40])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        try:
            pytracer.load(whole)
        finally:
            logging.captureWarnings(False)
    (record,) = [r for r in caplog.records if r.name == "py.warnings"]
    assert "run.pytrace" in record.getMessage()
    assert "test_threads.py" in record.getMessage(), "it names the program's line"
    assert capsys.readouterr().err == ""


@says("A filter of the program's is obeyed, and none is changed.")
def test_filters_of_the_program_are_obeyed(tmp_path: Path) -> None:
    with a_trace() as t:
        allocate(ONE)
    whole = t.save(tmp_path / "run.pytrace")
    whole.write_bytes(whole.read_bytes()[:-40])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with pytest.raises(RuntimeWarning, match=r"run\.pytrace"):
            pytracer.load(whole)
        warnings.simplefilter("ignore")
        pytracer.load(whole)
        warnings.filters[:] = before
        assert warnings.filters == before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@says("Further ones share the last number, and `t.health()` counts them.")
@pytest.mark.slow
@pytest.mark.ci
def test_more_threads_than_numbers_need_little_memory_and_are_counted(tmp_path: Path) -> None:
    """A thread per request: each allocates once, and 400 threads are beyond the last number."""
    count, path = 65_536 + 400, tmp_path / "run.pytrace"
    with pytracer.trace(devices="cpu", table=False, path=path):
        for number in range(count):
            if number == 1_000:
                before, start = _resident(), time.process_time()
            if number == 2_000:
                first = time.process_time() - start
            if number == count - 1_000:
                start = time.process_time()
            thread = threading.Thread(target=torch.empty, args=(64,))
            thread.start()
            thread.join()
        assert _resident() - before < 32 << 20
        assert time.process_time() - start < 5 * first
    t = pytracer.load(path)
    assert len(t.allocations()) == count
    assert t.data.losses["merged_threads"] >= 400
    assert "merged_threads" in t.health().index
    assert "threads beyond the first 65,535" in str(t)
