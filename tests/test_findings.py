"""Leaks and waste are found with their bytes, line and variable, and nothing is found in vain."""

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pytracer import trace
from pytracer.analysis.answers import findings, growth, held, training_steps
from pytracer.analysis.answers.edits import peak_after
from pytracer.analysis.answers.situation import Finding, Proof, Situation, at_peak
from pytracer.analysis.facts import scopes, timelines, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.data.recorded import Trace
from pytracer.reading.views import LoadedTrace
from tests.trace_builder import TraceBuilder, training_step

MIB = 1 << 20


@pytest.fixture(autouse=True)
def every_finding_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each test of this file, a finding's allocations sum up to its bytes."""
    plain = findings.findings

    def checked(traced: Trace, device: str | None = None) -> list[Finding]:
        rows = plain(traced, device)
        for row in rows:
            assert row.kind == "cache" if row.proof is None else is_proven(traced, row, row.proof)
        return rows

    monkeypatch.setattr(findings, "findings", checked)


def is_proven(traced: Trace, row: Finding, proof: Proof) -> bool:
    there = proof.which & usage.alive_at(traced, proof.position)
    amount = int(allocations(traced).requested_bytes[there].sum())
    return proof.turns is None or amount // proof.turns == row.bytes


def kept(t: trace) -> Finding:
    """What equal calls left behind; that is no finding."""
    assert "growth" not in set(t.findings().kind)
    (row,) = growth.kept_results(at_peak(t.data))
    return row


def kinds(built: TraceBuilder) -> list[str]:
    return [row.kind for row in findings.findings(built.trace())]


class Program:
    """A model whose step can be told to waste memory."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch = torch.randn(64, 128)

    def loss(self) -> torch.Tensor:
        return self.model(self.batch).square().mean()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss


def rows_of(traced: trace) -> dict[str, dict[str, object]]:
    return {row["kind"]: row for row in traced.findings().to_dict("records")}


def test_a_plain_training_loop_has_nothing_to_find() -> None:
    program = Program()
    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        for _ in range(4):
            program.step()
    assert len(t.findings()) == 0


def test_nothing_is_held_where_another_thread_is_in_the_midst_of_its_forward() -> None:
    """Phases follow one thread: what the other is about to use outlives that one's backward."""
    first, second = Program(), Program()
    first.batch = torch.randn(512, 128)  # so that the peak is in the first's step
    midway, over = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        midway.set()
        over.wait(10)

    def let_the_other_go(*_: Any) -> None:
        other.start()
        midway.wait(10)

    other = threading.Thread(target=second.step)
    second.model[0].register_forward_hook(wait)
    first.model[0].register_forward_hook(let_the_other_go)
    with trace(first.model, second.model, devices="cpu", table=False) as t:
        first.step()
        over.set()
        other.join()
    assert len(t.findings()) == 0


@pytest.mark.parametrize(("the_other_trains", "found"), [(False, ["growth"]), (True, [])])
def test_growth_is_that_of_the_thread_whose_steps_are_counted(
    the_other_trains: bool, found: list[str]
) -> None:
    """One step of another thread may last for many of these, and keeps its tensors that long."""
    b = TraceBuilder()
    weight = b.alloc(1 * MIB)
    for _ in range(6):
        training_step(b, weight)
        with b.thread(1):
            b.alloc(8 * MIB)
            if the_other_trains:
                with b.backward():
                    pass
    assert kinds(b) == found


def test_what_a_list_keeps_of_each_step_is_named_with_its_line_and_bytes() -> None:
    program, history = Program(), []
    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        for _ in range(5):
            history.append(program.model(program.batch).detach())
            program.step()
    row = rows_of(t)["growth"]
    assert row["bytes"] == history[0].nbytes
    assert "`history` keeps" in row["evidence"]
    assert "x.detach()" not in row["change"]  # they are
    assert str(row["line"]).startswith("tests/test_findings.py:")


def test_a_summed_loss_without_backward_keeps_every_graph() -> None:
    program = Program()
    total_loss = torch.zeros(())
    with trace(program.model, stacks=True, devices="cpu") as t:
        for _ in range(5):
            total_loss = total_loss + program.loss()
    row = kept(t)
    assert "`total_loss` still held" in row.evidence
    assert row.bytes >= 5 * program.batch.nbytes
    assert "loss.item()" in row.change
    assert "torch.no_grad()" in row.change


