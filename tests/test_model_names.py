"""A module has one name, in every table, page and file; with several models its class comes first."""

import gzip
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from pytracer import load, trace
from pytracer.cost import per_module
from pytracer.data import model_names
from pytracer.data.recorded import Trace
from pytracer.export.live import Following
from pytracer.reading.views import LoadedTrace, Views
from tests.trace_builder import TraceBuilder

WIDTH = 64


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Critic(Generator):
    pass


def gan(*, critic: bool = True, path: Path | None = None) -> trace:
    """Three iterations of a GAN, or of its generator alone."""
    torch.manual_seed(0)
    made, judges = Generator(), Critic()
    updates = [torch.optim.Adam(each.parameters()) for each in (judges, made)]
    loss = nn.MSELoss()
    with trace(table=False, devices="cpu", path=path) as t:
        for _ in range(3):
            fake = made(torch.randn(32, WIDTH))
            if critic:
                loss(judges(fake.detach()), torch.zeros(32, WIDTH)).backward()
                updates[0].step()
                updates[0].zero_grad()
            loss(judges(fake) if critic else fake, torch.ones(32, WIDTH)).backward()
            updates[1].step()
            updates[1].zero_grad()
    return t


def sequential() -> trace:
    """A model that is a Sequential: its children have only numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with trace(table=False, devices="cpu") as t:
        for _ in range(2):
            model(torch.randn(32, WIDTH)).mean().backward()
    return t


@pytest.fixture(scope="module")
def several() -> trace:
    return gan()


@pytest.fixture(scope="module")
def bare() -> trace:
    return sequential()


def paths(t: Views) -> set[str]:
    """All modules that a trace's tables name, and those of the tensors' names."""
    rows = t.allocations()
    names = rows.name.dropna().unique()
    named = {model_names.module_text(name).rpartition(".")[0] for name in names}
    return {*rows.module.dropna(), *rows.forward_module.dropna(), *named} - {""}


# ---------------------------------------------------------------- several models


def test_with_several_models_every_path_begins_with_a_class(several: trace) -> None:
    assert paths(several) <= {"Generator", "Critic", "MSELoss"} | {
        f"{model}.body{child}"
        for model in ("Generator", "Critic")
        for child in ("", ".0", ".1", ".2")
    }
    line = next(line for line in str(several).splitlines() if line.startswith("modules"))
    assert re.fullmatch(r"modules +(Critic|Generator)\.body\.\* \S+ KiB, .*", line)
    assert {"Critic.body.0", "Generator.body.2"} <= {*several.by("module").index}


def test_a_loss_is_no_second_model() -> None:
    alone = gan(critic=False)
    assert {"body.0", "body.2"} <= paths(alone)
    assert paths(alone) <= {"Generator", "MSELoss", "body", "body.0", "body.1", "body.2"}


def test_a_model_without_parameters_is_plain_if_it_is_alone_and_has_its_class_beside_another() -> (
    None
):
    scaling = nn.Sequential(nn.Tanh(), nn.Softplus())
    model = Generator()
    x = torch.randn(32, WIDTH, requires_grad=True)
    with trace(table=False, devices="cpu") as alone:
        scaling(x).mean().backward()
    with trace(table=False, devices="cpu") as both:
        model(scaling(x)).mean().backward()
    assert "[0]" in paths(alone)
    assert {"Sequential.0", "Generator.body.0"} <= paths(both)


def test_a_model_that_runs_with_and_without_its_wrapper_is_one() -> None:
    model = Generator()
    wrapped = nn.DataParallel(model)
    with trace(table=False, devices="cpu") as t:
        model(torch.randn(8, WIDTH)).mean().backward()
        wrapped(torch.randn(8, WIDTH)).mean().backward()
    assert "body.0" in paths(t)
    assert not any("#2" in path or "DataParallel." in path for path in paths(t))


@pytest.mark.parametrize("alone", [True, False])
def test_costs_have_the_names_of_the_other_tables(alone: bool) -> None:
    """Otherwise neither a checkpoint plan nor a Chrome trace finds a module's cost."""
    models: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    models += [] if alone else [Generator()]
    with trace(cost=True, table=False, devices="cpu") as t:
        sum(model(torch.randn(32, WIDTH)).mean() for model in models).backward()  # type: ignore[union-attr]
    costs = {name for name in t.cost("module").index if not name.startswith("(")}
    assert ("[0]" if alone else "Sequential.0") in costs
    assert costs <= paths(t)
    assert costs <= {*per_module.per_call(t.data)}


def test_a_saved_a_streamed_and_a_loaded_trace_have_the_same_names(
    several: trace, tmp_path: Path
) -> None:
    loaded = load(several.save(tmp_path / "saved.pytrace"))
    assert loaded.by("module").equals(several.by("module"))
    assert load(loaded.save(tmp_path / "again.pytrace")).data.strings == loaded.data.strings
    gan(path=tmp_path / "streamed.pytrace")
    assert paths(load(tmp_path / "streamed.pytrace")) == paths(several)


@pytest.mark.ci
def test_a_killed_process_leaves_the_classes_too_and_watch_shows_them(tmp_path: Path) -> None:
    code = (
        "import os, signal, time, pathlib, pytracer\n"
        "from tests.test_model_names import *\n"
        "made, judges, x = Generator(), Critic(), torch.randn(512, WIDTH)\n"
        "t = trace(table=False, devices='cpu', path=pathlib.Path('killed.pytrace'))\n"
        "t.__enter__()\n"
        "judges(made(x)).mean().backward()\n"
        "torch.optim.SGD(made.parameters()).step()\n"
        "kept = made(x)\n"
        "time.sleep(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=False
    )
    following = Following(tmp_path / "killed.pytrace")
    while following.advance():
        pass
    following.look()
    with pytest.warns(RuntimeWarning, match=r"killed\.pytrace"):
        shown = paths(load(tmp_path / "killed.pytrace"))
    assert {"Generator.body.0", "Critic.body.0"} <= shown
    assert not any(path.startswith("body") for path in shown)
    live = {name for name, _ in following.modules()}
    assert live
    assert all(name.startswith(("Generator", "Critic")) for name in live)


