"""docs/api.md is what the code says: docstrings, the columns of each table, each JSON document."""

import inspect
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import pytracer
from pytracer import cli, trace
from pytracer.data import columns
from tools import api_page

SCHEMAS = api_page.SCHEMAS


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(device: str, rows: int = 64, **options: Any) -> trace:
    """Six steps of a model that keeps a loss with its graph, which is a leak."""
    torch.manual_seed(0)
    model, kept = Model().to(device), []
    if torch.distributed.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    with trace(model, optimizer, stacks=True, table=False, **options) as t:
        for _ in range(6):
            x = torch.randn(rows, 256, device=device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(model(x).square().mean())
    return t


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a CPU, of an imagined card, and two jobs: of equal ranks, and of unequal ones."""
    folder = tmp_path_factory.mktemp("api")
    train("cpu", cost=True).save(folder / "cpu.pytrace")
    with pytracer.always(folder / "run.always"):
        train("cpu")
    train("cpu", rows=128).save(folder / "cpu128.pytrace")
    for job, rows in (("job", (64, 64)), ("uneven", (64, 512))):
        (folder / job).mkdir()
        for rank in range(2):
            with pytracer.imagine("H100", ranks=2, rank=rank) as t:
                torch.distributed.init_process_group("nccl")
                train("cuda", rows=rows[rank])
            t.save(folder / job / f"a.rank{rank}.pytrace")
    (folder / "train.py").write_text(inspect.getsource(of_an_imagined_run) + "of_an_imagined_run()")
    return folder


def of_an_imagined_run() -> None:
    import torch

    model = torch.nn.Linear(64, 64).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()


def test_the_page_is_up_to_date() -> None:
    """Docstrings, columns and schemas are written there by tools/api_page.py."""
    assert api_page.PAGE.read_text() == api_page.page()


# ---------------------------------------------------------------- tables


def dtype_of(values: Any) -> str:
    """The dtype, with one word for pandas' kinds of texts."""
    name = str(values.dtype)
    is_text = name in ("str", "string", "category") or (
        name == "object" and all(isinstance(value, str) for value in values)
    )
    return "text" if is_text else name


def found(frame: pd.DataFrame) -> list[tuple[str, str, bool]]:
    index = [] if frame.index.name is None else [(frame.index.name, dtype_of(frame.index), True)]
    return [*index, *((str(name), dtype_of(frame[name]), False) for name in frame.columns)]


TABLES: dict[str, Callable[[Any, Any, Any], pd.DataFrame]] = {
    't.by("module")': lambda cpu, gpu, job: cpu.by("module"),
    "t.replay().timeline()": lambda cpu, gpu, job: gpu.replay().timeline(),
    't.fits("24GiB").settings()': lambda cpu, gpu, job: gpu.fits("24GiB").settings(),
    't.checkpoint_plan("1GiB").table()': lambda cpu, gpu, job: gpu.checkpoint_plan("1GiB").table(),
    "t.cost()": lambda cpu, gpu, job: cpu.cost(),
    "t.diff(other)": lambda cpu, gpu, job: cpu.diff(steps=(1, 3)),
    "job.ranks()": lambda cpu, gpu, job: job.ranks(),
    "job.findings()": lambda cpu, gpu, job: job.findings(),
    "history.steps()": lambda cpu, gpu, job: pytracer.History("run.always").steps(),
}


@pytest.mark.parametrize("title", columns.TABLES)
def test_a_table_has_the_columns_that_are_promised(
    title: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, order and dtypes; a table without rows has no dtypes."""
    monkeypatch.chdir(place)
    cpu, job = pytracer.load(place / "cpu.pytrace"), pytracer.load(place / "job")
    view = TABLES.get(title) or (lambda cpu, gpu, job: getattr(gpu, title[2:-2])())
    frame = view(cpu, job.rank(0), job)
    wanted = [(one.name, one.dtype, one.is_index) for one in columns.TABLES[title]]
    if frame.empty:
        assert [name for name, *_ in found(frame)] == [name for name, *_ in wanted]
    else:
        assert found(frame) == wanted


def test_every_table_of_a_trace_is_described() -> None:
    """A view whose annotation says DataFrame has its columns in pytracer/data/columns.py."""
    described = {title.partition("(")[0] for title in columns.TABLES}
    for name, thing in api_page.members(pytracer.LoadedTrace):
        if "DataFrame" in str(getattr(thing, "__annotations__", {}).get("return", "")):
            assert f"t.{name}" in described, name


# ---------------------------------------------------------------- JSON documents

MAPS = ("by_category", "left_out", "limits", "lost", "peaks")  # objects whose keys are data
OPEN = ("meta", "events")  # as recorded; docs/trace-format.md and docs/always.md describe them
KINDS = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "integer",
    list: "array",
    str: "string",
    type(None): "null",
}


def schema_of(value: Any, key: str = "") -> dict[str, Any]:
    """The JSON Schema of one value. `type` is always a list here."""
    schema: dict[str, Any] = {"type": [KINDS[type(value)]]}
    if isinstance(value, list):
        schema["items"] = merged(schema_of(each, key if key in OPEN else "") for each in value)
    elif isinstance(value, dict) and key in MAPS:
        schema["additionalProperties"] = merged(schema_of(each) for each in value.values())
    elif isinstance(value, dict) and key not in OPEN:
        schema["properties"] = {name: schema_of(each, name) for name, each in value.items()}
        schema["required"] = sorted(value)
        schema["additionalProperties"] = False
    return schema


def merged(schemas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The schema of the values that any of these describes; {} if there is none."""
    known = [schema for schema in schemas if schema]
    if not known:
        return {}
    both: dict[str, Any] = {"type": sorted({word for one in known for word in one["type"]})}
    if "number" in both["type"] and "integer" in both["type"]:
        both["type"].remove("integer")
    of_lists = [one["items"] for one in known if "items" in one]
    if of_lists:
        both["items"] = merged(of_lists)
    closed = [one for one in known if "properties" in one]
    if closed:
        names = dict.fromkeys(name for one in closed for name in one["properties"])
        both["properties"] = {
            name: merged(one["properties"].get(name, {}) for one in closed) for name in names
        }
        both["required"] = sorted(set.intersection(*(set(one["required"]) for one in closed)))
        both["additionalProperties"] = False
    of_maps = [one["additionalProperties"] for one in known if one.get("additionalProperties")]
    if of_maps:
        both["additionalProperties"] = merged(of_maps)
    return both


DOCUMENTS = {
    "summary": ["summary cpu.pytrace", "summary job/a.rank0.pytrace"],
    "summary-by": ["summary cpu.pytrace --by module,op"],
    "summary-always": ["summary run.always"],
    "summary-folder": ["summary job", "summary uneven"],
    "diff": ["diff cpu.pytrace cpu128.pytrace", "diff cpu.pytrace --steps 1,3"],
    "check": [
        "check cpu.pytrace --max-peak 1KiB --max activations=1GiB",
        "check cpu128.pytrace --baseline cpu.pytrace --max-increase 1%",
    ],
    "check-folder": ["check job --max-peak 1KiB"],
    "fits": ["fits job/a.rank0.pytrace --on 24GiB", "fits job/a.rank0.pytrace --on 1MiB"],
    "what-if": ["what-if cpu.pytrace cpu128.pytrace --batch 256"],
    "cost": ["cost cpu.pytrace"],
    "ledger": ["ledger cpu.pytrace", "ledger job/a.rank0.pytrace"],
    "export": ["export cpu.pytrace -f -o a.pickle", "export job/a.rank0.pytrace -f -o a.pickle"],
    "export-timeline": ["export cpu.pytrace -f -o a.pftrace"],
    "export-folder": ["export job -f -o a.parquet"],
    "report": ["report cpu.pytrace -f -o a.html"],
    "query": ["query job 'SELECT rank, peak FROM ranks'"],
    "imagine": ["imagine --on H100 train.py", "imagine --on H100 --capacity 32MiB train.py"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "imagine" else ()) for n in DOCUMENTS]
)
def test_a_document_has_the_schema_that_is_promised(
    name: str, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`PYTRACER_UPDATE_GOLDEN=1` writes the schemas anew."""
    monkeypatch.chdir(place)
    if name in ("query", "export-folder"):
        pytest.importorskip("duckdb" if name == "query" else "pyarrow")
    schemas = []
    for command in DOCUMENTS[name]:
        capfd.readouterr()
        word, *rest = shlex.split(command)
        cli.main([word, "--json", *rest])
        schemas.append(schema_of(json.loads(capfd.readouterr().out)))
    path = SCHEMAS / f"{name}.json"
    if os.environ.get("PYTRACER_UPDATE_GOLDEN"):
        word, _, rest = DOCUMENTS[name][0].partition(" ")
        title = f"pytracer {word} --json {rest}".strip()
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
        text = json.dumps({**head, **merged(schemas)}, indent=1)
        path.write_text(re.sub(r"\[([^][{}]*)\]", lambda at: f"[{' '.join(at[1].split())}]", text))
    promised = json.loads(path.read_text())
    del promised["$schema"], promised["title"]
    assert merged([promised, *schemas]) == promised


def test_each_schema_is_held_by_a_test() -> None:
    """No file stays that nothing produces."""
    assert {path.stem for path in SCHEMAS.glob("*.json")} == {*DOCUMENTS}