HIDDEN, OUT = 64 * 256 * 4, 64 * 128 * 4  # what ReLU gave, and the model's result


def test_graphs_that_no_backward_used_are_found_though_their_function_has_returned() -> None:
    program = Program()

    def run() -> torch.Tensor:
        total = torch.zeros(())
        for _ in range(6):
            total = total + program.loss()
        return total

    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        run()
    (row,) = t.findings().to_dict("records")
    assert row["kind"] == "evaluation"
    assert str(row["line"]).startswith("tests/test_findings.py:")
    assert str(row["evidence"]).startswith("6 calls of Sequential kept up to")
    assert "`" not in row["evidence"]  # no variable kept it when the trace ended
    # The peak is in the last call: what the five before it left is there for nothing.
    assert row["bytes"] == 6 * HIDDEN  # the results belong to the program
    assert 5 * HIDDEN <= row["at_peak"] <= row["bytes"]


def test_the_leak_of_a_training_loop_is_one_finding_with_one_cure() -> None:
    """Autograd keeps it for a graph that never goes backward: nothing is held, nor evaluated."""
    program = Program()

    class Trainer:
        def __init__(self) -> None:
            self.total = torch.zeros(())

        def fit(self) -> None:
            for _ in range(6):
                batch = torch.randn(64, 128)
                loss = program.model(batch).square().mean()
                extra = program.model(batch).abs().mean()
                program.optimizer.zero_grad()
                loss.backward()
                program.optimizer.step()
                self.total = self.total + extra

    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        Trainer().fit()
    (row,) = t.findings().to_dict("records")
    assert row["kind"] == "growth"
    assert "loss.item()" in row["change"]
    assert "no_grad" not in row["change"]
    assert row["bytes"] >= HIDDEN + OUT + program.batch.nbytes
    assert row["at_peak"] >= 5 * (HIDDEN + OUT)
    made_at = str(row["evidence"]).partition("made at ")[2]
    assert made_at.startswith(str(row["line"]))


def test_growth_without_lines_says_that_it_is_a_module_that_made_it() -> None:
    program, history = Program(), []
    with trace(program.model, program.optimizer, devices="cpu") as t:
        for _ in range(5):
            history.append(program.model(program.batch).detach())
            program.step()
    assert "made in module [2]:" in rows_of(t)["growth"]["evidence"]


def test_a_buffer_that_is_made_anew_and_larger_in_each_step_is_named() -> None:
    program, history = Program(), torch.empty(0, 128)
    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        for _ in range(8):
            program.step()
            history = torch.cat([history, program.batch])
    row = rows_of(t)["growth"]
    assert row["bytes"] == program.batch.nbytes
    assert "`history`" in row["evidence"]
    assert row["line"].startswith("tests/test_findings.py:")


def test_batches_of_growing_length_are_no_leak() -> None:
    program = Program()
    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        for number in range(8):
            program.batch = torch.randn(64 * (number + 1), 128)
            program.step()
    assert "growth" not in rows_of(t)


def test_two_lists_that_grow_are_two_findings() -> None:
    program, outputs, batches = Program(), [], []
    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        for _ in range(5):
            outputs.append(program.model(program.batch).detach())
            batches.append(torch.randn(64, 100))
            program.step()
    found = t.findings()
    found = found[found.kind == "growth"]
    assert sorted(found.bytes) == sorted([outputs[0].nbytes, batches[0].nbytes])
    assert any("`outputs` keeps" in text for text in found.evidence)
    assert any("`batches` keeps" in text for text in found.evidence)


def test_a_summed_loss_that_went_backward_keeps_no_tensor_worth_naming() -> None:
    """After backward a graph holds nodes and no saved tensors: no growth is to be claimed."""
    program = Program()
    total_loss = torch.zeros(())
    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        for _ in range(5):
            total_loss = total_loss + program.step()
    assert "growth" not in rows_of(t)


def test_evaluation_with_grad_mode_on_is_found_beside_training() -> None:
    program = Program()

    def run(*, grad: bool) -> trace:
        with trace(program.model, program.optimizer, devices="cpu") as t:
            for _ in range(3):
                program.step()
                with torch.set_grad_enabled(grad):
                    program.loss()
        return t

    found = rows_of(run(grad=True))["evaluation"]
    # What ReLU gave is kept for the second Linear; what the first gave, ReLU's result is made of.
    assert found["bytes"] == 64 * 256 * 4
    assert "evaluation" not in rows_of(run(grad=False))


