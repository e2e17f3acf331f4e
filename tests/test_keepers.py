"""The variable that keeps what a trace left behind is named, with the way to it."""

import functools
import queue
import textwrap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from pytracer import trace
from pytracer.capture import referents, variables
from pytracer.data import meta
from tests.test_findings import Program, kept, rows_of


@pytest.mark.parametrize("folder", ["torch", "pytracer"])
def test_a_leak_is_named_in_a_program_that_lies_in_a_folder_named_like_us(folder: str) -> None:
    """As in a clone of this project, or in somebody's ~/torch."""
    source = """
        def run(loss, trace):
            with trace(stacks=True, devices="cpu") as t:
                kept = torch.zeros(())
                for _ in range(5):
                    kept = kept + loss()
            return t
    """
    names: dict[str, Any] = {"torch": torch}
    exec(compile(textwrap.dedent(source), f"/home/me/{folder}/train.py", "exec"), names)
    assert "`kept` still held" in kept(names["run"](Program().loss, trace)).evidence


def test_a_long_list_is_named_and_not_a_variable_with_a_graph() -> None:
    program, history = Program(), []
    loss = program.loss()
    with trace(program.model, stacks=True, devices="cpu") as t, torch.no_grad():
        history.extend(program.model(program.batch) for _ in range(700))
    assert loss.requires_grad
    assert "`history` still held" in kept(t).evidence
    assert "detach" not in kept(t).change


class Sample(NamedTuple):
    """A row of a replay buffer."""

    state: torch.Tensor
    action: int


@dataclass
class Transition:
    """The same, as people also write it."""

    state: torch.Tensor
    action: int


@pytest.mark.parametrize("row", [Sample, Transition])
def test_a_buffer_of_records_inside_an_object_is_named(row: Any) -> None:
    class Buffer:
        def __init__(self) -> None:
            self.rows: list[Any] = []

    class Agent:
        def __init__(self) -> None:
            self.buffer = Buffer()

        def run(self) -> Any:
            program = Program()
            with trace(program.model, devices="cpu", table=False) as t:
                for _ in range(6):
                    for _ in range(4):
                        self.buffer.rows.append(row(torch.randn(1024), 1))
                    program.step()
            return t

    assert "`self.buffer.rows` keeps" in rows_of(Agent().run())["growth"]["evidence"]


def test_what_an_objects_attribute_keeps_is_named() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.program, self.history = Program(), []

        def run(self) -> trace:
            with trace(self.program.model, stacks=True, devices="cpu") as t:
                for _ in range(5):
                    self.history.append(self.program.model(self.program.batch).detach())
                    self.program.step()
            return t

    assert "`self.history` keeps" in rows_of(Trainer().run())["growth"]["evidence"]


def test_naming_variables_keeps_nothing_alive() -> None:
    """Looking at a function's variables leaves no copy of them behind in its frame."""
    import weakref

    with trace(devices="cpu", table=False):
        tensor = torch.zeros(10)
    ended = weakref.ref(tensor)
    del tensor
    assert ended() is None


def test_a_dictionary_that_the_program_took_of_its_variables_is_left_alone() -> None:
    tensor = torch.zeros(10)
    mine = locals()
    with trace(devices="cpu", table=False):
        pass
    assert mine["tensor"] is tensor


def test_looking_at_variables_makes_no_copy_of_a_lazy_clone() -> None:
    original = torch.zeros(1000)
    lazy = torch._lazy_clone(original)
    with trace(devices="cpu", table=False) as t:
        pass
    assert torch._C._is_cow_tensor(lazy)
    assert not t.data.has_allocations


def leak(keep: Callable[[torch.Tensor], object]) -> str:
    """The evidence for a leak in training that `keep` has a hand in, beside an honest `loss`."""
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with trace(layer, optimizer, devices="cpu", table=False) as t:
        for _ in range(6):
            out = layer(torch.randn(64, 64))
            keep(out)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert loss is not None
    found = t.findings()
    return str(found[found.kind == "growth"].evidence.iloc[0])


def test_a_keeper_that_is_not_seen_is_not_said_to_be_the_loss() -> None:
    """It is overwritten in every step; Python cannot say what a future of torch's refers to."""
    free = iter([torch.futures.Future() for _ in range(6)])
    hidden = list[Any]()
    assert "`" not in leak(lambda out: hidden.append(next(free)) or hidden[-1].set_result(out))
    assert len(hidden) == 6


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("the search for variables ran the program's code")


SPECIAL = (
    *("__getattr__", "__getattribute__", "__iter__", "__len__", "__bool__", "__hash__", "__eq__"),
    *("__getitem__", "__contains__", "__repr__", "__str__", "__reversed__", "__instancecheck__"),
    *("__subclasscheck__", "__class_getitem__", "__get__", "__call__"),
)


