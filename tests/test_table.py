"""The one screen, exactly as people see it, at fixed widths."""

import inspect
import re
import textwrap
from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given

from pytracer.analysis.facts import usage
from pytracer.basics.units import size_text, time_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORY_ORDER
from pytracer.export import job_text, table, words
from pytracer.export.table import render
from pytracer.export.terminal import Terminal
from tests.test_analysis_categories import programs
from tests.trace_builder import TraceBuilder, training_step

MIB = 2**20


def golden(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def training(*, steps: int = 2, device: str = "cpu") -> TraceBuilder:
    b = TraceBuilder()
    weight = b.seed(3 * MIB)
    b.label(weight, "weights", "parameter", "h.0.weight", "786432", "float32")
    for name in ("exp_avg", "exp_avg_sq"):
        b.label(b.seed(3 * MIB), "optimizer_state", name, "h.0.weight", "786432", "float32")
    for _ in range(steps):
        training_step(b, weight, layers=4, activation=5 * MIB)
    return b


def test_a_training_run() -> None:
    assert render(training().trace()) == golden("""
peak 37.0 MiB on cpu   step 0, in backward, 54.0 us after the start

  weights           3.00 MiB    8.1%  ██████
  gradients         3.00 MiB    8.1%  ██████
  optimizer_state   6.00 MiB   16.2%  █████████████
  activations       20.0 MiB   54.1%  ██████████████████████████████████████████
  temporaries       5.00 MiB   13.5%  ██████████
  inputs               100 B    0.0%
  unknown                0 B    0.0%

modules   h.* 37.0 MiB
lines     train.py:9 28.0 MiB, train.py:10 4 B
a step    forward 41.0 us, backward 33.0 us, optimizer 5.00 us
trade     The 4 modules h.* hold 20.0 MiB of activations: torch.utils.checkpoint
          on them keeps only their inputs.
recorded  92 events, 50 scopes
""")


def test_nothing_recorded() -> None:
    assert render(TraceBuilder().trace()) == golden("""
empty     no allocation was seen: is the model there? devices= says where
""")


def test_two_devices_something_lost_something_unknown() -> None:
    b = TraceBuilder()
    b.meta["own_time"] = {"ticks": 135, "ns": 0, "of_ticks": 1000, "waited_ns": 0}
    b.losses["lost_alloc"] = 1234
    b.alloc(5000)
    b.seed(3 * MIB, device="cuda:0")
    with b.module("model"), b.op("aten::mm"):
        b.free(b.alloc(MIB, device="cuda:0"))
    assert render(b.trace(), terminal=Terminal(72)) == golden("""
peak 4.00 MiB on cuda:0   step 0, in forward, 5.00 us after the start
also 4.88 KiB on cpu

  weights                0 B    0.0%
  gradients              0 B    0.0%
  optimizer_state        0 B    0.0%
  activations            0 B    0.0%
  temporaries       1.00 MiB   25.0%  ███████████
  unknown           3.00 MiB   75.0%  ██████████████████████████████████

modules   model 1.00 MiB
lost      1,234 lost_alloc: alloc events did not fit into the recording.
          Raise max_events, trace fewer steps, or write to a file with
          path=.
recorded  4 events, 2 scopes
""")


def test_what_recording_took_is_shown_only_where_it_is_known() -> None:
    """One in 61 calls is timed: of a few calls nothing follows, nor of a file that was cut."""

    def last_line(steps: int, own_ticks: int, status: str = "complete") -> str:
        b = training(steps=steps)
        b.meta["own_time"] = {
            "ticks": own_ticks - 5_000,
            "ns": 5_000,
            "of_ticks": 2_000_000,
            "waited_ns": 500_000,
        }
        trace = replace(b.trace(), file_report={"status": status})
        return render(trace).splitlines()[-1]

    assert (
        last_line(20, 15_000)
        == "recorded  866 events, 500 scopes, in about 15.0 us of CPU time (1.0%)"
    )
    assert last_line(2, 15_000) == "recorded  92 events, 50 scopes"
    assert last_line(20, 0) == "recorded  866 events, 500 scopes"
    assert last_line(20, 15_000, "truncated") == "recorded  866 events, 500 scopes"


@given(programs)
def test_the_quick_look_at_a_window_finds_the_peak(trace: Trace) -> None:
    peak = usage.peak(trace)
    found = usage.highest_of_all(trace)
    assert found.device == peak.device
    assert (found.bytes, found.step) == (peak.bytes, peak.step or 0)


def test_memory_ran_out() -> None:
    b = training(steps=1)
    with b.module("model"), b.op("aten::mm", grad=True):
        b.oom(10**12)
    assert "note      An allocation of 931 GiB failed.\n" in render(b.trace())


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/usr/lib/python3.12/heapq.py", "heapq.py"),
        ("/venv/lib/python3.12/site-packages/transformers/activations.py", "transformers/activations.py"),
        ("/usr/lib/python3/dist-packages/timm/layers/mlp.py", "timm/layers/mlp.py"),
        ("/home/user/.venv/lib/python3.12/site-packages/timm/mlp.py", "timm/mlp.py"),
        ("/home/user/src/train.py", "src/train.py"),
        ("/data/projects/someone/library/src/models/mlp.py", ".../models/mlp.py"),
        ("/data/train.py", "/data/train.py"),
        ("/data/users/somebody/train.py", "/data/users/somebody/train.py"),
    ],
)  # fmt: skip
def test_the_file_and_number_of_a_line_can_be_read_wherever_the_file_is(
    path: str, shown: str
) -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", at=("/home/user/train.py:7", f"{path}:66")):
        b.alloc(12 * MIB)
    assert f"lines     {shown}:66 12.0 MiB\n" in render(b.trace())