def an_evaluation(program: Program, batches: int) -> float:
    losses = [program.loss() for _ in range(batches)]
    return sum(loss.item() for loss in losses)


def test_an_evaluation_after_each_step_is_not_a_late_zero_grad() -> None:
    """Its forwards run beside gradients, and nothing about zero_grad() is wrong."""
    program = Program()
    with trace(program.model, program.optimizer, stacks=True, devices="cpu") as t:
        for _ in range(3):
            program.step()
            an_evaluation(program, 4)
    assert t.peak.phase == "forward"
    (row,) = t.findings().to_dict("records")
    assert row["kind"] == "evaluation"
    # All of them are counted, and the bytes are those of the four graphs there were at once.
    assert str(row["evidence"]).startswith("12 calls of Sequential kept")
    assert row["bytes"] == 4 * HIDDEN
    assert 3 * HIDDEN <= row["at_peak"] <= row["bytes"]
    assert "torch.no_grad()" in str(t)
    assert "zero_grad" not in str(t)


@pytest.mark.parametrize("saved_tensors", ["auto", "hooks"])
def test_an_evaluation_that_sums_losses_is_told_of_no_grad_and_not_of_del(saved_tensors) -> None:
    """Nothing goes backward there: what the sum keeps is not held beside a backward."""
    program = Program()
    with trace(
        program.model,
        program.optimizer,
        stacks=True,
        devices="cpu",
        saved_tensors=saved_tensors,
    ) as t:
        for _ in range(2):
            program.step()
            total = torch.zeros(())
            for _ in range(4):
                total = total + program.loss()
    (row,) = t.findings().to_dict("records")
    assert row["kind"] == "evaluation"
    assert str(row["evidence"]).startswith("8 calls of Sequential kept")
    assert "torch.no_grad()" in row["change"]
    assert "loss.item()" in row["change"]
    assert total.requires_grad


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_forward_whose_backward_may_come_after_the_trace_is_no_evaluation(micro_batches) -> None:
    program = Program()

    def losses() -> torch.Tensor:
        return torch.stack([program.loss() for _ in range(micro_batches)]).sum()

    with trace(program.model, program.optimizer, devices="cpu") as t:
        for _ in range(3):
            program.optimizer.zero_grad()
            losses().backward()
            program.optimizer.step()
        pending = losses()
    assert "evaluation" not in rows_of(t)
    assert "held" not in rows_of(t)
    pending.backward()


def test_a_variable_that_keeps_activations_is_found_where_hooks_show_that_none_is_needed() -> None:
    program = Program()

    def step(*, waste: bool) -> None:
        program.optimizer.zero_grad()
        hidden = program.model[0](program.batch)
        out = torch.tanh(hidden)  # saves its result, not what it is given
        if not waste:
            del hidden
        out.mean().backward()
        program.optimizer.step()

    def run(*, waste: bool) -> trace:
        with trace(
            program.model, program.optimizer, devices="cpu", saved_tensors="hooks", stacks=True
        ) as t:
            for _ in range(3):
                step(waste=waste)
        return t

    row = rows_of(run(waste=True))["held"]
    assert row["bytes"] >= 64 * 256 * 4
    assert "only `hidden` keeps them" in row["evidence"]
    spared = rows_of(run(waste=False)).get("held", {"bytes": 0})
    assert spared["bytes"] <= row["bytes"] - 64 * 256 * 4


def test_gradients_that_outlive_the_forward_ask_for_an_earlier_zero_grad() -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters())

    def run(*, late: bool) -> trace:
        with trace(model, optimizer, devices="cpu", table=False) as t:
            for _ in range(3):
                if not late:
                    optimizer.zero_grad()
                loss = torch.exp(model(torch.ones(1200, 512))).sum()
                if late:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return t

    row = rows_of(run(late=True)).get("late_zero_grad")
    assert row is None or row["bytes"] == (512 * 512 + 512) * 4
    assert "late_zero_grad" not in rows_of(run(late=False))


