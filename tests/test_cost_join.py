"""Which row a call's time goes to: on calls written by hand, and on real models."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pytracer import errors, load, trace
from pytracer.basics.units import time_text
from pytracer.cli import main
from pytracer.cost import classes, measure, measurements, peaks, per_module, table as cost_table
from pytracer.cost.calls import (
    Argument,
    Call,
    Kernel,
    Key,
    Kind,
    Sum,
    busy,
    join,
    module_calls,
)
from pytracer.data._native import C
from pytracer.export.cost_text import peaks_text, render

# ---------------------------------------------------------------- by hand


class Recorder:
    """Calls inside each other; each begin and each end takes 10 ns."""

    def __init__(self) -> None:
        self.now = 0
        self.calls: list[Call] = []

    @contextmanager
    def inside(
        self, name: str, kind: Kind = "op", sequence: int = -1, thread: int = 1, forward: int = 0
    ) -> Iterator[Call]:
        self.now += 10
        call = Call(name, kind, thread, self.now, 0, len(self.calls) + 1, sequence, forward)
        self.calls.append(call)
        yield call
        self.now += 10
        call.end = self.now

    def call(self, name: str, sequence: int = -1, thread: int = 1) -> Call:
        with self.inside(name, sequence=sequence, thread=thread) as made:
            return made

    @contextmanager
    def node(self, name: str, sequence: int, thread: int = 1, forward: int = 1) -> Iterator[None]:
        with (
            self.inside(name, "node", sequence, thread, forward),
            self.inside(name, "call", sequence, thread, forward),
        ):
            yield

    def rows(self, kernels: tuple[Kernel, ...] = ()) -> dict[Key, Sum]:
        return join(self.calls, kernels, classes.class_of)


def found(rows: dict[Key, Sum], op: str) -> Key:
    (key,) = (key for key in rows if key.op == op)
    return key


def linear_and_its_backward(r: Recorder, thread: int = 1) -> None:
    with r.inside("up", "module"), r.inside("aten::linear", sequence=0):
        r.call("aten::t", sequence=0)
        r.call("aten::addmm", sequence=1)
    with r.node("AddmmBackward0", 1, thread):
        r.call("aten::mm", thread=thread)
        r.call("aten::sum", thread=thread)


@pytest.mark.parametrize("thread", [1, 7])
def test_backward_belongs_to_the_module_and_operator_that_made_its_node(thread: int) -> None:
    """Also where the engine runs it on a thread of its own."""
    r = Recorder()
    linear_and_its_backward(r, thread)
    rows = r.rows()
    mm, addmm = found(rows, "aten::mm"), found(rows, "aten::addmm")
    assert (mm.module, mm.phase, mm.pair, mm.node) == (
        "up",
        "backward",
        "aten::addmm",
        "AddmmBackward0",
    )
    assert (addmm.module, addmm.phase, addmm.pair) == ("up", "forward", "aten::addmm")
    assert found(rows, "aten::sum").pair == "aten::addmm"


def test_of_operators_with_one_number_the_last_to_begin_made_the_node() -> None:
    r = Recorder()
    with r.inside("aten::feature_dropout", sequence=4):
        r.call("aten::bernoulli_", sequence=4)
        r.call("aten::mul", sequence=4)
    with r.node("MulBackward0", 4):
        r.call("aten::mul")
    pairs = {key.pair for key in r.rows() if key.op == "aten::mul"}
    assert pairs == {"aten::mul"}


def test_every_nanosecond_of_every_operator_is_in_one_row() -> None:
    """What encloses operators is not one: a module's own time is Python's."""
    r = Recorder()
    linear_and_its_backward(r)
    tops = [c for c in r.calls if c.name in ("aten::linear", "aten::mm", "aten::sum")]
    assert sum(row.host_ns for row in r.rows().values()) == sum(c.end - c.start for c in tops)


def test_how_an_operator_does_its_work_is_its_own_time() -> None:
    """The outermost operator of a known class owns what is inside."""
    r = Recorder()
    with r.inside("aten::convolution"), r.inside("aten::_convolution"):
        r.call("aten::copy_")
    assert {key.op for key in r.rows()} == {"aten::convolution"}


def test_a_kernel_belongs_to_the_operator_that_launched_it_or_is_shown_alone() -> None:
    r = Recorder()
    with r.inside("up", "module"):
        r.call("aten::mm")
    kernels = (Kernel("gemm", 100, 150, 2), Kernel("lost", 140, 160, 99))
    rows = r.rows(kernels)
    assert rows[found(rows, "aten::mm")].kernel_ns == 50
    assert rows[found(rows, "aten::mm")].launching_calls == 1
    assert rows[found(rows, "kernel lost")].kernel_ns == 20
    assert sum(row.kernel_ns for row in rows.values()) == 70
    assert busy(kernels) == 60  # ten of them were both


def test_the_engines_own_additions_are_told_from_the_nodes() -> None:
    r = Recorder()
    r.call("aten::gelu", sequence=0)
    with r.inside("GeluBackward0", "node", 0, 1, 1):
        with r.inside("GeluBackward0", "call", 0, 1, 1):
            r.call("aten::gelu_backward")
        r.call("aten::add")
    rows = r.rows()
    assert found(rows, "aten::add").node == "gradient sum"
    assert found(rows, "aten::gelu_backward").node == "GeluBackward0"


def test_recomputation_is_told_from_backward() -> None:
    """What runs with grad mode on inside a node that itself runs without it."""
    r = Recorder()
    r.call("aten::gelu", sequence=0)
    with r.node("GeluBackward0", 0):
        r.call("aten::gelu", sequence=5)
        r.call("aten::gelu_backward")
    phases = {key.phase for key in r.rows() if key.op == "aten::gelu"}
    assert phases == {"forward", "recompute"}
    assert found(r.rows(), "aten::gelu_backward").phase == "backward"


def test_a_backward_that_is_differentiated_is_no_recomputation() -> None:
    r = Recorder()
    r.call("aten::gelu", sequence=0)
    with r.node("GeluBackward0", 0):
        r.call("aten::gelu_backward", sequence=5)
    assert found(r.rows(), "aten::gelu_backward").phase == "backward"


def test_a_compiled_graphs_operators_pair_with_its_backward() -> None:
    """Though the compiler annotates between the autograd function and what it calls."""
    r = Recorder()
    with (
        r.inside("CompiledFunction", sequence=3),
        r.inside("## Call CompiledFxGraph", "annotation"),
    ):
        r.call("aten::addmm")
    with r.node("CompiledFunctionBackward", 3):
        r.call("triton_red_fused_sum_0")
    rows = r.rows()
    for op, phase in (("aten::addmm", "forward"), ("triton_red_fused_sum_0", "backward")):
        assert (found(rows, op).phase, found(rows, op).pair) == (phase, "CompiledFunction")


def test_an_optimizer_inside_of_backward_is_still_the_optimizer() -> None:
    r = Recorder()
    with r.node("AccumulateGrad", -1), r.inside("Optimizer.step#SGD.step", "annotation"):
        r.call("aten::add_")
    assert found(r.rows(), "aten::add_").phase == "optimizer"


# ---------------------------------------------------------------- real models


class Small(nn.Module):
    """A layer of every kind that the textbook speaks of; the first ones need no input gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 8, 3)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4)
        self.up = nn.Linear(128, 64)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm(64)
        self.down = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.convolution(x))
        x = self.norm(self.activation(self.up(x.flatten(1))))
        out: torch.Tensor = self.down(x)
        return out