def test_a_name_that_is_too_long_keeps_its_end() -> None:
    b = TraceBuilder()
    with b.module("model"), b.op("aten::mm", at=(f"/home/user/{'deep/' * 20}mlp.py:66",)):
        b.alloc(12 * MIB)
    (line,) = [
        each for each in render(b.trace(), Terminal(60)).splitlines() if each.startswith("lines")
    ]
    assert line.startswith("lines     ...")
    assert line.endswith("/deep/mlp.py:66 12.0 MiB")
    assert len(line) == 60


def test_the_children_of_a_sequential_are_told_apart() -> None:
    def table(*names: str) -> str:
        b = TraceBuilder()
        for size, name in enumerate(names, 1):
            with b.module(name), b.op("aten::mm"):
                b.alloc(size * MIB)
        return render(b.trace())

    assert "modules   [4] 3.00 MiB, [2] 2.00 MiB, [0] 1.00 MiB\n" in table("0", "2", "4")
    many = [str(number) for number in range(12)]
    assert "modules   [0 ... 11] 78.0 MiB\n" in table(*many)
    assert "modules   h.* 3.00 MiB\n" in table("h.0", "h.1")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("make", [training, TraceBuilder])
def test_no_line_is_wider_than_asked(make, width: int) -> None:
    lines = render(make().trace(), Terminal(width)).splitlines()
    assert max(map(len, lines)) <= width


def test_colour_changes_nothing_but_colour() -> None:
    trace: Trace = training().trace()
    coloured = render(trace, Terminal(color=True))
    assert "\x1b[" in coloured
    plain = coloured
    for code in ("0", "1", "2", *range(31, 38)):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain == render(trace)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (999 * 1024, "999 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (5000 * 2**40, "5000 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_have_three_digits(amount: int, text: str) -> None:
    assert size_text(amount) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 us"),
        (999_499, "999 us"),
        (999_600, "1.00 ms"),
        (61 * 10**9, "61.0 s"),
    ],
)
def test_times_have_three_digits(nanoseconds: int, text: str) -> None:
    assert time_text(nanoseconds) == text


def test_every_word_on_the_screen_is_explained() -> None:
    assert tuple(words.CATEGORIES) == CATEGORY_ORDER
    legend = words.legend(terminal=Terminal(72))
    assert max(len(line) for line in legend.splitlines()) <= 72
    for word in ("functional", "workspaces", "own_peak", "scopes", "events"):
        assert re.search(rf"^  {word} ", legend, re.MULTILINE)


def test_every_label_of_every_kind_of_screen_is_explained() -> None:
    explained = {line[2:18].strip() for line in words.legend(of_jobs=True).splitlines()}
    told = (
        "imagined",
        "empty",
        "file",
        "steps",
        "also",
        "NOT KNOWN",
    )  # a sentence that explains itself
    for text in _sources(table, job_text):
        assert text in explained or text in told, f"{text!r} is on a screen and not in --words"


def _sources(*modules: ModuleType) -> set[str]:
    """The labels that these modules write before a paragraph."""
    label = re.compile(r'(?:paragraph|_listed)\(\s*"([^"]+)"|_most\([^"]*"([^"]+)"')
    return {a or b for module in modules for a, b in label.findall(inspect.getsource(module))}


def test_beside_a_table_only_its_own_categories_are_explained() -> None:
    legend = words.legend(["weights", "unknown"])
    assert "weights" in legend
    assert "graph_pools" not in legend