def test_gradients_of_the_step_before_at_a_peak_in_forward() -> None:
    b = TraceBuilder()
    gradient = b.seed(MIB)
    b.label(gradient, "gradients", "parameter", "w")
    with b.module("model"), b.op("aten::mm", grad=True, at=("/home/user/train.py:3",)) as mm:
        out = b.alloc(2 * MIB)
    b.free(gradient)
    with b.backward(), b.node("MmBackward0", forward=mm):
        b.free(out)
    (row,) = findings.findings(b.trace())
    assert (row.kind, row.bytes, row.at_peak) == ("late_zero_grad", MIB, MIB)
    # The line is the forward's, and the words say so: it is not the one to move.
    assert row.line == "train.py:3"
    assert "in the forward at train.py:3" in row.evidence


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_that_no_backward_follows_has_no_gradients_in_its_way(grad: bool) -> None:
    b = TraceBuilder()
    gradient = b.seed(MIB)
    b.label(gradient, "gradients", "parameter", "w")
    with b.module("model"), b.op("aten::mm", grad=grad):
        evaluated = b.alloc(2 * MIB)
    b.free(evaluated)
    b.free(gradient)
    with b.module("model"), b.op("aten::mm", grad=True) as mm:
        out = b.alloc(MIB)
    with b.backward(), b.node("MmBackward0", forward=mm):
        b.free(out)
    assert "late_zero_grad" not in kinds(b)


def a_large_cache(*lengths: int, settings: str = "") -> Finding:
    """Steps of growing tensors: what is free of the last step is too small for the next."""
    b = TraceBuilder()
    b.meta["counters"] = {"end": {"cuda:0": {"allocated_bytes.current": 0}}}
    b.meta["allocator_settings"] = settings
    b.snapshot(device="cuda:0")
    for length in lengths:
        block = b._block(length * MIB, None, device="cuda:0")
        b._event("segment_alloc", block, block.size)
        b.free(b.alloc(length * MIB, address=block.address, device="cuda:0"))
    (row,) = findings.findings(b.trace())
    assert row.kind == "cache"
    return row


def test_a_cache_much_larger_than_the_need_is_found_with_the_setting_that_helps() -> None:
    row = a_large_cache(200, 300, 400)
    assert row.bytes == 500 * MIB
    assert "expandable_segments:True reserves 500 MiB less" in row.change


def test_no_setting_is_advised_for_a_cache_where_it_is_on_already() -> None:
    row = a_large_cache(200, 300, 400, settings="expandable_segments:True")
    assert "no setting" in row.change


@pytest.mark.ci
def test_autocasts_copies_of_the_weights_are_twins_and_no_mistake() -> None:
    """They are said where memory is short, and accuse nobody."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters())
    with trace(model, optimizer, devices="cpu") as t:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(2048, 512)).float().sum()
            loss.backward()
            optimizer.step()
    (row,) = findings.twins(at_peak(t.data))
    assert row.bytes >= 512 * 512 * 2
    assert len(t.findings()) == 0


def trained_in(dtype: torch.dtype, batch: int) -> trace:
    """Under autocast in bfloat16, which does nothing to a model that is in 16 bits."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]).to(dtype)
    optimizer = torch.optim.Adam(model.parameters())
    with trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(batch, 256, dtype=dtype)).square().mean()
            loss.backward()
            optimizer.step()
    return t


@pytest.mark.ci
@pytest.mark.parametrize("batch", [1024, 2048])
def test_weights_in_16_bits_save_at_least_what_is_said(batch: int) -> None:
    t = trained_in(torch.float32, batch)
    (row,) = findings.twins(at_peak(t.data))
    assert row.edit is not None
    after = peak_after(t.data, "cpu", [row.edit])
    assert trained_in(torch.bfloat16, batch).peak.bytes <= after < t.peak.bytes - row.bytes


def test_no_copies_are_said_of_a_peak_in_the_optimizer() -> None:
    """They are gone by then."""
    t = trained_in(torch.float32, 16)
    assert t.peak.phase == "optimizer"
    assert list(findings.twins(at_peak(t.data))) == []


