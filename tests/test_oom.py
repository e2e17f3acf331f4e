"""An allocation that fails is explained, and the exception goes on as if nobody had looked."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pytracer
from pytracer import trace
from pytracer.analysis.answers import postmortem
from pytracer.analysis.forecasts import changes
from pytracer.export import advice_text
from pytracer.export.postmortem import render
from tests.trace_builder import TraceBuilder

MIB = 1 << 20
TOO_MUCH = 1 << 44  # of float32: more than any machine's address space has


class Greedy(torch.nn.Module):
    """Asks for too much in its forward, or in its backward."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.when == "forward":
            torch.empty(TOO_MUCH)
        if self.when == "backward":
            y.register_hook(lambda gradient: gradient.new_empty(TOO_MUCH))
        return y


class GreedyOptimizer(torch.optim.SGD):
    """Asks for too much as it steps."""

    def step(self, closure: None = None) -> None:
        torch.empty(TOO_MUCH)


def a_step(when: str) -> Callable[[], None]:
    model = Greedy(when)
    kind = GreedyOptimizer if when == "optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(512, 64)).tanh().sum()
        loss.backward()
        optimizer.step()

    return step


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("when", ["forward", "backward", "optimizer"])
def test_the_page_says_who_asked_for_how_much_and_when(when, folder, capsys) -> None:
    step = a_step(when)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), trace(stacks=True):
        step()
    page = capsys.readouterr().err
    assert f"out of memory on cpu   step 0, in {when}" in page
    asked = "AddmmBackward0" if when == "backward" else "aten::"
    assert f"asked     64.0 TiB for {asked}" in page
    assert "test_oom.py:" in page.split("alive")[0]
    assert "short by" not in page  # the CPU does not tell, and nothing is made up
    (saved,) = folder.glob("pytracer-oom-*.pytrace")
    assert f"pytracer summary {saved.name}" in page
    loaded = pytracer.load(saved)
    assert loaded.post_mortem() in page
    assert max(map(len, loaded.post_mortem().splitlines())) <= 80


def test_the_page_shows_the_file_and_number_of_installed_code() -> None:
    library = "/venv/lib/python3.12/site-packages/transformers/models/gpt2/modeling_gpt2.py"
    b = TraceBuilder()
    with b.module("transformer.h.0.attention.and.so.on"):
        for number in range(3):
            at = ("/home/user/train.py:7", f"{library}:{66 + number}")
            with b.op("aten::_scaled_dot_product_attention", at=at):
                b.alloc(12 * MIB)
                b.oom(TOO_MUCH)
    page = render(b.trace())
    assert max(map(len, page.splitlines())) <= 80
    for number in range(3):
        assert f"gpt2/modeling_gpt2.py:{66 + number}\n" in page


def test_the_exception_is_the_programs_own_and_unchanged(folder, capsys) -> None:
    def fail() -> RuntimeError:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(TOO_MUCH)
        return caught.value

    plain = fail()
    seen: list[BaseException] = []

    def fail_and_look() -> None:
        try:
            torch.empty(TOO_MUCH)
        except RuntimeError as error:
            seen.append(error)
            raise

    with pytest.raises(RuntimeError) as caught, trace(devices="cpu"):
        fail_and_look()
    assert caught.value is seen[0]
    assert type(caught.value) is type(plain)
    assert str(caught.value) == str(plain)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert not hasattr(caught.value, "__notes__")


def test_earlier_files_are_kept(folder, capsys) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError), trace(devices="cpu"):
            torch.empty(TOO_MUCH)
    assert len(list(folder.glob("pytracer-oom-*.pytrace"))) == 3


def test_ranks_have_files_of_their_own(folder, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError), trace(devices="cpu"):
        torch.empty(TOO_MUCH)
    assert (folder / "pytracer-oom-rank3.pytrace").exists()


def test_report_false_is_silent_and_leaves_no_file(folder, capsys) -> None:
    with pytest.raises(RuntimeError), trace(devices="cpu", table=False) as t:
        torch.empty(TOO_MUCH)
    assert capsys.readouterr().err == ""
    assert list(folder.iterdir()) == []
    assert "out of memory on cpu" in t.post_mortem()


def test_a_failure_that_the_program_got_over_is_no_death(folder, capsys) -> None:
    """A library that tries a smaller workspace next is not out of memory."""
    with trace(devices="cpu", table=False) as t:
        with pytest.raises(RuntimeError):
            torch.empty(TOO_MUCH)
        torch.ones(10)
    assert not t.data.meta["failed"]
    assert list(folder.iterdir()) == []
    with pytest.raises(ValueError, match="another"), trace(devices="cpu"):
        raise ValueError("another")
    assert "out of memory" not in capsys.readouterr().err