def train(model: nn.Module, x: torch.Tensor) -> None:
    functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()


@pytest.fixture(scope="module")
def small() -> trace:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(16, 4, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, cost=True) as t:
        for _ in range(2):
            train(model, x)
            optimizer.step()
            optimizer.zero_grad()
    return t


def row_of(t: trace, name: str, by: str = "module") -> cost_table.Row:
    (row,) = (row for row in cost_table.rows(t.data, by) if row.name == name)
    return row


def test_flop_ratios_are_exactly_two_and_one_for_the_first_layer(small: trace) -> None:
    """Grouped convolutions too."""
    table = small.cost("module")
    for module, ratio in (("convolution", 1), ("grouped", 2), ("up", 2), ("down", 2)):
        assert table.flop_ratio[module] == ratio


def test_byte_ratios_are_the_textbooks(small: trace) -> None:
    table = small.cost("op")
    assert table.byte_ratio["aten::gelu"] == pytest.approx(1.5)
    assert table.byte_ratio["aten::native_layer_norm"] == pytest.approx(1.5, abs=0.05)
    assert table.byte_ratio["aten::cross_entropy_loss"] == pytest.approx(2.0, abs=0.2)


def test_every_table_adds_up_to_what_was_measured(small: trace) -> None:
    for by in ("module", "op", "class"):
        table = small.cost(by)
        assert table.time_ns.sum() == table.attrs["busy_ns"] > 0
        parts = [f"{phase}_ns" for phase in measurements.PHASES]
        assert (table[parts].sum(axis=1) == table.time_ns).all()
        assert table.time_share.sum() == pytest.approx(1)


