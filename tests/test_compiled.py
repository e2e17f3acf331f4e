"""Each block of compiled code has the module, the line and the operator of the program."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytracer.capture import compiled
from pytracer.capture.compiled import Value
from pytracer.data import schema
from pytracer.reading.views import LoadedTrace
from tests import compiled_models
from tests.trace_builder import TraceBuilder

HERE = Path(__file__).parent

WRAPPER = """
def call(self, args):
    buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
    # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.addmm]
    extern_kernels.addmm(primals_1, primals_2, primals_3, out=buf0)
    buf1 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
    cpp_fused_relu_0(buf0, buf1)
    buf2 = reinterpret_tensor(buf0, (2, 8), (8, 1), 0); del buf0  # reuse
    cpp_fused_add_1(buf2, buf1)
    buf3 = buf2; del buf2  # reuse
    return (buf3, )
    buf4 = buf3; del buf3  # reuse
"""


def wrapper(tmp_path: Path, linemap: list[Any], text: str = WRAPPER) -> compiled._Wrapper:
    file = tmp_path / "wrapper.py"
    file.write_text(text)
    return compiled._Wrapper(str(file), SimpleNamespace(linemaps={str(file): linemap}))


def test_words_are_those_of_the_recorder() -> None:
    text = (HERE.parent / "csrc/core/event.h").read_text()
    assert f'kGeneratedLine = "{schema.GENERATED_LINE}"' in text
    listed = re.search(r"kCompiled\[\] = \{(.*?)\}", text)
    assert listed is not None
    assert tuple(re.findall(r'"(.*?)"', listed[1])) == schema.COMPILED


def test_a_reused_buffer_has_all_its_values_in_order(tmp_path: Path, monkeypatch: Any) -> None:
    known = {name: Value(op=name) for name in ("buf0", "buf1", "buf2", "buf3", "buf4")}
    monkeypatch.setitem(compiled._written, compiled._digest(WRAPPER), known)
    lines = wrapper(tmp_path, [])
    assert [(n, v.op) for n, v in lines.values_at(3)] == [(3, "buf0"), (8, "buf2"), (10, "buf3")]
    assert [(n, v.op) for n, v in lines.values_at(6)] == [(6, "buf1")]
    assert list(lines.values_at(9)) == list(lines.values_at(99)) == []


def test_a_copy_that_no_node_makes_is_its_users(tmp_path: Path, monkeypatch: Any) -> None:
    text = "buf0 = empty()\ncpp_fused_0(primals_1, buf0)\nbuf1 = extern_kernels.convolution(buf0)\n"
    known = {"buf1": Value(op="aten::convolution")}
    monkeypatch.setitem(compiled._written, compiled._digest(text), known)
    assert list(wrapper(tmp_path, [], text).values_at(1)) == [(1, known["buf1"])]


def test_a_file_from_the_cache_tells_lines_itself(tmp_path: Path, monkeypatch: Any) -> None:
    in_a, in_b = ((("L['self'].a", "Linear"),),), ((("L['self'].b", "Linear"),),)
    traced = {
        "linear": [Value(trace="here", modules=in_a)],
        "relu": [Value(trace="here", modules=in_b)],
    }
    monkeypatch.setattr(compiled, "_traced", traced)
    lines = wrapper(tmp_path, [(2, 6), ("here", "there")])
    (_, first), *_ = lines.values_at(3)
    assert first == Value("aten::addmm", "here", in_a)  # the comment names the node
    ((_, second),) = lines.values_at(6)
    assert second == Value("", "there", ())  # no node has this line


def test_several_candidates_give_the_module_around_them() -> None:
    names = {"Net": "Net", "layers": "ModuleList", "layers.0": "Linear", "layers.1": "Linear"}
    modules = compiled._Modules(names, compiled.Roots(("Net",), frozenset(), "Net"))
    first, second = ((("L['self'].layers.0", "Linear"),), (("L['self'].layers.1", "Linear"),))
    assert modules._place([first]) == ("layers.0", "layers.0")
    assert modules._place([first, second]) == ("layers", "layers")
    assert modules._place([()]) == ("", "")


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("L['self'].h.0.mlp", "h.0.mlp"),
        ("L['self']._modules['h']._modules['0']", "h.0"),
        ("L['self'].h[3]", "h.3"),
        ("G['model']", ""),
    ],
)
def test_paths_of_dynamo_become_paths_of_modules(path: str, inside: str) -> None:
    assert compiled._inside(path) == inside


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, after a graph break
@pytest.mark.parametrize("model", ["gpt", "mlp", "convolutions", "lora", "breaks"])
def test_aot_eager_blocks_are_where_eager_ones_are(model: str) -> None:
    eager = compiled_models.traced(model, lambda each: each)
    found = compiled_models.traced(model, lambda m: torch.compile(m, backend="aot_eager"))
    assert compiled_models.shares(found, eager)["same"] >= 0.99


def run(model: str, way: str, cache: Path) -> dict[str, float]:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "compiled_models.py", model, way],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "way"),
    [(model, "inductor") for model in compiled_models.MODELS] + [("gpt", "dynamic")],
)
def test_inductor_blocks_are_where_eager_ones_are(model: str, way: str, tmp_path: Path) -> None:
    """Also in another process, which finds the graphs in Inductor's cache: there by line."""
    assert run(model, way, tmp_path)["same"] >= 0.99
    assert run(model, way, tmp_path)["lines"] >= 0.99