def test_a_streamed_trace_is_the_saved_one(folder, capsys) -> None:
    with pytest.raises(RuntimeError), trace(devices="cpu", path="run.pytrace"):
        torch.empty(TOO_MUCH)
    assert [path.name for path in folder.iterdir()] == ["run.pytrace"]
    assert "pytracer summary run.pytrace" in capsys.readouterr().err
    assert pytracer.load("run.pytrace").data.meta["failed"]


def test_of_a_schedules_files_the_page_names_the_one_with_the_failure(folder, capsys) -> None:
    def fail_in_the_second_cycle() -> None:
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
        with trace(devices="cpu", path="run.pytrace", schedule=schedule) as t:
            for _ in range(3):
                torch.ones(10)
                t.step()
            torch.empty(TOO_MUCH)

    with pytest.raises(RuntimeError):
        fail_in_the_second_cycle()
    assert "pytracer summary run.1.pytrace" in capsys.readouterr().err
    assert not pytracer.load("run.pytrace").post_mortem()
    assert pytracer.load("run.1.pytrace").post_mortem()


# ---------------------------------------------------------------- a device that tells more


def a_full_device(*, phase: str = "forward") -> TraceBuilder:
    """A device of 100 MiB whose allocator holds all of it, 8 MiB of that in pieces."""
    b = TraceBuilder()
    cuda = {"device": "cuda:0"}
    b.snapshot(**cuda)
    whole = b._block(100 * MIB, None, **cuda)
    b._event("segment_alloc", whole, whole.size)
    weight = b.alloc(20 * MIB, **cuda)
    b.label(weight, "weights", "parameter", "h.0.weight", "5120x1024", "float32")
    batch = b.alloc(4 * MIB, **cuda)
    b.label(batch, "inputs", "batch", "", "16x65536", "float32")
    ops = []
    with b.module("model"):
        for layer in range(4):
            with (
                b.module(f"h.{layer}"),
                b.op("aten::linear", grad=True, at=("/home/user/train.py:9",)) as op,
            ):
                b.alloc(17 * MIB, **cuda)
                ops.append(op)
        if phase == "forward":
            with b.module("head"), b.op("aten::mm", grad=True, at=("/home/user/train.py:11",)):
                b.oom(16 * MIB, **cuda)
    if phase == "backward":
        with (
            b.backward(),
            b.node("LinearBackward0", forward=ops[-1]),
            b.op("aten::mm", at=("/home/user/train.py:12",)),
        ):
            b.oom(16 * MIB, **cuda)
    b.meta["counters"] = {
        "end": {"cuda:0": {"allocated_bytes.current": 92 * MIB, "limit_bytes": 100 * MIB}}
    }
    b.meta["failed"] = True
    return b


def test_what_was_missing_is_what_the_driver_could_not_give() -> None:
    failed = postmortem.failure(a_full_device().trace())
    assert failed is not None
    assert failed.asked == 16 * MIB
    assert failed.moment.bytes == 92 * MIB
    assert failed.reserved == 100 * MIB
    assert failed.fragmented == 8 * MIB
    assert failed.missing == 16 * MIB
    assert failed.moment.phase == "forward"
    assert (failed.place.module, failed.place.op) == ("head", "aten::mm")
    assert failed.place.line == "train.py:11"


def test_a_change_says_whether_it_makes_room_for_what_failed() -> None:
    trace_ = a_full_device().trace()
    found = changes.changes(trace_, "cuda:0")
    by_text = {" ".join(row.change.split()[:5]): row for row in found}
    # 68 MiB of activations, 4 of inputs and the 16 asked for: 5.5 MiB for each of 16 samples.
    batch = by_text["A batch of 13 instead"]
    assert batch.enough
    assert batch.saves == 72 * MIB * 3 // 16
    # Each layer has one block, which is its result: a checkpoint frees none of them.
    assert "The 4 modules h.* hold" not in by_text
    # No setting makes 108 MiB fit into 100: so none is advised.
    assert not any("PYTORCH_ALLOC_CONF" in text for text in by_text)
    page = render(trace_)
    assert " ".join(advice_text.said(batch).split()) in " ".join(page.split())
    assert "Enough for what failed." in " ".join(page.split())


