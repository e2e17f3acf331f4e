"""What another batch or length would need: held against runs with them."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from pytracer import errors, trace
from pytracer.analysis.forecasts.laws import Shape, is_proved, predictions
from pytracer.analysis.forecasts.what_if import WhatIf
from pytracer.cli import main
from tests.test_checkpoint_plans import Residual, Stack
from tests.tiers import by_tier
from tests.what_if_programs import PROGRAMS, Made, graph, recorded


def run(model: nn.Module, *shape: int, steps: int = 2, cast: bool = False) -> trace:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with trace(model, optimizer, devices="cpu", table=False) as t:
        for _ in range(steps):
            x = torch.randn(*shape)
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


def stack(batch: int, length: int = 16, **more: object) -> trace:
    torch.manual_seed(0)
    return run(Stack(3, 32), batch, length, 32, **more)  # type: ignore[arg-type]


def images(batch: int) -> trace:
    torch.manual_seed(0)
    return run(nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8, 2)), batch, 3, 16, 16)


def test_beyond_the_largest_trace_the_answer_is_an_interval_with_a_likely_value() -> None:
    """The program may do something else there, which no number of smaller traces rules out."""
    found = stack(2).what_if(stack(3), batch=24)
    assert found.basis == "interval"
    assert found.likely == stack(24).peak.bytes
    assert found.lowest == stack(3).peak.bytes
    assert found.likely <= found.highest < 1.2 * found.likely
    assert found.with_law == 1.0
    assert "No trace has as much as batch 24, length 16" in found.notes[0]


def test_three_traces_around_a_batch_prove_it() -> None:
    """Two do not, and neither do three whose batches have a multiple in common that it lacks."""
    few, many = stack(2), stack(12)
    found = few.what_if(stack(3), many, batch=8)
    assert found.exact
    assert found.lowest == found.highest == found.likely == stack(8).peak.bytes
    assert few.what_if(many, batch=8).basis == "interval"
    even = few.what_if(stack(4), many, batch=7)
    assert even.basis == "interval"
    assert "no multiple" in even.notes[0]
    given = few.what_if(many, batch=12)
    assert given.exact
    assert given.lowest == many.peak.bytes


def test_batch_and_length_together() -> None:
    found = stack(2, 16).what_if(stack(3, 16), stack(2, 24), stack(4, 8), batch=8, seq=40)
    measured = stack(8, 40).peak.bytes
    assert found.likely == measured
    assert found.lowest <= measured <= found.highest
    assert not found.exact


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_claimed_holds(program: Callable[[Random], Made]) -> None:
    """An exact answer is what is measured, an interval has it, of programs that split, pad and cap."""
    for seed in range(by_tier(3, 4, 200)):
        random = Random(f"{program.__name__} {seed}")
        batches = sorted(random.sample(range(2, 24), random.choice([1, 2, 2, 3, 3, 4])))
        batches = [batch * random.choice([1, 1, 4]) for batch in batches]
        asked = random.randint(batches[0], 4 * max(batches))
        traces = [recorded(program, seed, batch) for batch in batches]
        found = answer(traces, asked)
        if found is not None and found.basis != "not known":
            measured = recorded(program, seed, asked).peak.bytes
            what = (seed, batches, asked, found.basis)
            assert found.lowest <= measured <= found.highest, what
            if found.exact:
                assert found.lowest == found.highest, what


def answer(traces: list[trace], asked: int) -> WhatIf | None:
    """None where the model is called with more rows in every trace."""
    try:
        return traces[0].what_if(*traces[1:], batch=asked)
    except errors.UsageError as refused:
        if "all these traces have more" not in str(refused):
            raise
    return None


def test_a_loss_in_chunks_is_never_called_exact_beyond_the_traces() -> None:
    """Below the chunk's size nothing shows it. The interval holds what the chunks save."""

    def loss(batch: int) -> trace:
        torch.manual_seed(0)
        head = nn.Linear(32, 2000)
        optimizer = torch.optim.SGD(head.parameters(), foreach=False)
        with trace(head, optimizer, devices="cpu", table=False) as t:
            for _ in range(2):
                for part in torch.randn(batch, 32).split(16):
                    head(part).logsumexp(1).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    found = loss(4).what_if(loss(8), loss(12), batch=48)
    measured = loss(48).peak.bytes
    assert found.basis == "interval"
    assert found.likely is not None
    assert found.lowest <= measured < 0.6 * found.likely


def test_edges_that_grow_on_their_own_make_the_answer_unknown() -> None:
    """The nodes are the batch, and nothing says how many edges more of them have."""
    seed = next(seed for seed in range(100) if Random(seed).randint(1, 4) and _has_extra(seed))
    traces = [recorded(graph, seed, batch) for batch in (20, 40, 60)]
    found = traces[0].what_if(*traces[1:], batch=120)
    assert found.basis == "not known"
    assert "Another size of the inputs changed on its own" in found.notes[0]


def _has_extra(seed: int) -> bool:
    random = Random(seed)
    random.randint(1, 4)
    return random.choice([0, 0, 7]) > 0


def test_fewer_rows_than_any_trace_has_are_asked_about() -> None:
    """Somebody counts graphs where the model's input has their nodes."""
    with pytest.raises(errors.UsageError, match=r"it is 20, 40\. .*nodes of a graph"):
        stack(20).what_if(stack(40), batch=4)


@pytest.mark.parametrize("batch", [6, 40])
def test_where_the_sequence_comes_first_the_batch_is_asked_for_as_the_length(batch: int) -> None:
    """The first size is 16 in both traces, whatever the batch is."""
    few, more = stack(16, 2), stack(16, 4)
    told = rf"it is 16 in both\. Only the second differs: 2, 4\. .*--seq {batch}, or seq={batch}$"
    with pytest.raises(errors.UsageError, match=told):
        few.what_if(more, batch=batch)
    assert few.what_if(more, seq=batch).likely == stack(16, batch).peak.bytes


