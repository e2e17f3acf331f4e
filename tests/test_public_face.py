"""What a person meets who uses trace() at a prompt: refusals, one-line answers, tables."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import pytracer
from pytracer import errors, load, trace
from pytracer.cli import output
from pytracer.data._native import core


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters())


def train(model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()


@pytest.fixture
def traced() -> trace:
    model, optimizer = model_and_optimizer()
    with trace(model, optimizer, devices="cpu", table=False) as t:
        train(model, optimizer, 2)
    return t


MODEL, OPTIMIZER = model_and_optimizer()


@pytest.mark.parametrize(
    ("target", "it_is"),
    [
        ([MODEL, OPTIMIZER], "of type list"),
        ({"model": MODEL}, "of type dict"),
        (None, "of type NoneType"),
        ("model", "of type str"),
        (MODEL.parameters(), "of type generator"),
        (torch.ones(3), "of type Tensor"),
        (torch.nn.Linear, "a class"),
        (torch.optim.SGD, "a class"),
    ],
)
def test_what_is_neither_model_nor_optimizer_is_refused_at_once(target: Any, it_is: str) -> None:
    wanted = r"models and optimizers, one by one, as in trace\(model, optimizer\).* " + it_is
    with pytest.raises(errors.UsageError, match=wanted):
        trace(target)
    with pytest.raises(errors.UsageError, match=wanted):
        trace(MODEL, target)


def test_an_optimizer_that_is_not_torchs_is_one_all_the_same() -> None:
    class Own:
        param_groups, state = OPTIMIZER.param_groups, {}

    with trace(MODEL, Own(), devices="cpu", table=False) as t:
        train(MODEL, OPTIMIZER)
    assert t.peak.by_category["weights"] > 0


def test_a_decorator_without_its_parentheses_says_so() -> None:
    with pytest.raises(errors.UsageError, match=r"write @trace\(\)"):

        @trace
        def step() -> None: ...


def test_what_runs_after_its_call_cannot_be_decorated() -> None:
    """The trace would be over before the body begins, with nothing in it."""

    def batches() -> Iterator[int]:
        yield 1

    async def serve() -> None: ...

    for function in (batches, serve):
        with pytest.raises(errors.UsageError, match="with trace"):
            trace(devices="cpu")(function)


def test_a_folder_that_goes_away_between_two_cycles_does_not_end_the_training(
    tmp_path: Path,
) -> None:
    model, optimizer = model_and_optimizer()
    folder = tmp_path / "runs"
    folder.mkdir()
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with trace(
        model,
        optimizer,
        devices="cpu",
        table=False,
        schedule=schedule,
        path=folder / "run.pytrace",
    ) as t:
        train(model, optimizer, 3)
        shutil.rmtree(folder)
        with pytest.warns(RuntimeWarning, match="Recorded in memory"):
            train(model, optimizer, 3)
    assert len(t.allocations()) > 0


def test_a_trace_that_cannot_be_saved_leaves_the_one_that_it_would_have_replaced(
    tmp_path: Path, traced: trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = traced.save(tmp_path / "run.pytrace")
    before = path.read_bytes()
    whole = core.write_file

    def ends_early(path: bytes, columns: dict[str, Any], overwrite: bool) -> None:
        whole(path, columns, overwrite)
        os.truncate(path, 100)
        raise core.FileError(f"{os.fsdecode(path)}: no room is left on the device")

    monkeypatch.setattr(core, "write_file", ends_early)
    with pytest.raises(errors.CannotWrite, match=r"/run\.pytrace: no room"):
        traced.save(path, overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_prompt_shows_one_line(tmp_path: Path) -> None:
    t = trace(MODEL, devices="cpu", table=False)
    assert repr(t) == "<pytracer.trace: not started>"
    with t:
        train(MODEL, OPTIMIZER)
        assert repr(t) == "<pytracer.trace: recording>"
    events = len(t.data.events.ticks)
    assert repr(t).startswith("<pytracer.trace: peak ")
    assert repr(t).endswith(f" B on cpu, {events:,} events>")
    assert str(t.peak.bytes) in repr(t)
    again = repr(load(t.save(tmp_path / "t.pytrace")))
    assert again == repr(t).replace("trace:", "LoadedTrace:")


def test_several_keys_as_the_readme_has_them(traced: trace) -> None:
    assert traced.by(["module", "op"]).index.names == ["module", "op"]
    with pytest.raises(errors.UsageError, match=r'one list, as in by\(\["module", "op"\]\)'):
        traced.by("module", "op")  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="a key to group by; there is: module"):
        traced.by([])


def test_a_diff_with_a_file_says_how_to_load_it(traced: trace) -> None:
    with pytest.raises(errors.UsageError, match=r"'a.pytrace' is none: t.diff\(load\(file\)\)"):
        traced.diff("a.pytrace")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("save", "a.pytrace"),
        ("export_chrome_trace", "a.json"),
        ("export_memory_snapshot", "a.pickle"),
        ("export_html", "a.html"),
    ],
)
def test_what_would_replace_a_file_says_how_in_python(
    traced: trace, method: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text("mine")
    with pytest.raises(errors.CannotWrite) as refused:
        getattr(traced, method)(path)
    assert str(refused.value) == f"{path} exists; overwrite=True replaces it"
    assert path.read_text() == "mine"
    getattr(traced, method)(path, overwrite=True)
    assert path.read_bytes() != b"mine"


def test_a_file_to_record_into_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    path.write_text("mine")
    with (
        pytest.raises(errors.CannotWrite, match="delete it, or name another"),
        trace(devices="cpu", path=path, table=False),
    ):
        pass
    assert path.read_text() == "mine"


def test_each_call_of_a_traced_function_has_a_file_of_its_own(tmp_path: Path) -> None:
    """A decorated function never fails because it is called again, and replaces no file."""

    @trace(devices="cpu", path=tmp_path / "run.pytrace", table=False)
    def work(size: int) -> torch.Tensor:
        return torch.ones(size)

    (tmp_path / "run.2.pytrace").write_text("mine")
    for size in (256, 512, 1024, 2048):
        work(size)
        assert work.last.peak.bytes == 4 * size  # type: ignore[attr-defined]
    assert (tmp_path / "run.2.pytrace").read_text() == "mine"
    names = ("run.pytrace", "run.1.pytrace", "run.3.pytrace", "run.4.pytrace")
    peaks = [load(tmp_path / name).peak.bytes for name in names]
    assert peaks == [1024, 2048, 4096, 8192]
    assert len(list(tmp_path.iterdir())) == 5


def test_each_block_of_one_trace_has_files_of_its_own(tmp_path: Path) -> None:
    """Numbered on through the cycles of a schedule."""
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=2)
    t = trace(devices="cpu", path=tmp_path / "run.pytrace", schedule=schedule, table=False)
    for block in range(2):
        with t:
            for cycle in range(2):
                t.step()
                torch.ones(256 * (2 * block + cycle + 1))
                t.step()
    names = ("run.pytrace", "run.1.pytrace", "run.2.pytrace", "run.3.pytrace")
    peaks = [load(tmp_path / name).peak.bytes for name in names]
    assert peaks == [1024, 2048, 3072, 4096]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_that_was_refused_is_the_next_blocks_once_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "run.pytrace"
    path.write_text("mine")
    t = trace(devices="cpu", path=path, table=False)
    with pytest.raises(errors.CannotWrite), t:
        pass
    path.unlink()
    with t:
        torch.ones(10)
    assert [found.name for found in tmp_path.iterdir()] == ["run.pytrace"]


@pytest.mark.parametrize(
    "text", ["", "none", "-1", "1.5", "\N{SUPERSCRIPT TWO}", "9" * 5000], ids=lambda text: text[:5]
)
def test_a_rank_that_is_no_number_does_not_end_the_program(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, text)
    with trace(devices="cpu", table=False) as t:
        torch.ones(10)
    assert (t.data.meta["rank"], t.data.meta["world_size"]) == (0, 1)


def test_a_program_whose_folder_is_deleted_keeps_its_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    with trace(devices="cpu", stacks=True, table=False) as t:
        torch.ones(10)
        (tmp_path / "gone").rmdir()
    assert t.data.meta["directory"] == ""
    assert "test_public_face.py" in t.by("line").index[0]
    with (
        pytest.raises(errors.CannotWrite, match=r"^run\.pytrace"),
        trace(devices="cpu", path="run.pytrace", table=False),
    ):
        pass


@pytest.mark.parametrize("count", [0, -1, 2**63, 2**70, "5", 1.5])
def test_a_number_of_events_that_is_none_is_refused_at_once(count: Any) -> None:
    with pytest.raises(errors.UsageError, match=f"max_events is {count!r}; it must be"):
        trace(max_events=count)


def test_a_narrow_screen_leaves_out_what_says_least() -> None:
    model, optimizer = model_and_optimizer()
    total: Any = 0
    with trace(model, optimizer, devices="cpu", stacks=True, table=False) as t:
        for _ in range(5):
            total = total + model(torch.ones(64, 8)).square().mean()
            train(model, optimizer)
    with pd.option_context("display.width", 80, "display.max_columns", 0):
        found, steps, per = str(t.findings()), str(t.steps()), str(t.bytes_per_parameter())
    for column in ("kind", "bytes", "line", "module"):
        assert column in found.splitlines()[0]
    for column in ("peak_bytes", "growth_bytes", "optimizer_ns"):
        assert column in steps.splitlines()[0]
    for column in ("bytes", "per_parameter", "at_peak", "at_rest"):
        assert column in per.splitlines()[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_asking_for_cuda_where_there_is_none_is_told_at_the_start() -> None:
    t = trace(devices="cuda", table=False)
    with pytest.warns(RuntimeWarning, match="no CUDA device here") as told:
        t.__enter__()
    assert told[0].filename == __file__
    t.__exit__(None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trace(devices=("cpu", "cuda"), table=False):
            pass


def test_steps_are_counted_from_the_first_that_was_recorded() -> None:
    model, optimizer = model_and_optimizer()
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
    with trace(model, optimizer, devices="cpu", schedule=schedule, table=False) as t:
        train(model, optimizer, 6)
    assert list(t.steps().index) == [0, 1]


def test_steps_of_a_late_window_have_the_same_number_wherever_they_are_shown(
    traced: trace, tmp_path: Path
) -> None:
    traced.save(tmp_path / "early.pytrace")
    late = load(tmp_path / "early.pytrace")
    late.data.meta["first_step"] = 40
    number = 40 + (late.peak.step or 0)
    page, chrome = tmp_path / "late.html", tmp_path / "late.json"
    late.export_html(page)
    late.export_chrome_trace(chrome)
    assert f"   step {number}, " in late.table()
    assert f", step {number}, " in page.read_text()
    assert f">step {number}<" in page.read_text()
    events = json.loads(chrome.read_text())["traceEvents"]
    shown = {event["name"] for event in events if str(event.get("name")).startswith("step ")}
    assert f"step {number}" in shown
    assert "step 0" not in shown
    assert output.summary_document(late)["peak"]["step"] == number


def test_every_key_of_the_meta_document_is_documented(traced: trace, tmp_path: Path) -> None:
    """Of a recording, of one read back from a snapshot, and no key that nobody writes or reads."""
    text = (Path(__file__).parents[1] / "docs" / "trace-format.md").read_text()
    table = text.partition("## The meta document")[2].partition("\n## ")[0]
    cells = (line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    documented = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    snapshot = tmp_path / "step.pickle"
    traced.export_memory_snapshot(snapshot)
    written = traced.data.meta.keys() | load(snapshot).data.meta.keys()
    assert written <= documented
    in_a_job = {"sharding", "communication", "clock_readings"}
    assert documented - written == {"cost", "first_step", "ended_by", *in_a_job}


def test_dir_shows_what_there_is() -> None:
    assert {"trace", "load", "__version__"} <= set(dir(pytracer))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"device": "cuda"}, "no option 'device'; did you mean 'devices'?"),
        ({"stack": True}, "no option 'stack'; did you mean 'stacks'?"),
        ({"colour": True}, "no option 'colour'; it has detail, stacks,"),
    ],
)
def test_an_option_that_does_not_exist_gets_a_sentence(option: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.UsageError, match=re.escape(says)):
        pytracer.trace(**option)
