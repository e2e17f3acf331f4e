"""Programs that train in less usual ways, and what their bytes are."""

import collections
import copy
import dataclasses
import io
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

from pytracer import trace

Batch = tuple[torch.Tensor, torch.Tensor]


def net(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def fetch(rows: int = 32, width: int = 64) -> Batch:
    return torch.randn(rows, width), torch.randint(0, 10, (rows,))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def categories(rows: pd.DataFrame, *ops: str) -> set[str]:
    return set(rows[rows.op.isin(ops)].category)


@pytest.fixture(params=["auto", "hooks"])
def saved_tensors(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_batches_that_another_thread_makes_are_inputs(saved_tensors: str) -> None:
    """Whatever the training does meanwhile."""
    model, batches = net(), queue.Queue[Batch | None](2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def prefetch() -> None:
        for _ in range(12):
            batches.put(fetch())
        batches.put(None)

    with trace(model, optimizer, table=False, saved_tensors=saved_tensors) as t:
        thread = threading.Thread(target=prefetch)
        thread.start()
        while (batch := batches.get()) is not None:
            learn(model, optimizer, batch)
        thread.join()
    assert categories(t.allocations(), "aten::randn", "aten::randint") == {"inputs"}


class PlainBatch:
    """As the Annotated Transformer has it; PyTorch Geometric's has another object in between."""

    def __init__(self, x: torch.Tensor, rest: Any) -> None:
        self.x, self.rest = x, rest


@dataclasses.dataclass
class DataBatch:
    x: torch.Tensor
    rest: Any


@dataclasses.dataclass(slots=True)
class SlotBatch:
    x: torch.Tensor
    rest: Any


class Summed(nn.Module):
    """Adds all that its batch holds; is handed what is no batch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, batch: Any, besides: Any) -> torch.Tensor:
        held = batch if isinstance(batch, collections.UserDict) else None
        x, rest = (held["x"], held["rest"]) if held else (batch.x, batch.rest)
        assert isinstance(besides[0], nn.Module)
        y: torch.Tensor = self.linear(x) * rest.x + rest.rest["mask"]
        return y.square().mean()


@pytest.mark.parametrize("kind", [PlainBatch, DataBatch, SlotBatch, collections.UserDict])
def test_a_batch_in_an_object_of_its_own_is_inputs(kind: Any, saved_tensors: str) -> None:
    """All of it; and a model or an optimizer that is handed over is not."""
    model, other = Summed(), net()
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])

    def fetched() -> Any:
        inner = DataBatch(torch.randn(32, 64), {"mask": torch.randn(32, 64)})
        x = torch.randn(32, 64)
        return kind({"x": x, "rest": inner}) if kind is collections.UserDict else kind(x, inner)

    with trace(model, optimizer, table=False, saved_tensors=saved_tensors) as t:
        for _ in range(4):
            loss = model(fetched(), (other, optimizer)) + other(torch.zeros(1, 64)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = t.allocations()
    assert categories(rows, "aten::randn") == {"inputs"}
    learnt = sum(p.numel() * 4 for p in [*model.parameters(), *other.parameters()])
    assert t.summary().loc["weights", "at_peak"] == learnt


def test_a_batch_that_is_fetched_before_backward_is_the_next_forwards_input(
    saved_tensors: str,
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, table=False, saved_tensors=saved_tensors) as t:
        following = fetch()
        for _ in range(20):
            features, wanted = following
            loss = functional.cross_entropy(model(features), wanted)
            following = fetch()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        functional.cross_entropy(model(following[0]), following[1]).backward()
    assert categories(t.allocations(), "aten::randn", "aten::randint") == {"inputs"}


def test_targets_of_any_size_are_inputs() -> None:
    """Graphs are not read before every backward, and no two batches need be alike."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, table=False) as t:
        for rows in range(20, 50):
            learn(model, optimizer, fetch(rows))
    assert categories(t.allocations(), "aten::randn", "aten::randint") == {"inputs"}


def test_a_copy_of_the_weights_is_no_target() -> None:
    """Though a weight may have been made by the same operator, and autograd saves that."""
    original, best = net(), {}
    with trace(table=False) as t:
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(40):
            learn(model, optimizer, fetch())
            if step % 5 == 0:
                best = {name: value.clone() for name, value in model.state_dict().items()}
    assert best
    rows = t.allocations()
    copies = rows[(rows.op == "aten::clone") & (rows.category != "weights")]
    assert len(copies) == 8 * 4
    assert set(copies.category) == {"functional"}


class HandWritten(torch.optim.Optimizer):
    """Momentum that is made anew in each step."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            before = state.get("m", torch.zeros_like(parameter))
            state["m"] = 0.9 * before + parameter.grad
            parameter -= 0.1 * state["m"]


def test_state_that_is_made_anew_in_each_step_is_state_from_the_first() -> None:
    model = net()
    optimizer = HandWritten(model.parameters())
    with trace(model, optimizer, table=False) as t:
        for _ in range(3):
            learn(model, optimizer, fetch())
    assert t.summary().own_peak.functional == 0
    assert t.summary().at_end.optimizer_state == sum(4 * p.numel() for p in model.parameters())


def state_after_each_step(t: trace) -> list[int]:
    states = t.timeline(by="category").optimizer_state
    return [int(states[states.index <= end].iloc[-1]) for end in t.steps().end_ns]


def test_state_that_was_made_anew_from_before_the_trace_is_state() -> None:
    model = net()
    optimizer = HandWritten(model.parameters())
    learn(model, optimizer, fetch())
    with trace(table=False) as t:
        for _ in range(3):
            learn(model, optimizer, fetch())
    assert t.summary().own_peak.functional == 0
    assert state_after_each_step(t) == [sum(4 * p.numel() for p in model.parameters())] * 3


@pytest.mark.parametrize("from_file", [True, False])
@pytest.mark.parametrize("at", range(5))
def test_state_that_is_loaded_in_between_is_state(at: int, from_file: bool) -> None:
    """Also where the optimizer is gone when the trace ends."""

    def train(model: nn.Module) -> int:
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(6):
            learn(model, optimizer, fetch())
            if step == at:
                loaded = copy.deepcopy(optimizer.state_dict())
                if from_file:
                    torch.save(optimizer.state_dict(), file := io.BytesIO())
                    file.seek(0)
                    loaded = torch.load(file)
                optimizer.load_state_dict(loaded)
                del loaded
        return sum(t.nbytes for entry in optimizer.state.values() for t in entry.values())

    with trace(table=False) as t:
        state = train(net())
    # What copy.deepcopy takes is in no event: where it was met it was there, maybe from the begin.
    first = 0 if from_file else at + 1
    assert state_after_each_step(t)[first:] == [state] * (6 - first)
    assert t.summary().own_peak.functional == 0


@pytest.mark.parametrize("how", ["in the dictionary", "in the tensor"])
def test_state_that_is_moved_away_between_steps_is_state(how: str) -> None:
    """As programs do that keep it elsewhere: only its tensors are replaced, not their holders."""

    def replace(entry: dict[str, torch.Tensor]) -> None:
        for name, tensor in entry.items():
            if how == "in the dictionary":
                entry[name] = tensor.clone()
            else:
                tensor.data = tensor.data.clone()

    with trace(table=False) as t:
        optimizer = torch.optim.AdamW((model := net()).parameters())
        for _ in range(6):
            learn(model, optimizer, fetch())
            for entry in optimizer.state.values():
                replace(entry)
        learn(model, optimizer, fetch())
    state = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values())
    assert state_after_each_step(t) == [state] * 7
    assert t.summary().own_peak.functional == 0


class Rotating(torch.optim.Optimizer):
    """Makes its bases anew every fourth step, as Shampoo and GaLore do."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if self.steps % 4 == 0:
                basis = torch.eye(parameter.shape[0])
                self.state[parameter]["bases"] = (basis, 2 * basis)
            parameter -= 0.1 * parameter.grad
        self.steps += 1


def test_state_that_is_made_anew_now_and_then_is_state() -> None:
    def train(model: nn.Module) -> None:
        optimizer = Rotating(model.parameters())
        for _ in range(11):
            learn(model, optimizer, fetch())

    with trace(table=False) as t:
        train(model := net())
    assert t.summary().own_peak.functional == 0
    expected = sum(2 * 4 * p.shape[0] ** 2 for p in model.parameters())
    assert state_after_each_step(t) == [expected] * 11


def test_lbfgs_copies_of_all_parameters_are_not_saved_by_autograd() -> None:
    """Though its closure clones a batch that autograd does save, in the same phase."""
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    adam = torch.optim.Adam(model.parameters())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    points = torch.rand(512, 2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x = points.clone().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        loss = (slope[:, 1] - 0.1 * bend[:, 0]).square().mean()
        loss.backward()
        return loss

    with trace(model, table=False) as t:
        for _ in range(3):
            closure()
            adam.step()
        for _ in range(4):
            optimizer.step(closure)
    rows = t.allocations()
    flat = rows[rows.requested_bytes == sum(p.nbytes for p in model.parameters())]
    assert len(flat) > 20
    assert "activations" not in set(flat.category)


def test_a_penalty_that_comes_late_keeps_activations() -> None:
    """Of a double backward in the last step only: what the first backward makes is saved, too."""

    def train(saved_tensors: str) -> pd.Series:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with trace(model, optimizer, table=False, saved_tensors=saved_tensors) as t:
            for step in range(6):
                optimizer.zero_grad()
                x = torch.randn(32, 64, requires_grad=step == 5)
                loss = model(x).mean()
                if step == 5:
                    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                    loss = slope.square().sum(1).mean()
                    del slope
                loss.backward()
                optimizer.step()
        peaks: pd.Series = t.summary().own_peak
        return peaks

    auto, hooks = train("auto"), train("hooks")
    assert auto.activations == hooks.activations
    assert auto.functional == hooks.functional


def test_gradients_in_a_buffer_from_before_the_trace_are_gradients() -> None:
    """Of a program that has one for all of them, as DDP's `gradient_as_bucket_view`."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes))

    def step() -> None:
        optimizer.zero_grad()
        flat.zero_()
        loss = model(fetch()[0]).mean()
        for p, part in zip(parameters, flat.split(sizes), strict=True):
            p.grad = part.view_as(p)
        loss.backward()
        optimizer.step()

    step()
    for _ in range(2):  # each trace for itself
        optimizer.zero_grad()
        with trace(table=False) as t:
            for _ in range(3):
                step()
        assert t.summary().at_peak.gradients == flat.nbytes
        assert not t.health().meaning.str.contains("did not serve").any()


def test_sparse_gradients_are_gradients() -> None:
    """Their indices and their values, each a tensor of its own."""
    words = nn.Embedding(1000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(words.parameters())
    with trace(words, optimizer, table=False) as t:
        for _ in range(2):
            words(torch.randint(0, 1000, (50,))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert t.summary().own_peak.gradients >= 50 * 64 * 4 + 50 * 8
    assert t.summary().own_peak.functional < 1000


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_weights(layout: torch.layout) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dense = torch.eye(200)
            sparse = dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()
            self.register_buffer("edges", sparse)
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.sparse.mm(self.edges, x))

    model = Graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, table=False) as t:
        model(torch.randn(200, 16)).sum().backward()
        optimizer.step()
    rows = t.allocations()
    edges = rows[rows.name == "edges"]
    assert set(edges.category) == {"weights"}
    assert edges.requested_bytes.sum() >= 200 * 4 + 200 * 8


def test_a_buffer_that_the_first_forward_makes_is_weights() -> None:
    class Rotary(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.randn(4096, 16))
            return x * self.table[: len(x)]

    model = nn.Sequential(nn.Linear(16, 16), Rotary())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, table=False) as t:
        for _ in range(2):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
    rows = t.allocations()
    assert list(rows[rows.requested_bytes == 4096 * 16 * 4].category) == ["weights"]


def named_state(t: trace) -> set[str]:
    assert "foreign_parameters" not in t.health().index
    rows = t.allocations()
    return set(rows[rows.category == "optimizer_state"].name)


def test_parameters_that_take_others_places_have_their_names() -> None:
    model = net()
    with trace(model, table=False) as t:
        model(torch.randn(2, 64)).sum().backward()
        model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            learn(model, optimizer, fetch())
    assert named_state(t) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_parameter_that_a_module_gets_later_has_its_name() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with trace(model, optimizer, table=False) as t:
        for step in range(4):
            if step == 2:
                model[0].scale = nn.Parameter(torch.ones(64))
                model[0].register_forward_hook(lambda layer, _, out: out * layer.scale)
                optimizer.add_param_group({"params": [model[0].scale]})
            learn(model, optimizer, fetch())
    assert "0.scale" in named_state(t)


def test_a_frozen_teacher_needs_no_no_grad() -> None:
    """It keeps no graph: what it returns is all that there is of it."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            found = []
            for layer in self.layers:
                x = layer(x).relu()
                found.append(x)
            return found

    teacher, student = Teacher().requires_grad_(requires_grad=False), Teacher()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with trace(student, optimizer, table=False) as t:
        for _ in range(4):
            x = torch.randn(256, 64)
            pairs = zip(teacher(x), student(x), strict=True)
            loss = sum(((a - b) ** 2).mean() for a, b in pairs)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "evaluation" not in set(t.findings().kind)


def test_a_batch_that_was_fetched_and_not_used_yet_is_an_input() -> None:
    """Loaders that fetch one ahead always have one when the trace ends."""
    data = [fetch(rows) for rows in range(20, 40)]
    copying = torch.utils.data.DataLoader(data, batch_size=None, collate_fn=copy_of)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, table=False) as t:
        batches = iter(copying)
        following = next(batches)
        for _ in range(5):
            batch, following = following, next(batches)
            learn(model, optimizer, batch)
    assert following
    assert categories(t.allocations(), "aten::clone") == {"inputs"}


def copy_of(batch: Batch) -> Batch:
    return batch[0].clone(), batch[1].clone()


def test_an_evaluation_in_between_is_no_part_of_a_steps_forward() -> None:
    """Nor of the line that says what a step takes; where nothing trains, forwards are what they are."""
    layer, rows = nn.Linear(256, 256), torch.randn(512, 256)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(30):
                layer(rows)

    with trace(layer, optimizer, devices="cpu", table=False) as t:
        for _ in range(4):
            layer(rows).square().mean().backward()
            optimizer.step()
            evaluate()
    forward = t.steps().forward_ns.iloc[1:4]
    turns = t.steps().end_ns.iloc[1:4] - t.steps().start_ns.iloc[1:4]
    assert (forward < 0.5 * turns).all()
    with trace(layer, devices="cpu", table=False) as t:
        evaluate()
    assert t.steps().forward_ns.sum() > 0


class Positions(nn.Module):
    """Adds a position to each token: where, and what casts the sum, is up to the test."""

    def __init__(self, use: Any, tokens: int = 32, width: int = 16) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, tokens, width))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.linear = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(width, width))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.use(self, x)
        return y.float().mean()