def a_request_in_forward(op: str) -> set[str]:
    """The changes for 1 GiB asked for after a module's call with a batch of 16."""
    b = TraceBuilder()
    batch = b.alloc(4 * MIB)
    b.label(batch, "inputs", "batch", shape="16x65536", dtype="float32")
    with b.module("model"), b.op("aten::mm", grad=True):
        b.label(b.alloc(8 * MIB), "activations")
    with b.op(op, grad=True, at=("/home/user/train.py:30",)):
        b.oom(1024 * MIB)
    trace_ = b.trace()
    failed = postmortem.failure(trace_)
    assert failed is not None
    assert failed.moment.phase == "forward"
    return {row.change for row in changes.changes(trace_, "cpu")}


def test_a_smaller_batch_is_no_help_against_what_has_nothing_to_do_with_it() -> None:
    smaller = "A batch of 8 instead of 16"
    found = {row for row in a_request_in_forward("aten::log_softmax") if smaller in row}
    assert len(found) == 1
    pieces = "The request that failed is 1.00 GiB, at train.py:30: work on it in pieces."
    assert pieces in a_request_in_forward("aten::empty")


def test_a_request_too_large_to_be_recorded_is_no_exact_number_and_is_not_halved() -> None:
    def page(asked: int) -> str:
        b = TraceBuilder()
        with b.op("aten::empty", at=("/home/user/train.py:30",)):
            b.oom(asked)
        return " ".join(render(b.trace()).split())

    assert "asked at least 256 TiB for aten::empty" in page((1 << 48) - 1)
    assert "in pieces" not in page((1 << 48) - 1)
    assert "asked 128 TiB for aten::empty" in page(1 << 47)
    assert "in pieces" in page(1 << 47)


def test_a_page_of_later_steps_says_what_it_cannot_know_on_the_cpu_only() -> None:
    """Of a GPU what was alive before is known."""
    known = a_full_device()
    unknown = TraceBuilder()
    unknown.oom(TOO_MUCH)
    for b, told in ((known, False), (unknown, True)):
        b.meta["first_step"] = 85
        page = render(b.trace())
        assert "   step 85, " in page
        assert ("Allocations from before step 85 are missing on this page" in page) == told


def test_a_failure_in_backward_names_the_forward_behind_it() -> None:
    failed = postmortem.failure(a_full_device(phase="backward").trace())
    assert failed is not None
    assert failed.moment.phase == "backward"
    assert failed.place.in_backward_of
    assert (failed.place.module, failed.place.line) == ("h.3", "train.py:9")


def test_the_page_is_one_page() -> None:
    page = pytracer.LoadedTrace(a_full_device().trace()).post_mortem()
    assert "short by 16.0 MiB" in page
    assert "train.py:11" in page
    assert len(page.splitlines()) < 40
    assert max(map(len, page.splitlines())) <= 80


def test_without_a_failure_there_is_no_page() -> None:
    assert pytracer.LoadedTrace(TraceBuilder().trace()).post_mortem() == ""


# ---------------------------------------------------------------- the real thing


@pytest.mark.cuda
@pytest.mark.parametrize("when", ["forward", "backward", "optimizer"])
def test_a_limit_on_the_gpu_is_explained_where_it_strikes(when, folder, capsys) -> None:
    """16 layers of 64 MiB; the limit leaves room for what comes before `when` and not for it."""
    torch.cuda.empty_cache()
    width, layers = 4096, 16
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.cuda()
    weights = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    rows = {"forward": 16384, "backward": 2048, "optimizer": 64}[when]
    batch = torch.randn(rows, width, device="cuda")
    room = {"forward": 8 * batch.nbytes, "backward": 17 * batch.nbytes + weights // 4}
    room["optimizer"] = 2 * weights  # gradients, and half of Adam's state
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + room[when]

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()

    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.raises(torch.OutOfMemoryError), trace(model, optimizer, stacks=True) as t:
            step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    failed = postmortem.failure(t.data)
    assert failed is not None
    assert failed.moment.phase == when
    assert failed.limit is not None
    assert abs(failed.limit - limit) < 4 * MIB
    assert failed.missing is not None
    assert failed.missing > 0
    assert failed.reserved is not None
    assert failed.reserved <= failed.limit
    most = {"forward": "activations", "backward": "weights", "optimizer": "gradients"}[when]
    share = failed.moment.by_category[most] / failed.moment.bytes
    assert share > 0.2, failed.moment.by_category
    assert failed.place.op.startswith("aten::") or failed.place.op.endswith("Backward0")
    assert "test_oom.py:" in failed.place.line
    page = capsys.readouterr().err
    assert f"out of memory on cuda:0   step 0, in {when}" in page
    assert "nough for what failed." in " ".join(page.split())