def test_nothing_of_this_model_is_uncounted(small: trace) -> None:
    assert small.cost().attrs["uncounted"] == []


@pytest.fixture(scope="module")
def transformer() -> tuple[list[cost_table.Row], FlopCounterMode, FlopCounterMode]:
    """A transformer without grouped convolutions and with attention in its math form: our rows,
    and what FlopCounterMode counts forward and backward."""
    model, x = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True), torch.randn(2, 5, 16)
    with sdpa_kernel(SDPBackend.MATH):
        with trace(model, cost=True) as t:
            model(x, x).sum().backward()
        with FlopCounterMode(display=False, depth=9) as forward:
            model(x, x)
        with FlopCounterMode(display=False, depth=9) as both:
            model(x, x).sum().backward()
    return cost_table.rows(t.data), forward, both


def test_modules_flops_equal_flop_counter_modes(
    transformer: tuple[list[cost_table.Row], FlopCounterMode, FlopCounterMode],
) -> None:
    """Every module's in forward, and the whole backward's."""
    rows, forward, both = transformer
    assert sum(row.forward_flops for row in rows) == forward.get_total_flops() > 0
    backward = sum(row.backward_flops for row in rows)
    assert backward == both.get_total_flops() - forward.get_total_flops() > 0
    compared = 0
    for name, by_op in forward.get_flop_counts().items():
        root, _, module = name.partition(".")
        if root == "Transformer" and module:
            inside = [r for r in rows if r.name == module or r.name.startswith(f"{module}.")]
            assert sum(row.forward_flops for row in inside) == sum(by_op.values())
            compared += 1
    assert compared > 8


def test_where_flop_counter_mode_gives_a_module_others_backward(
    transformer: tuple[list[cost_table.Row], FlopCounterMode, FlopCounterMode],
) -> None:
    """It keeps a module open from its output's gradient to its input's. By hand: four 16x16
    projections of ten tokens, and two products of 5x5 scores for four heads of width 8, three
    times for forward and backward together."""
    rows, _, both = transformer
    module = "decoder.layers.0.multihead_attn"
    expected = 3 * (4 * 2 * 10 * 16 * 16 + 2 * 2 * 4 * 5 * 5 * 8)
    inside = [row for row in rows if row.name.startswith(module)]
    assert sum(row.forward_flops + row.backward_flops for row in inside) == expected
    assert sum(both.get_flop_counts()[f"Transformer.{module}"].values()) > expected


def test_attention_on_the_cpu_is_counted_though_torch_does_not() -> None:
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with trace(cost=True, devices="cpu") as t:
        functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    row = row_of(t, "aten::scaled_dot_product_attention", "op")
    assert row.forward_flops == 2 * 2 * 2 * 16 * 16 * 8
    assert row.flop_ratio == 2.5
    notes = {note for record in measurements.measured(t.data).records for note in record.notes}
    assert any(note.startswith("causal") for note in notes)