def test_the_state_of_an_optimizer_for_all_parameters_is_no_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer, x = torch.optim.LBFGS(model.parameters(), max_iter=2), torch.randn(4, 64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    with trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(3):
            optimizer.step(closure)
    held = t.by("module").iloc[:, 0]
    assert held[["[0]", "[1]"]].max() < 2 * 4 * (64 * 64 + 64) + 4096  # weights and gradients


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_two_steps_are_too_few_to_speak_of_growth(steps: int) -> None:
    b = TraceBuilder()
    weight = b.seed(1000)
    b.label(weight, "weights", "parameter", "w")
    for _ in range(steps):
        training_step(b, weight)
        b.alloc(500)
    assert "growth" not in kinds(b)


def test_nothing_recorded_nothing_found() -> None:
    assert kinds(TraceBuilder()) == []


def test_a_long_list_costs_no_more_than_its_end() -> None:
    long = [0] * 5_000_000
    with trace(devices="cpu", table=False) as t:
        history = [torch.zeros(4) for _ in range(1000)]
    (row,) = [row for row in t.data.meta["variables"] if row["name"] == "history"]
    assert 0 < len(row["addresses"]) <= 300
    assert len(history) < len(long)


def test_what_torch_keeps_behind_a_loss_is_not_to_be_deleted_before_backward() -> None:
    """The loss itself is what backward begins from; its mean taken by hand keeps a number only."""
    layer = torch.nn.Linear(64, 64)
    evidence = {}
    for reduction in ("mean", "none"):
        with trace(layer, devices="cpu", table=False) as t:
            for _ in range(3):
                out = layer(torch.randn(512, 64))
                loss = torch.nn.functional.mse_loss(out, torch.rand(512, 64), reduction=reduction)
                loss = loss.mean() if reduction == "none" else loss
                loss.backward()
                del out
        assert len(t.findings()) == 0  # it is nobody's mistake, and a way to save
        now = at_peak(t.data)
        evidence[reduction] = [row.change for row in held.behind_numbers(now)]
    assert evidence == {
        "mean": ['reduction="none", and the mean of that, keeps the number only'],
        "none": [],
    }


def test_detaching_is_not_advised_where_a_backward_has_let_the_graph_go() -> None:
    """The tensor itself is what is kept, and would be kept detached as well."""
    layer, outputs = torch.nn.Linear(64, 64), []
    with trace(layer, devices="cpu", table=False) as t:
        for _ in range(6):
            out = layer(torch.randn(64, 64))
            out.square().mean().backward()
            outputs.append(out)
    assert "`outputs`" in kept(t).change
    assert "detach" not in kept(t).change


def test_state_of_layers_whose_turn_comes_later_is_no_leak() -> None:
    """An optimizer makes a layer's state in the first step that trains it."""
    trunk = torch.nn.Linear(128, 128)
    heads = torch.nn.ModuleList(torch.nn.Linear(128, 64) for _ in range(6))
    model = torch.nn.ModuleList([trunk, heads])
    optimizer = torch.optim.AdamW(model.parameters())
    with trace(model, optimizer, devices="cpu") as t:
        for head in heads:
            optimizer.zero_grad()
            head(trunk(torch.randn(16, 128))).square().mean().backward()
            optimizer.step()
    assert "growth" not in set(t.findings().kind)


def test_what_is_made_of_longer_and_longer_batches_is_no_leak() -> None:
    """Sorted by length, or a curriculum: logits are larger in each step and gone in the next."""
    model = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, devices="cpu", stacks=True) as t:
        for length in (10, 12, 15, 19, 22, 26):
            ids = torch.randint(0, 100, (16, length))
            logits = model(ids)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert logits.shape[1] == 26
    assert "growth" not in set(t.findings().kind)


def test_a_kept_number_of_a_few_bytes_is_not_worth_a_word() -> None:
    program, losses = Program(), []
    with trace(program.model, program.optimizer, devices="cpu") as t:
        for _ in range(6):
            program.step()
            losses.append(torch.zeros(()))
    assert losses
    assert "growth" not in set(t.findings().kind)


def test_tensors_that_are_needed_are_told_to_have_a_bound() -> None:
    """A replay buffer or predictions: numbers instead would be no help."""
    program, buffer = Program(), []
    with trace(program.model, program.optimizer, devices="cpu") as t:
        for _ in range(6):
            program.step()
            buffer.append(torch.randn(64, 128))
    row = rows_of(t)["growth"]
    assert "`buffer` keeps" in row["evidence"]
    assert "need a bound" in row["change"]