def copies(use: Any, saved_tensors: str, *, batch: int = 1, autocast: bool = True) -> set[str]:
    """The parameters of which there are copies; each must be half as large."""
    model = Positions(use)
    with trace(model, table=False, saved_tensors=saved_tensors) as t:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(batch, 32, 16))
            loss.backward()
            model.zero_grad()
    rows = t.allocations()
    rows = rows[rows.role == "autocast_copy"]
    halves = {name: parameter.numel() * 2 for name, parameter in model.named_parameters()}
    assert (rows.requested_bytes == rows.name.map(halves)).all()
    assert (rows.groupby("name", observed=True).size() == 3).all()
    return set(rows.name)


OF_LINEAR = {"linear.weight", "linear.bias"}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("use", "true"),
    [
        (lambda m, x: m.linear(x + m.position), OF_LINEAR),
        (lambda m, x: m.linear(x - m.position), OF_LINEAR),
        (lambda m, x: functional.linear(x + m.position, m.weight), {"weight"}),
        (
            lambda m, x: m.linear(torch.cat((x[:, 1:], m.first.expand(len(x), -1, -1)), 1)),
            OF_LINEAR,
        ),
    ],
    ids=["added", "subtracted", "functional", "joined"],
)
def test_a_cast_of_what_was_made_with_a_parameter_is_no_copy_of_it(
    use: Any, true: set[str], batch: int, saved_tensors: str
) -> None:
    """Though the gradient passes on as it is, where the batch is one; copies are of weights alone."""
    assert copies(use, saved_tensors, batch=batch) == true