@pytest.mark.slow
def test_without_stacks_modules_are_known_and_lines_not() -> None:
    found = compiled_models.traced(
        "mlp", lambda m: torch.compile(m, backend="aot_eager"), stacks=False
    )
    made = found.allocations().query("phase == 'forward'")
    assert set(made["module"].dropna()) >= {"a", "b", "c"}
    assert made["line"].isna().all()


# ---------------------------------------------------------------- the analysis of a trace

FILE = "/tmp/cache/wrapper.py"


def reused_block() -> tuple[TraceBuilder, Any]:
    """A compiled call whose first block holds two values, and whose second block is the peak."""
    b = TraceBuilder()
    model = b.stack("/home/user/model.py:5")
    b.meta["roots"] = {"Net": True}
    first = {"from": 3, "op": "aten::addmm", "module": "a", "below": "a", "stack": model}
    second = {"from": 8, "op": "aten::clone", "module": "", "below": "", "stack": model}
    other = {"from": 6, "op": "aten::relu", "module": "gone", "below": "gone", "stack": 0}
    b.meta["compiled"] = [
        {"file": FILE, "line": 3, "values": [first, second]},
        {"file": FILE, "line": 6, "values": [other]},
    ]
    for text in ("a", "aten::addmm", "aten::clone", "aten::relu"):
        b.string(text)
    with b.module("Net"), b.op("CompiledFunction", grad=True, at=("/home/user/train.py:1",)):
        with b.op(schema.GENERATED_LINE, at=(f"{FILE}:3",)):
            one = b.alloc(100)
        with b.op(schema.GENERATED_LINE, at=(f"{FILE}:6",)):
            two = b.alloc(50)
        b.free(two)
    b.free(one)
    return b, LoadedTrace(b.trace())


def test_an_allocation_counts_for_its_last_value() -> None:
    table = reused_block()[1].allocations()
    assert list(table["module"]) == ["Net", "Net"]  # the second's module is none of the trace's
    assert list(table["op"]) == ["aten::clone", "aten::relu"]
    assert list(table["line"]) == ["model.py:5", "train.py:1"]
    assert table["values"].iloc[0] == "aten::addmm model.py:5, then aten::clone model.py:5"
    assert table["values"].isna().iloc[1]


def test_the_peak_names_the_value_that_is_alive() -> None:
    t = reused_block()[1]
    assert t.by(["module", "op"], at="peak")["bytes"].to_dict() == {
        ("a", "aten::addmm"): 100,
        ("Net", "aten::relu"): 50,
    }
    assert t.by("op", at="end")["bytes"].to_dict() == {}


def test_places_that_say_nothing_leave_the_call() -> None:
    b, _ = reused_block()
    b.meta["compiled"] = [{"file": FILE, "line": "3", "values": [{"from": -1, "stack": 2**40}]}, 7]
    table = LoadedTrace(b.trace()).allocations()
    assert list(table["op"]) == ["CompiledFunction"] * 2
    assert list(table["line"]) == ["train.py:1"] * 2