class Masked(torch.autograd.Function):
    """Keeps what its backward needs where autograd does not let go of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * ctx.mask


def test_a_tensor_on_ctx_is_to_be_saved_for_backward_and_not_deleted() -> None:
    """Its backward needs it."""
    model = torch.nn.Linear(128, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, devices="cpu") as t:
        for _ in range(3):
            loss = Masked.apply(model(torch.randn(256, 128))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    row = rows_of(t)["held"]
    assert row["bytes"] == 256 * 512 * 4
    assert "Masked's ctx keeps them" in row["evidence"]
    assert "save_for_backward" in row["change"]


def test_no_grad_is_not_said_to_save_what_the_op_at_the_peak_reads_in_any_case() -> None:
    """The peak is in the teacher's ReLU, whose input is there with and without a graph."""
    teacher = torch.nn.Sequential(
        torch.nn.Linear(128, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 100)
    )
    student = torch.nn.Linear(128, 100)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with trace(devices="cpu") as t:
        for _ in range(3):
            x = torch.randn(64, 128)
            loss = (student(x) - teacher(x).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    row = rows_of(t)["evaluation"]
    assert row["bytes"] == 64 * 1024 * 4
    assert row["at_peak"] == 0
    assert "mistake" not in t.table()


def test_a_step_that_is_skipped_is_not_only_told_to_use_no_grad() -> None:
    program = Program()
    with trace(program.model, program.optimizer, devices="cpu") as t:
        for i in range(6):
            if i == 3:
                loss = program.loss()  # not finite, say
                continue
            program.step()
    assert loss.requires_grad
    row = rows_of(t)["evaluation"]
    assert row["evidence"].startswith("A call of Sequential kept")
    assert row["change"].startswith("wrap it in")
    assert "skipped, `del` its loss" in row["change"]


def test_gradients_from_before_the_trace_are_known_when_their_model_is_met() -> None:
    """Also if they are let go before the first backward."""
    model = torch.nn.Linear(128, 128)
    model(torch.randn(8, 128)).mean().backward()
    with trace(devices="cpu") as t:
        loss = model(torch.randn(8, 128)).mean()
        model.zero_grad()
        loss.backward()
    peaks = t.summary().own_peak
    assert peaks["gradients"] == peaks["weights"]
    assert peaks["unknown"] == 0


def test_an_evaluation_between_two_optimizers_steps_is_no_step_without_backward() -> None:
    """Nor are gradients that were estimated without a backward; a real one is still told."""
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]

    def run(*, trains: bool) -> set[str]:
        with trace(devices="cpu") as t:
            for _ in range(4):
                loss = second(first(torch.randn(4, 8))).mean()
                if trains:
                    loss.backward()
                optimizers[0].step()
                with torch.no_grad():
                    first(torch.randn(4, 8))
                    first.weight.grad = torch.randn(8, 8)
                optimizers[1].step()
        return set(t.health()["name"] if "name" in t.health() else t.health().index)

    assert "steps_without_backward" not in run(trains=True)
    assert "steps_without_backward" in run(trains=False)


@pytest.mark.parametrize("saved_tensors", ["auto", "hooks"])
def test_what_a_transform_keeps_for_its_own_backward_is_nobodys_fault(saved_tensors: str) -> None:
    model, x = Program().model, torch.randn(64, 128)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(model, parameters, (x,))
        return output.square().mean()

    with trace(table=False, devices="cpu", saved_tensors=saved_tensors) as t:
        for _ in range(4):
            slopes = torch.func.grad(loss)(parameters)
            parameters = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
    assert "held" not in rows_of(t)
    assert "saved" in set(t.allocations().role)