def test_a_program_that_casts_a_sum_has_no_copy_of_what_it_added(saved_tensors: str) -> None:
    def use(model: Positions, x: torch.Tensor) -> torch.Tensor:
        return (x + model.position).bfloat16().square()

    assert copies(use, saved_tensors, autocast=False) == set()


@pytest.mark.parametrize(
    ("use", "true"),
    [
        (lambda m, x: m.linear(m.position) + x, {"position", *OF_LINEAR}),
        (lambda m, x: m.linear((x + 1)[:, :16].exp()), OF_LINEAR),
        (lambda m, x: functional.linear(x, m.linear.weight), {"linear.weight"}),
        (lambda m, x: functional.linear(x.bfloat16(), m.weight.bfloat16()), {"weight"}),
    ],
    ids=["learnt_input", "input_as_large", "used_by_another", "cast_by_the_program"],
)
def test_a_cast_of_a_parameter_is_a_copy_of_it_wherever_it_is_used(
    use: Any, true: set[str], saved_tensors: str
) -> None:
    assert copies(use, saved_tensors) == true


def test_what_a_saved_tensor_hook_packs_is_no_copy_that_autocast_made() -> None:
    """An input as large as the weight, in 16 bits until backward; the weight is not packed."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.data_ptr() in weights else tensor.bfloat16()

    with trace(model, table=False) as t:
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.float()):
                y = model(torch.randn(64, 64))
            y.mean().backward()
            model.zero_grad()
    rows = t.allocations()
    assert t.summary().loc["weights", "own_peak"] == 64 * 64 * 4
    assert set(rows[rows.requested_bytes == 64 * 64 * 2].category) == {"activations"}


@pytest.mark.parametrize("keeps", [False, True])
def test_detail_category_tells_a_batch_that_follows_a_call_without_grad(keeps: bool) -> None:
    """As in reinforcement learning: an action, then a batch. What was acted on may be kept."""
    found, model = {}, net()
    for detail in ("op", "category"):
        optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), []
        with trace(model, optimizer, detail=detail, table=False) as t:
            for _ in range(4):
                state = torch.randn(1, 64)
                kept.append(state if keeps else None)
                with torch.no_grad():
                    model(state)
                learn(model, optimizer, fetch(512))
        found[detail] = t.summary().own_peak.to_dict()
        assert found[detail]["inputs"] > 512 * 64 * 4
    assert found["op"] == found["category"]


def test_detail_category_keeps_a_forward_of_several_models_one() -> None:
    """What the program makes between two of them has a graph: it is no batch."""
    encoder, decoder = nn.Linear(64, 64), net()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    found = {}
    for detail in ("op", "category"):
        with trace(encoder, decoder, optimizer, detail=detail, table=False) as t:
            for _ in range(4):
                features, wanted = fetch(512)
                functional.cross_entropy(decoder(encoder(features).exp()), wanted).backward()
                optimizer.step()
                optimizer.zero_grad()
        found[detail] = t.summary().own_peak[["inputs", "activations"]].to_dict()
    assert found["op"] == found["category"]