def test_under_autocast_only_the_librarys_scratch_has_nopredictions() -> None:
    found = stack(2, cast=True).what_if(stack(3, cast=True), stack(4, cast=True), batch=12)
    assert found.lowest <= stack(12, cast=True).peak.bytes <= found.highest
    assert {(row.category, row.op) for row in found.flagged} <= {("temporaries", "aten::addmm")}


def test_convolutions_are_exact_or_an_interval_that_holds() -> None:
    found = images(2).what_if(images(3), images(4), batch=16)
    assert found.lowest <= images(16).peak.bytes <= found.highest


def test_the_order_of_the_traces_does_not_matter() -> None:
    small, large = stack(2), stack(3)
    assert small.what_if(large, batch=8) == large.what_if(small, batch=8)


def test_one_trace_shows_no_law_and_gives_an_interval_that_holds() -> None:
    found = stack(4).what_if(batch=8)
    assert found.basis == "not known"
    assert found.lowest <= stack(8).peak.bytes <= found.highest
    assert found.flagged
    assert "weights" not in {row.category for row in found.flagged}


SHAPES = (Shape(2, 8), Shape(4, 8), Shape(4, 16))


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ((100, 100, 100), {100}),
        ((20, 40, 40), {100}),  # 10 x batch
        ((160, 320, 640), {3200}),  # 10 x batch x length
        ((64, 64, 256), {1024}),  # length x length
        ((24, 44, 44), {104}),  # 4 + 10 x batch
        ((7, 9, 40), set()),
    ],
)
def test_the_simplest_law_that_holds_is_taken(seen: tuple[int, ...], told: set[int]) -> None:
    assert predictions(seen, SHAPES, Shape(10, 32)) == told


def test_a_law_is_proved_where_no_other_one_gives_another_size() -> None:
    """Of two batches a law with a square of the batch beside a constant may hold as well."""
    assert not is_proved((24, 48, 48), SHAPES, Shape(3, 8))
    assert is_proved((20, 30, 50), (Shape(2, 8), Shape(3, 8), Shape(5, 8)), Shape(4, 8))


def test_laws_that_differ_give_all_that_they_say() -> None:
    """Batch and length grew together: which of them it was cannot be told."""
    told = predictions((20, 40), (Shape(2, 8), Shape(4, 16)), Shape(4, 32))
    assert told == {40, 80}


def test_what_never_changed_is_not_extrapolated() -> None:
    with pytest.raises(errors.UsageError, match=r"seq=64: .* have seq 16; also record another seq"):
        stack(2).what_if(stack(3), seq=64)


def test_the_batch_is_that_of_what_the_model_is_called_with() -> None:
    """A loss is given its target flattened, and that may have as many bytes as the batch."""

    def words(rows: int) -> trace:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))
        optimizer = torch.optim.SGD(model.parameters(), foreach=False)
        with trace(model, optimizer, devices="cpu", table=False) as t:
            for _ in range(2):
                target = torch.randint(50, (rows, 16)).flatten()
                ids = torch.randint(50, (rows, 16))
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    found = words(2).what_if(words(4), words(6), batch=12)
    assert (found.batch, found.length) == (12, 16)
    assert found.lowest <= words(12).peak.bytes <= found.highest
    assert found.likely == words(12).peak.bytes


def test_tables_of_ids_do_not_hide_the_batch() -> None:
    """Their first size is the number of tables, which never changes."""

    def tables(rows: int) -> trace:
        torch.manual_seed(0)

        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bag, self.dense = nn.EmbeddingBag(40, 8), nn.Linear(13, 8)

            def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                return self.dense(dense) + self.bag(ids[0]) + self.bag(ids[1])

        model = Sum()
        optimizer = torch.optim.SGD(model.parameters(), foreach=False)
        with trace(model, optimizer, devices="cpu", table=False) as t:
            for _ in range(2):
                dense, ids = torch.randn(rows, 13), torch.randint(40, (2, rows, 9))
                model(dense, ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    found = tables(16).what_if(tables(32), tables(48), batch=96)
    assert found.lowest <= tables(96).peak.bytes <= found.highest
    assert found.batch == 96


def test_traces_of_different_programs_get_one_clear_line() -> None:
    torch.manual_seed(0)
    other = run(Stack(4, 32), 3, 16, 32)
    with pytest.raises(errors.UsageError, match="different programs"):
        stack(2).what_if(other, batch=8)
    model = Stack(3, 32)
    alike = run(nn.Sequential(*model.h, model.head), 3, 16, 32)
    with pytest.raises(errors.UsageError, match="modules 0 are in all of them"):
        stack(2).what_if(alike, batch=8)
    with pytest.raises(errors.UsageError, match=r"2, 3 steps: .*--steps 2 train\.py"):
        stack(2).what_if(stack(3, steps=3), batch=8)
    with pytest.raises(errors.UsageError, match="say batch=32"):
        stack(2).what_if(stack(3))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(stack(batch).save(tmp_path / f"{batch}.pytrace")) for batch in (2, 3)]
    assert main(["what-if", *files, "--batch", "8"]) == 0
    assert capsys.readouterr().out.startswith("what if   batch 8, length 16 on cpu\npeak ")
    assert main(["what-if", *files, "--batch", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["basis"] == "interval"
    assert document["lowest"] < document["likely"] < document["highest"]
    assert main(["what-if", *files, "--batch", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["basis"] == "exact"
    assert document["lowest"] == document["highest"]
    assert main(["what-if", *files]) == errors.UsageError.exit_code