def test_the_last_result_of_larger_and_larger_ones_is_no_leak() -> None:
    """Progressive resizing: each step's memory is more than the one's before, and nothing is kept."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 3, padding=1)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        restored = model(x)
        torch.nn.functional.l1_loss(restored, x).backward()
        optimizer.step()
        return restored.detach()

    with trace(model, optimizer, table=False, stacks=True, devices="cpu") as t:
        for i in range(12):
            size = 16 + 4 * (i // 2)
            x = torch.rand(8, 3, size, size)
            last = step(x)
    assert last.shape == x.shape
    assert "growth" not in rows_of(t)


def test_a_rule_in_the_table_of_rules_is_a_finding_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_many_weights(now: Situation, rest: Any) -> Any:
        which = now.of_category("weights") & rest
        yield now.finding("weights", which, "There are weights", "train something smaller")

    monkeypatch.setattr(findings, "RULES", (*findings.RULES, too_many_weights))
    b = TraceBuilder()
    b.label(b.alloc(4096), "weights")
    traced = LoadedTrace(b.trace())
    (row,) = traced.findings().to_dict("records")
    assert (row["kind"], row["bytes"]) == ("weights", 4096)
    assert "There are weights: train something smaller" in " ".join(traced.table().split())


@pytest.mark.parametrize("every", [2, 3, 8])
def test_a_buffer_that_each_rollout_leaves_behind_is_found_with_its_variable(every: int) -> None:
    program = Program()
    rollouts = []
    with trace(program.model, program.optimizer, stacks=True, devices="cpu", table=False) as t:
        for step in range(4 * every + 1):
            loss = program.step()
            if step % every == 0:
                rollouts.append(torch.randn(256, 1024))
            del loss
    row = rows_of(t)["growth"]
    assert f"Memory grows by 1.00 MiB per {every} steps, made at" in str(row["evidence"])
    assert f"`rollouts` keeps what every {every} steps make" in str(row["evidence"])
    assert t.growth_per_step() == pytest.approx(MIB / every, rel=0.01)
    assert t.check(growth_per_step=0)


def test_what_is_made_once_or_comes_and_goes_is_no_growth() -> None:
    steady = training_steps.steady_growth
    assert steady([0, 0, 0, 5 * MIB, 0, 0, 0, 0, 0, 0, 0, 0]).per_step == 0
    assert steady([MIB, -MIB] * 8).per_step == 0
    assert steady([0, 0, 7, 0, 0, 7, 0, 0, 7]) == training_steps.Growth(3, [7, 7, 7])
    assert steady([3, 3, 3, 3, 3, 3]) == training_steps.Growth(1, [3] * 6)


def test_a_leak_that_begins_late_is_told_per_step() -> None:
    """Also after ups and downs that it exceeds."""
    steady = training_steps.steady_growth
    assert steady([0] * 20 + [5] * 17) == training_steps.Growth(1, [5] * 17)
    assert steady([4, -4, 2, -2, *[5] * 9]) == training_steps.Growth(1, [5] * 9)
    # Also where single steps go up and down by more than the leak.
    assert steady([0] * 30 + [9, -1] * 15) == training_steps.Growth(2, [8] * 15)
    assert steady([8, -8] * 15 + [14, -2] * 15).per_step == 6


def test_the_shortest_run_that_explains_a_growth_is_told() -> None:
    steady = training_steps.steady_growth
    assert steady(([0] * 7 + [8]) * 20) == training_steps.Growth(8, [8] * 20)
    assert steady([5, 1, -1, 3] * 9).steps == 4


def test_growth_is_told_per_step_in_which_it_grew_and_since_when() -> None:
    """Batches of any length stay until the next: single steps go up and down."""
    program, kept = Program(), []
    with trace(program.model, program.optimizer, stacks=True, devices="cpu", table=False) as t:
        for step in range(48):
            program.batch = torch.randn(64 + 192 * (step * 7 % 5), 128)
            if step >= 21:
                kept.append(torch.zeros(64, 1024))
            program.step()
    evidence = str(rows_of(t)["growth"]["evidence"])
    assert "Memory grows by 256 KiB per step since step 21, made at" in evidence
    assert "`kept` keeps what each step makes (tests/test_findings.py:" in evidence
    assert rows_of(t)["growth"]["bytes"] == kept[0].nbytes


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=24))
def test_memory_that_comes_back_to_where_it_was_does_not_grow(levels: list[int]) -> None:
    growth = [after - before for before, after in itertools.pairwise([*levels, levels[0]])]
    assert training_steps.steady_growth(growth).steps == 1


@pytest.mark.parametrize("grad", [False, True])
def test_under_autocast_too_a_call_without_grad_mode_is_one(grad: bool) -> None:
    """autocast casts a weight with grad mode on, for its cache; no_grad() holds for the call."""
    model = torch.nn.Linear(64, 64)
    mode, autocast = torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16)
    with trace(model, devices="cpu", table=False) as t, mode, autocast:
        model(torch.randn(8, 64))
    tree = scopes.tree(t.data)
    assert timelines.ran_with_grad(t.data, np.flatnonzero(tree.kind == scopes.MODULE)).tolist() == [
        grad
    ]


def test_outputs_kept_under_inference_mode_are_not_told_to_detach() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))

    outputs = []
    with trace(model, stacks=True, devices="cpu", table=False) as t, torch.inference_mode():
        for _ in range(6):
            outputs.append(model(torch.randn(128, 64)))  # noqa: PERF401 - as people write it
    change = kept(t).change
    assert "detach" not in change
    assert "no_grad" not in change
    assert "need a bound" in change