def test_a_run_with_one_model_is_compared_with_a_run_with_several(several: trace) -> None:
    alone = gan(critic=False)
    for before, after in ((alone, several), (several, alone)):
        rows = before.diff(after, by="module").set_index("module")
        for child in ("Generator.body.0", "Generator.body.2"):
            assert rows.before[child] > 0
            assert rows.after[child] > 0
        assert not any(str(path).startswith("body") for path in rows.index)


def test_the_models_of_an_unchanged_gan_do_not_differ(several: trace, tmp_path: Path) -> None:
    again = gan()
    rows = several.diff(again, by=["category", "module"])
    assert not rows.change.any()


def test_the_code_of_a_plan_says_which_model_it_is_for() -> None:
    from pytracer.analysis.forecasts.checkpoint_plans import code_of

    roots = model_names.Roots(("Generator", "Critic"), plain="Generator")
    code = code_of(("Generator.body", "Critic.h.0", "Critic.h.1"), roots)
    assert 'for name in ["body"]:\n    # model: your Generator' in code
    assert 'for name in ["h.0", "h.1"]:\n    # model: your Critic' in code


# ---------------------------------------------------------------- a Sequential's children


def test_a_sequentials_child_is_spelled_alike_everywhere(bare: trace, tmp_path: Path) -> None:
    """In the table, the views, Chrome's and Perfetto's files, the report, the snapshot, Parquet."""
    assert {"[0]", "[1]", "[2]"} <= paths(bare) <= {"Sequential", "[0]", "[1]", "[2]"}
    assert "[0] " in next(line for line in str(bare).splitlines() if line.startswith("modules"))
    assert "[0]" in bare.by("module").index
    for texts_of in (_texts_of_chrome, _texts_of_perfetto, _texts_of_report, _texts_of_snapshot):
        texts = list(texts_of(bare, tmp_path))
        assert any(re.search(r"(^|\W)\[0\](\W|$)", text) for text in texts)
        assert not {"module 0", "module 2", "0 · aten::addmm", "2 · aten::addmm"} & {*texts}
    folder = bare.to_parquet(tmp_path / "tables")
    import pandas as pd

    assert {"[0]", "[2]"} <= {
        *pd.read_parquet(Path(folder) / "allocations.parquet").module.dropna()
    }


def _texts_of_chrome(t: trace, place: Path) -> Iterator[str]:
    t.export_chrome_trace(place / "run.json.gz")
    document = json.loads(gzip.decompress((place / "run.json.gz").read_bytes()))
    for event in document["traceEvents"]:
        yield str(event.get("name"))
        yield from (str(v) for k, v in event.get("args", {}).items() if k in ("module", "name"))


def _texts_of_perfetto(t: trace, place: Path) -> Iterator[str]:
    t.export_perfetto(place / "run.pftrace")
    for text in re.findall(rb"[ -~]+", (place / "run.pftrace").read_bytes()):
        yield text.decode()


def _texts_of_report(t: trace, place: Path) -> Iterator[str]:
    t.report(place / "run.html")
    page = (place / "run.html").read_text()
    yield from re.findall(r'"((?:[^"\\]|\\.)*)"', page)


def _texts_of_snapshot(t: trace, place: Path) -> Iterator[str]:
    t.export_memory_snapshot(place / "run.pickle")
    document = pickle.loads((place / "run.pickle").read_bytes())
    for event in document["device_traces"][-1]:
        yield from re.split(r" · | ", str(event.get("user_metadata") or ""))
        yield from (frame["name"] for frame in event.get("frames") or ())


# ---------------------------------------------------------------- the rule itself


def built(roots: object, *names: str) -> Trace:
    b = TraceBuilder()
    b.meta["roots"] = roots
    for name in names:
        with b.module(name), b.op("aten::mm"):
            b.label(b.alloc(64), "weights", "parameter", f"{name}.weight")
    return Trace.from_columns(b.trace().to_columns())


def test_an_annotation_with_a_modules_name_keeps_it() -> None:
    b = TraceBuilder()
    b.meta["roots"] = {"Net": True, "Other": True}
    with b.user("body"), b.module("body"), b.op("aten::mm"):
        b.alloc(64)
    shown = Trace.from_columns(b.trace().to_columns())
    kinds = dict(zip(shown.scopes.kind.tolist(), shown.scopes.name.tolist(), strict=True))
    assert {shown.strings[name] for name in kinds.values()} == {"body", "Net.body", "aten::mm"}


def test_an_older_file_without_its_models_keeps_its_names() -> None:
    assert paths(LoadedTrace(built(None, "body", "Critic.body"))) == {"body", "Critic.body"}


@given(
    st.one_of(
        st.none(),
        st.integers(),
        st.lists(st.text()),
        st.dictionaries(st.text(), st.one_of(st.booleans(), st.none(), st.text())),
    ),
    st.lists(st.text(max_size=8), max_size=5),
)
def test_no_document_and_no_name_breaks_the_rule(roots: object, names: list[str]) -> None:
    """Names are completed once: a trace that is saved and read again is the same."""
    once = built(roots, *names)
    again = Trace.from_columns(once.to_columns())
    assert [once.strings[row] for row in once.scopes.name.tolist()] == [
        again.strings[row] for row in again.scopes.name.tolist()
    ]