def test_an_lstms_backward_is_twice_its_forward() -> None:
    model, x = nn.LSTM(8, 16), torch.randn(5, 2, 8, requires_grad=True)
    with trace(model, cost=True) as t:
        model(x)[0].sum().backward()
    (row,) = (row for row in cost_table.rows(t.data) if row.forward_flops)
    assert row.forward_flops == 5 * 2 * 2 * (64 * 8 + 64 * 16)
    assert row.flop_ratio == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_makes_it_three_times(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    x = torch.randn(4, 16, requires_grad=True)
    with trace(model, cost=True) as t:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    row = row_of(t, "[0]")
    assert row.forward_flops == row.recompute_flops == 2 * 4 * 16 * 16
    assert row.flop_ratio == 3


def test_frozen_weights_make_it_once() -> None:
    model, x = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    model.requires_grad_(False)
    with trace(model, cost=True) as t:
        model(x).sum().backward()
    assert [row.flop_ratio for row in cost_table.rows(t.data) if row.forward_flops] == [1]


def test_an_operator_without_a_formula_is_listed() -> None:
    """Never silently zero."""

    @torch.library.custom_op("pytracer_test::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    with trace(cost=True, devices="cpu") as t:
        mystery(torch.ones(4))
    missing = {(each["op"], each["missing"]) for each in t.cost().attrs["uncounted"]}
    assert ("pytracer_test::mystery", "FLOPs") in missing
    assert t.cost("op").uncounted_calls["pytracer_test::mystery"] == 1


def test_losses_and_gradients_are_bit_for_bit_the_same() -> None:
    def run(context: Callable[[nn.Module], object] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Small(), torch.randn(4, 4, 8, 8)
        if context is None:
            train(model, x)
        else:
            with trace(model, cost=True):
                train(model, x)
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, traced = run(None), run(trace)
    assert len(plain) == len(traced) == 10
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


# ---------------------------------------------------------------- a GPU's records, by hand


@dataclass
class Event:
    """One record of torch.profiler, as kineto hands it out."""

    what: str
    kind: str
    start: int
    duration: int
    id: int = 0
    linked: int = 0
    inputs: tuple[tuple[int, ...], ...] = ()

    def __getattr__(self, name: str) -> Callable[[], object]:
        known = {
            "name": self.what,
            "activity_type": self.kind,
            "start_ns": self.start,
            "duration_ns": self.duration,
            "correlation_id": self.id,
            "linked_correlation_id": self.linked,
            "device_type": DeviceType.CPU
            if self.kind.startswith(("cpu", "cuda_r")) or not self.kind
            else DeviceType.CUDA,
            "is_user_annotation": self.kind == "gpu_user_annotation",
            "is_async": False,
            "scope": 0,
            "start_thread_id": 1,
            "fwd_thread_id": 0,
            "sequence_nr": -1,
            "dtypes": ["c10::BFloat16" for _ in self.inputs],
            "concrete_inputs": [None for _ in self.inputs],
            "structured_input_shapes": [list(shape) for shape in self.inputs],
            "structured_input_strides": [[shape[-1], 1] for shape in self.inputs],
        }
        return lambda: known[name]


@pytest.mark.parametrize("driver", ["cuda_runtime", ""])  # "": where torch does not tell kinds
def test_what_a_gpu_did_is_counted_once(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels by the operator that they are linked to; no annotations, no driver's calls, though one
    outside of operators may have an operator's number; and an operator that launched nothing (here
    one that torch.compile only imagined) counts nothing."""
    monkeypatch.setattr(peaks, "device_name", lambda _: "a GPU")
    monkeypatch.setattr(peaks, "cache_bytes", lambda _: None)
    shapes = ((8, 16), (16, 4))
    calls, kernels = measure._read(
        [
            Event("aten::mm", "cpu_op", 100, 50, id=1, inputs=shapes),
            Event("cudaLaunchKernel", "cuda_runtime", 110, 5, id=77, linked=1),
            Event("nvjet_sm90", "kernel", 500, 30, id=77, linked=1),
            Event("a second kernel", "kernel", 530, 10, id=78, linked=1),
            Event("aten::mm", "cpu_op", 200, 50, id=2, inputs=shapes),
            Event("cudaDeviceSynchronize", driver, 300, 50, id=1),
            Event("my region", "gpu_user_annotation", 400, 400, linked=9),
            Event("Context Sync", "cuda_sync", 400, 400),
            Event("Memcpy HtoD", "gpu_memcpy", 520, 40, linked=5),
        ]
    )
    document = measure.document(calls, kernels)
    rows = [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
    strings = document["strings"]
    by_op = {strings[row["op"]]: row for row in rows}
    assert by_op.keys() == {"aten::mm", "kernel Memcpy HtoD"}
    mm = by_op["aten::mm"]
    assert (mm["calls"], mm["launches"], mm["time_ns"]) == (1, 2, 40)
    assert mm["flops"] == 2 * 8 * 16 * 4
    assert {strings[number] for number in mm["kernels"]} == {"nvjet_sm90", "a second kernel"}
    assert strings[by_op["kernel Memcpy HtoD"]["class"]] == "data movement"
    assert (document["busy_ns"], document["device_busy_ns"]) == (80, 60)


@pytest.mark.parametrize(("columns", "unaligned"), [(50257, True), (50304, False)])
def test_which_gemm_is_unaligned(columns: int, unaligned: bool) -> None:
    """All three of a vocabulary that is no multiple of eight, by their names."""
    x, w = (
        Argument((64, 32), (32, 1), "c10::BFloat16"),
        Argument((32, columns), (1, 32), "c10::BFloat16"),
    )
    grad = Argument((64, columns), (columns, 1), "c10::BFloat16")
    gemms = {
        "forward": ("forward", (x, w), ()),
        "input-gradient": (
            "backward",
            (grad, w._replace(shape=(columns, 32), strides=(32, 1))),
            (x, w),
        ),
        "weight-gradient": (
            "backward",
            (grad._replace(shape=(columns, 64), strides=(1, columns)), x),
            (x, w),
        ),
    }
    for role, (phase, arguments, forward) in gemms.items():
        key = Key("head", phase, "aten::mm", "aten::mm", "", arguments, forward)
        notes = [note for note in measure._notes(key) if note.startswith("unaligned")]
        text = f"unaligned: rows of {columns} elements of 2 B in the {role} GEMM"
        assert notes == ([text] if unaligned else [])


# ---------------------------------------------------------------- one call of a module


def test_module_calls_are_counted_in_forward_and_know_who_calls_them() -> None:
    """Not those of a recomputation, and a wrapper that goes by what it wraps counts once."""
    r = Recorder()
    for _ in range(2):
        with r.inside("Model", "module"), r.inside("Model", "module"):
            r.call("aten::gelu", sequence=0)
            with r.inside("up", "module"):
                r.call("aten::mm")
    with r.node("GeluBackward0", 0), r.inside("up", "module"):
        r.call("aten::mm")
    assert module_calls(r.calls) == {"Model": (2, ""), "up": (2, "Model")}


def test_a_call_of_the_model_costs_what_all_of_its_rows_do(small: trace) -> None:
    found = per_module.per_call(small.data)
    (root,) = (module for module in found if "." not in module and module == "Small")
    rows = cost_table.rows(small.data)
    inside = [row for row in rows if row.name in found]
    assert found[root].calls > 0
    for side in ("forward", "backward"):
        flops = sum(getattr(row, f"{side}_flops") for row in inside)
        assert getattr(found[root], f"{side}_flops") * found[root].calls == pytest.approx(flops)
        taken = sum(getattr(row, f"{side}_ns") for row in inside) / 1e6
        assert getattr(found[root], f"{side}_ms") * found[root].calls == pytest.approx(taken)


def test_chrome_traces_module_slices_have_costs(small: trace, tmp_path: Path) -> None:
    """And only they, and only with cost=True."""
    small.export_chrome_trace(tmp_path / "small.json")
    events = json.loads((tmp_path / "small.json").read_text())["traceEvents"]
    slices = [event for event in events if event.get("cat") == "scope"]
    with_costs = [event for event in slices if "forward ms" in event.get("args", {})]
    assert {event["args"]["kind"] for event in with_costs} == {"module"}
    found = per_module.per_call(small.data)
    for event in with_costs:
        known, arguments = found[event["name"]], event["args"]
        assert arguments["forward ms"] == pytest.approx(known.forward_ms, abs=0.001)
        assert arguments["backward flops"] == round(known.backward_flops)
        assert arguments.get("flop ratio", 0) == pytest.approx(known.flop_ratio or 0, abs=0.001)
    with trace(nn.Linear(2, 2), devices="cpu") as t:
        nn.Linear(2, 2)(torch.ones(1, 2))
    t.export_chrome_trace(tmp_path / "plain.json")
    assert "forward ms" not in (tmp_path / "plain.json").read_text()


# ---------------------------------------------------------------- files and errors


def test_a_saved_trace_gives_the_same_tables(small: trace, tmp_path: Path) -> None:
    again = load(small.save(tmp_path / "small.pytrace"))
    for by in ("module", "op", "class"):
        assert small.cost(by).equals(again.cost(by))
        assert small.cost(by).attrs == again.cost(by).attrs


def test_a_streamed_trace_has_its_costs(tmp_path: Path) -> None:
    path = tmp_path / "streamed.pytrace"
    with trace(cost=True, path=path, devices="cpu") as t:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert load(path).cost("class").equals(t.cost("class"))


def test_the_command_line(small: trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(small.save(tmp_path / "small.pytrace"))
    for by in ("class", "module", "op"):
        assert main(["cost", path, "--by", by]) == 0
        assert "verdict" in capsys.readouterr().out
    assert main(["cost", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(row["time_ns"] for row in document["rows"]) == document["busy_ns"]


def test_layers_alike_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with trace(model, cost=True) as t:
        model(torch.ones(2, 8)).sum().backward()
    path = str(t.save(tmp_path / "layers.pytrace"))
    assert main(["cost", path, "--by", "module"]) == 0
    assert "\n[0, 1, 2] " in capsys.readouterr().out
    assert main(["cost", path, "--by", "module", "--each"]) == 0
    assert "\n[2] " in capsys.readouterr().out


def test_errors_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # `make demo` leaves a trace where it ran
    with trace(devices="cpu") as t:
        torch.ones(4)
    with pytest.raises(errors.UsageError, match=r"cost=True"):
        t.cost()
    path = str(t.save(tmp_path / "plain.pytrace"))
    assert main(["cost", path]) == 2
    assert main(["cost"]) == 4  # there is no trace in this folder
    assert main(["cost", str(tmp_path / "none.pytrace")]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("pytracer: ") for line in lines)


def test_no_such_table(small: trace) -> None:
    with pytest.raises(errors.UsageError, match="'module', 'op', 'class'"):
        small.cost("line")  # type: ignore[arg-type]


def test_another_profiler_is_left_alone() -> None:
    """torch has one; the trace says so, records nothing and leaves no hook."""
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        with pytest.raises(errors.CaptureError, match="is running already"), trace(cost=True):
            pass
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in theirs.events() or ())
    assert not C.status()["recording"]


def test_costs_that_are_damaged_are_refused_and_not_believed(small: trace) -> None:
    """Whatever a file says: a clear error, never a traceback."""
    good = json.loads(json.dumps(small.data.meta["cost"]))
    row = good["rows"][0]
    damages: list[dict[str, object]] = [
        {"rows": [[*row[:-1], [10**9]]]},
        {"rows": [row[:-1]]},
        {"rows": [["x", *row[1:]]]},
        {"rows": 3},
        {"strings": [1, 2]},
        {"columns": ["module"]},
        {"busy_ns": 1},
        {"rows": [[-1, *row[1:]]], "busy_ns": row[9]},
        {"modules": [[0, -1, 0]]},
        {"modules": [[0, 1]]},
        {"modules": 3},
    ]
    for damage in [*damages, dict.fromkeys(good)]:
        meta = {**small.data.meta, "cost": {**good, **damage}}
        with pytest.raises(errors.UnreadableTrace, match="damaged"):
            cost_table.rows(replace(small.data, meta=meta))
    for nonsense in (3, [], "cost", {}):
        with pytest.raises(errors.UnreadableTrace, match="damaged"):
            cost_table.rows(replace(small.data, meta={"cost": nonsense}))


def test_leaving_by_an_exception_ends_the_profiler() -> None:
    t = trace(cost=True, devices="cpu")

    def fail() -> None:
        with t:
            torch.ones(2) + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not torch._C._autograd._profiler_enabled()
    assert "aten::add" in t.cost("op").index


def test_each_window_of_a_schedule_has_its_costs() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with trace(cost=True, devices="cpu", schedule=schedule) as t:
        for _ in range(6):
            torch.ones(2) + 1
            t.step()
    assert t.cost("op").calls["aten::add"] == 2
    assert not torch._C._autograd._profiler_enabled()


def test_compiling_meanwhile_breaks_no_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with trace(model, cost=True) as t:
        compiled(torch.ones(2, 8)).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(torch.ones(2, 8)).sum().backward()
    rows = {row.name: row for row in cost_table.rows(t.data, "op")}
    # What ran while compiling computed nothing, and is in a row of its own.
    assert rows["torch.compile"].time_ns > 0
    assert sum(row.forward_flops for row in rows.values()) == 2 * 2 * 8 * 8


def test_a_profiler_that_somebody_else_ended_leaves_no_costs() -> None:
    with trace(cost=True, devices="cpu") as t:
        torch.ones(2) + 1
        torch.autograd._disable_profiler()
    with pytest.raises(errors.UsageError, match="no costs"):
        t.cost()


def test_a_profiler_that_cannot_be_read_costs_only_the_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(_: object) -> None:
        raise ValueError("nothing I know")

    monkeypatch.setattr("pytracer.cost.measure._read", unreadable)
    with pytest.warns(RuntimeWarning, match="nothing I know"), trace(cost=True, devices="cpu") as t:
        torch.ones(2) + 1
    assert len(t.allocations())
    assert not C.status()["recording"]


def test_an_optimizer_in_backward_and_a_loss_in_float32_are_noticed() -> None:
    """Both are in the text, or in a record's notes."""
    layer = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with trace(layer, cost=True) as t:
        layer(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    assert "the optimizer runs inside backward" in render(t.data)
    records = measurements.measured(t.data).records
    assert [r.module for r in records if "cast" in r.notes and r.phase == "forward"]


def test_more_than_a_peak_is_explained() -> None:
    """Beside a peak that is too low, shares are over 100 %; a reader is told what that may be."""
    layer = nn.Linear(64, 64)
    with trace(layer, cost=True) as t:
        layer(torch.ones(64, 64)).sum().backward()
    for rate, is_said in ((1, True), (1e18, False)):
        peaks = {"copy_bytes_per_s": rate, "flops_per_s": {"float32": rate}}
        meta = {**t.data.meta, "cost": {**t.data.meta["cost"], "peaks": peaks}}
        assert ("over 100 % of a peak" in render(replace(t.data, meta=meta))) is is_said


# ---------------------------------------------------------------- peaks


def test_peaks_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small ones, here; a file that is damaged is measured again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peaks, "_CPU_SIZES", ((64, 64, 64),))
    monkeypatch.setattr(peaks, "_CPU_COPY", 2**20)
    name = peaks.device_name("cpu")
    assert peaks.cached(name) is None
    found = peaks.measure("cpu")
    assert peaks.cached(name) == found
    assert found["copy_bytes_per_s"] > 1e6
    assert found["flops_per_s"]["float32"] > 1e6
    kept = tmp_path / "pytracer" / "peaks.json"
    for damage in ("{", "[]", json.dumps({peaks._key(name): {"copy": 3}})):
        kept.write_text(damage)
        assert peaks.cached(name) is None
    assert peaks.measure("cpu").keys() == found.keys()


def test_one_thread_is_no_threads_and_what_was_kept_as_such_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peaks, "_processor", lambda: "a CPU")
    names = {}
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        names[threads] = peaks.device_name("cpu")
    assert names == {1: "a CPU, 1 thread", 2: "a CPU, 2 threads"}
    known = {"copy_bytes_per_s": 1e10, "flops_per_s": {"float32": 1e11}}
    peaks._write(f"a CPU, 1 threads, torch {torch.__version__}", known)
    assert peaks.cached(names[1]) == peaks.cached("a CPU, 1 threads") == known
    assert peaks.cached(names[2]) is None


def test_peaks_are_written_as_vendors_count() -> None:
    known = {"copy_bytes_per_s": 25.14e9, "flops_per_s": {"float32": 93.1e9, "half": 7.9e14}}
    assert peaks_text(known) == "float32 93.1 GFLOP/s, half 790 TFLOP/s, copy 25.1 GB/s"


def test_all_the_time_that_has_a_share_is_told() -> None:
    """The optimizer's milliseconds are in neither column of times."""
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with trace(layer, optimizer, cost=True) as t:
        layer(torch.ones(64, 64)).sum().backward()
        optimizer.step()
    (row,) = (row for row in cost_table.rows(t.data, "class") if row.name == "optimizer")
    told = f"the optimizer {time_text(row.optimizer_ns)} ("
    assert told in " ".join(render(t.data).split())


def test_a_trace_keeps_the_peaks_that_were_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = {"copy_bytes_per_s": 1e10, "flops_per_s": {"float32": 1e11}, "torch": "x"}
    peaks._write(peaks._key(peaks.device_name("cpu")), known)
    with trace(cost=True, devices="cpu") as t:
        torch.ones(64, 64) @ torch.ones(64, 64)
    row = row_of(t, "aten::mm", "op")
    assert row.of_peak_flops == pytest.approx(2 * 64**3 / 1e11 / (row.time_ns / 1e9))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.cuda
def test_kernels_reach_their_modules_on_cuda() -> None:
    """Every kernel's time is in one row, and none of a linear layer's is without an operator."""
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
    x = torch.randn(256, 512, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    with trace(model, optimizer, cost=True) as t:
        model(x).sum().backward()
        optimizer.step()
    found = measurements.measured(t.data)
    assert found.clock == "kernels"
    table = t.cost("module")
    assert table.time_ns.sum() == found.busy_ns >= (found.device_busy_ns or 0) > 0
    assert table.flop_ratio["[0]"] == table.flop_ratio["[2]"] == 2
    assert table.forward_ns["[1]"] > 0
    assert table.backward_ns["[1]"] > 0
    assert t.cost("class").optimizer_ns["optimizer"] > 0
    assert not [record for record in found.records if record.op.startswith("kernel ")]


@pytest.mark.cuda
def test_measuring_allocates_nothing_on_the_device() -> None:
    model = nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")

    def peak(context: Callable[[], object]) -> int:
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with context():  # type: ignore[attr-defined]
            model(x).sum().backward()
        return torch.cuda.max_memory_allocated()

    peak(nullcontext)
    assert peak(nullcontext) == peak(lambda: trace(model, cost=True, table=False))


@pytest.mark.cuda
def test_peaks_are_those_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = peaks.measure("cuda")
    assert found["flops_per_s"]["bfloat16"] > found["flops_per_s"]["float32"] > 1e12
    assert found["copy_bytes_per_s"] > 1e11
    assert peaks.cached(peaks.device_name("cuda")) == found