@pytest.mark.parametrize("base", [object, dict, list, tuple, deque, set, Exception, torch.Tensor])
def test_the_search_for_variables_runs_none_of_the_programs_code(base: type) -> None:
    class Guarded(type):
        is_armed = False

        def __getattribute__(cls, name: str) -> Any:
            return forbidden() if Guarded.is_armed else type.__getattribute__(cls, name)

        def __hash__(cls) -> int:
            return forbidden() if Guarded.is_armed else type.__hash__(cls)

        def __eq__(cls, other: object) -> bool:
            return forbidden() if Guarded.is_armed else cls is other

    own: type = type(base)
    kind: type = Guarded if own is type else type("Both", (Guarded, own), {})
    hostile = kind(
        "Hostile", (base,), {"rows": property(forbidden), "__torch_function__": forbidden}
    )
    value = torch.zeros(4).as_subclass(hostile) if base is torch.Tensor else hostile()
    attributes = {"held": torch.zeros(3), "failed": ValueError(torch.zeros(2))}
    for name, inner in attributes.items():
        object.__setattr__(value, name, inner)
    del attributes, inner
    for name in SPECIAL:
        type.__setattr__(hostile, name, forbidden)
    with trace(devices="cpu", table=False) as t:
        held = [value]
        Guarded.is_armed = True
    Guarded.is_armed = False
    assert t.data.meta["callback_errors"] == 0
    paths = [row["path"] for row in t.data.meta["variables"]]
    assert any(path.endswith(".held -> tensor") for path in paths)
    assert held


def test_a_search_that_was_cut_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_MOST_OBJECTS", 10)
    monkeypatch.setattr(referents, "MOST_ITEMS", 3)
    deep: list[Any] = []
    keep = deep.append
    for _ in range(20):
        deep = [deep]
    assert "something keeps what each step makes (the search for what keeps it ended after" in leak(
        lambda out: keep(out)
    )


def test_a_path_in_a_file_without_one_is_none() -> None:
    old = {"name": "history", "addresses": [1], "graph_addresses": [], "behind_numbers": []}
    (variable,) = meta.read({"variables": [old]}).variables
    assert (variable.path, variable.bound) == ("", 0)


def test_a_deque_is_looked_into() -> None:
    replay: deque[torch.Tensor] = deque()
    assert "`replay` keeps" in leak(replay.append)


def bounded_cache(most: int) -> Callable[[torch.Tensor], object]:
    now: list[torch.Tensor] = []

    @functools.lru_cache(maxsize=most)
    def cached(_step: int) -> torch.Tensor:
        return now.pop()

    return lambda out: (now.append(out), cached(id(out)))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("keep.__self__", lambda: deque[torch.Tensor](maxlen=100).append),
        ("keep.__self__.queue", lambda: queue.Queue[torch.Tensor](100).put),
        ("cached", lambda: bounded_cache(100)),
    ],
)
def test_what_has_a_bound_still_fills_and_leaks_nothing(name: str, make: Callable[[], Any]) -> None:
    program, keep = Program(), make()
    with trace(program.model, program.optimizer, devices="cpu", table=False) as t:
        for _ in range(6):
            keep(torch.randn(64, 64))
            program.step()
    assert "growth" not in rows_of(t)
    fills = f"`{name}` still fills, by 16.0 KiB per step: it may hold 100 items"
    assert fills in kept(t).evidence


def test_what_a_function_kept_that_has_failed_is_named() -> None:
    def train(program: Program) -> None:
        history = []
        for step in range(6):
            history.append(torch.randn(64, 64))
            program.step()
            assert step < 5

    program = Program()
    with (
        pytest.raises(AssertionError),
        trace(program.model, program.optimizer, devices="cpu", table=False) as t,
    ):
        train(program)
    assert "`history` keeps what each step makes (tests/" in rows_of(t)["growth"]["evidence"]


def test_a_variable_whose_graph_keeps_it_all_is_named() -> None:
    """What it holds itself is one number."""
    layer = torch.nn.Linear(64, 64)
    with trace(layer, devices="cpu", table=False) as t:
        total = torch.zeros(())
        for _ in range(6):
            loss = layer(torch.randn(64, 64)).square().mean()
            total = total + loss
    assert "`total` still held" in kept(t).evidence
    assert loss is not None


def test_a_variable_that_cannot_be_asked_for_its_graph_hides_no_other() -> None:
    """A view that was made without grad mode, and whose base was changed with it."""
    layer, base = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    with torch.no_grad():
        view = base[0]
    base.mul_(layer.weight[0])
    with pytest.raises(RuntimeError):
        view.grad_fn  # noqa: B018
    with trace(layer, devices="cpu", table=False) as t:
        history = [layer(torch.randn(8, 8)) for _ in range(3)]
    names = {row["name"] for row in t.data.meta["variables"]}
    assert {"history", "view"} <= names
    assert len(history) == 3
    assert t.data.meta["callback_errors"] == 0
