"""`pytracer fit`: what is tried so that a program fits, what is chosen, and what is said."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import pytracer
from pytracer import errors
from pytracer.analysis.allocator import replay
from pytracer.analysis.facts import usage
from pytracer.analysis.forecasts import fitting
from pytracer.analysis.forecasts.fitting import Found, Tried, Wanted
from pytracer.analysis.forecasts.planned import Work
from pytracer.cli import main
from pytracer.data.changes import Changes
from pytracer.data.recorded import Trace, load
from pytracer.export import fit_text
from pytracer.export.terminal import Terminal
from pytracer.reading import plan_file
from pytracer.recording.applied import Applied

DATA = Path(__file__).parent / "data"
MIB, GIB = 1 << 20, 1 << 30
REAL = load(DATA / "h200.pytrace")


def needs(trace: Trace) -> int:
    return fitting.by_replay(trace, 200 * GIB, Wanted()).tried[0].needs


# ---------------------------------------------------------------- what is chosen

tried = st.builds(
    Tried,
    changes=st.sampled_from(
        [Changes(), Changes(checkpoint=("a",)), Changes(optimizer="fused"), Changes(settings="x:1")]
    ),
    peak=st.integers(1, 9),
    reserved=st.integers(1, 9),
    needs=st.integers(1, 9),
    time_ratio=st.sampled_from([1.0, 1.1, 1.5]),
    time_at_most=st.sampled_from([1.5, 1.6]),
    fits=st.booleans(),
    verdict=st.just(""),
)


@given(
    st.lists(tried, min_size=1, max_size=6), st.booleans(), st.sampled_from([1.0, 1.2, math.inf])
)
def test_the_choice_is_the_quickest_that_fits(candidates, minimise, keep_time) -> None:
    """Or the smallest that fits, if the peak is minimised; none beats it and is quick enough."""
    candidates[0] = Tried(Changes(), 9, 9, 9, 1.0, 1.0, candidates[0].fits, "")
    best = fitting._best(candidates, Wanted(minimise, keep_time))
    quick = [one for one in candidates if one.time_ratio <= keep_time]
    assert best in quick
    assert best.fits == any(one.fits for one in quick)
    rivals = [one for one in quick if one.fits] or quick
    if minimise or not best.fits:
        assert best.needs == min(one.needs for one in rivals)
    else:
        assert best.time_ratio == min(one.time_ratio for one in rivals)


@given(st.lists(tried, min_size=1, max_size=6))
def test_nothing_beats_a_row_of_the_frontier(candidates) -> None:
    """In time and memory, unless it has other bits."""
    frontier = Found(9, tuple(candidates), candidates[0]).frontier
    for one in candidates:
        for row in frontier:
            quicker = one.time_ratio <= row.time_ratio and one.time_at_most <= row.time_at_most
            quicker = quicker and one.needs < row.needs
            assert not quicker or row.changes.is_bit_equal > one.changes.is_bit_equal
    assert min(one.needs for one in candidates) == min(row.needs for row in frontier)


# ---------------------------------------------------------------- what is tried


class Program:
    """Stands for a program: its trace under some changes, and what was asked."""

    def __init__(self, answer: Callable[[Changes], Trace | None]) -> None:
        self.answer, self.asked = answer, list[Changes]()

    def __call__(self, changes: Changes) -> tuple[Trace | None, str]:
        self.asked.append(changes)
        trace = self.answer(changes)
        return trace, "" if trace is not None else "it cannot"


def test_a_program_that_fits_is_left_alone() -> None:
    program = Program(lambda _: REAL)
    found = fitting.search(program, REAL, 200 * GIB, Wanted())
    assert found
    assert not program.asked
    assert found.chosen.changes == Changes()


def test_changes_that_do_not_help_are_not_chosen() -> None:
    """The imagined run decides: a replay had promised that checkpoints would be enough."""
    program = Program(lambda _: REAL)
    found = fitting.search(program, REAL, needs(REAL) - MIB, Wanted())
    assert not found
    assert any(changes.checkpoint for changes in program.asked)
    assert found.chosen.needs == found.tried[0].needs
    assert len(program.asked) == len(set(program.asked)) <= 10
    assert found.stays
    assert found.stays[0].bytes == max(one.bytes for one in found.stays)


def test_candidates_that_cannot_be_imagined_are_named() -> None:
    found = fitting.search(Program(lambda _: None), REAL, needs(REAL) - MIB, Wanted())
    assert not found
    assert set(found.problems) == {"it cannot"}
    assert "A candidate was left out: it cannot" in fit_text.render(found)


def test_no_plan_takes_longer_than_is_allowed() -> None:
    program = Program(lambda _: REAL)
    fitting.search(program, REAL, needs(REAL) - MIB, Wanted(keep_time=1.0))
    assert not any(changes.checkpoint for changes in program.asked)


def test_another_rank_must_fit_as_well() -> None:
    found = fitting.search(Program(lambda _: REAL), REAL, 200 * GIB, Wanted())
    assert fitting.with_rank(found, 3, REAL, "") is found
    assert not fitting.with_rank(found, 3, None, "no")
    small = Found(MIB, found.tried, found.chosen)
    assert "rank 3 needs another plan" in fitting.with_rank(small, 3, REAL, "").problems


def test_what_changes_numbers_is_tried_last_and_on_request() -> None:
    program = Program(lambda _: REAL)
    fitting.search(program, REAL, needs(REAL) - MIB, Wanted())
    assert not any(changes.changes_numbers for changes in program.asked)
    asked = len(program.asked)
    fitting.search(program, REAL, needs(REAL) - MIB, Wanted(allow=("8bit", "bf16")))
    assert [one.changes_numbers for one in program.asked[asked:]] == [False] * asked + [True] * 2


@given(st.lists(tried, min_size=1, max_size=6))
def test_numbers_change_only_where_nothing_else_fits(candidates) -> None:
    other = replace(candidates[0], changes=Changes(bf16=True), fits=True, time_ratio=0.5)
    best = fitting._best([*candidates, other], Wanted())
    assert best.changes.bf16 == (not any(one.fits for one in candidates))


# ---------------------------------------------------------------- changes of numbers


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_of_8_bits_takes_the_place_of_its_like(kind) -> None:
    """It is the same object, so what holds it goes on with it."""
    pytest.importorskip("torchao.optim")
    applied = Applied(Changes(optimizer="8bit"))
    applied.begin()
    model = torch.nn.Linear(64, 64)
    optimizer = kind(model.parameters(), lr=0.5, weight_decay=0.25)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    assert applied.end() == ""
    assert type(optimizer).__name__ == f"{kind.__name__}8bit"
    assert schedule.optimizer is optimizer
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    assert type(kind(model.parameters())) is kind


def test_an_optimizer_that_has_none_of_8_bits_stays_as_it_is() -> None:
    applied = Applied(Changes(optimizer="8bit"))
    applied.begin()
    parameters = [torch.nn.Parameter(torch.ones(4))]
    kept = torch.optim.SGD(parameters), torch.optim.AdamW(parameters, maximize=True)
    assert "8bit" in applied.end()
    assert [type(one) for one in kept] == [torch.optim.SGD, torch.optim.AdamW]


def test_autocast_is_around_the_outermost_module_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    seen = []
    model[0].register_forward_hook(lambda *given: seen.append(given[2].dtype))
    applied = Applied(Changes(bf16=True))
    applied.begin()
    result = model(torch.ones(2, 4))
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert not torch.is_autocast_enabled("cpu"), "also where the model failed"
    assert applied.end() == ""
    model(torch.ones(2, 4))
    assert seen == [torch.bfloat16, torch.float32]
    assert result.dtype == torch.float32


def test_a_program_with_autocast_is_told_that_nothing_changed() -> None:
    applied = Applied(Changes(bf16=True))
    applied.begin()
    with torch.autocast("cpu", torch.bfloat16):
        torch.nn.Linear(4, 4)(torch.ones(2, 4))
    assert applied.end() == "the plan's bf16 = true changed nothing in this program"


# ---------------------------------------------------------------- from a trace


def test_a_trace_gives_settings_and_plans_by_replay() -> None:
    budget = needs(REAL) - 8 * MIB
    found = fitting.by_replay(REAL, budget, Wanted())
    assert found.how == "replayed"
    first, *others = found.tried
    assert not first.changes
    assert others
    assert all(one.changes.checkpoint for one in others), "settings of this trace are not known"
    for one in found.tried:
        assert one.fits == (one.verdict == replay.YES)
        assert not one.fits or one.needs <= budget
    assert found.tried[0].peak == usage.peak(REAL).bytes


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (0, "what lies beside torch's allocator may take all of that; the least needs"),
        (20 * MIB, "optimizer state, weights, gradients alone take 43.4 MiB; the least needs"),
    ],
)
def test_a_budget_below_the_weights_is_one_sentence(room: int, says: str) -> None:
    card = 200 * GIB - fitting.fits_room(REAL, 200 * GIB) + room
    found = fitting.by_replay(REAL, card, Wanted())
    assert says in fit_text.answer(found)
    assert found.tried[0].needs > found.chosen.needs, "and the best that is known"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("card", [200 * GIB, needs(REAL) - 8 * MIB, GIB])
def test_the_screen_is_no_wider_than_the_terminal(width: int, card: int) -> None:
    found = fitting.by_replay(REAL, card, Wanted())
    text = fit_text.render(found, Terminal(width))
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith("fits" if found else "no")


def test_the_command_writes_a_plan_of_a_trace(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    trace, size = str(DATA / "h200.pytrace"), str(needs(REAL) - 8 * MIB)
    code = main(["fit", trace, "--on", size, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["fits"] else errors.BudgetExceeded.exit_code)
    saved = plan_file.read(Path("plan.toml"))
    chosen = document["chosen"]
    assert saved.promised["peak"] == chosen["peak"]
    assert list(saved.changes.checkpoint) == chosen["changes"]["checkpoint"]
    assert main(["fit", trace, "--on", size]) == 1
    assert "plan.toml exists; -f replaces it" in capsys.readouterr().err
    assert (
        main(["fit", trace, "--on", "1GiB", "-f", "-o", "plan.toml"])
        == errors.BudgetExceeded.exit_code
    )
    out = capsys.readouterr().out
    assert "nothing that was tried surely fits on 1.00 GiB" in out
    assert "the smallest card for that is" in out
    assert "stays" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fit"], "fit needs a script"),
        (["fit", "x.py", "--on", "24XB"], "is not a size"),
        (["fit", "x.py", "--on", "H900"], "no card is called 'H900'"),
        (["fit", "--capacity", "1GiB", "--on", "24GiB", "x.py"], "leave out --capacity"),
        (["fit", "x.py", "--keep-time", "0.5"], "0.5 is not a ratio of 1 or more"),
        (["fit", "x.pytrace", "--run"], "--run needs a program, and this is a trace"),
        (["fit", "--hf", "folder", "--run"], "--run needs a program, and --hf has none"),
        (["fit", "x.py", "--allow", "4bit"], "'4bit' is not one of 8bit, bf16, lora"),
        (["fit", "x.py", "--allow", "lora"], "--allow lora is for --hf FOLDER"),
        (["fit", "x.pytrace", "--allow", "bf16"], "--allow needs a program, and this is a trace"),
        (["fit", "absent.py", "--on", "24GiB"], "cannot read absent.py"),
        pytest.param(
            ["fit", "absent.py", "--run"],
            "there is none here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here"),
        ),
        (["fit", "absent.pytrace", "--on", "24GiB"], "there is no such file"),
    ],
)
def test_a_wrong_order_is_one_clear_sentence(words, says, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code in (1, 2, 4)
    assert says in err
    assert len(err.splitlines()) == 1
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------- a program

SCRIPT = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 2048), nn.Linear(2048, 256)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


model = nn.Sequential(*(Block() for _ in range(6))).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(4096, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.ci
def test_a_program_fits_under_the_plan_that_is_found(tmp_path, monkeypatch, capsys) -> None:
    """The plain program does not fit. A run under the plan needs exactly the bytes that were promised."""
    from pytracer.imagined import script

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    command = ["fit", "--on", "T4", "--capacity", "1600MiB", "--json", "train.py"]
    code = main(command)
    document = json.loads(capsys.readouterr().out)
    assert code == 0, document
    assert not document["tried"][0]["fits"]
    chosen = document["chosen"]
    assert chosen["changes"]["checkpoint"]
    assert chosen["needs"] <= 1600 * MIB
    assert 1 < chosen["time_ratio"] < 1.5
    saved = plan_file.read(Path("plan.toml"))
    plan = script.Plan(("train.py",), False, "T4", 1600 * MIB, changes=saved.changes)
    again = script.imagine(plan, tmp_path)
    assert again.trace is not None, again.problem
    assert again.trace.peak.bytes == chosen["peak"] == saved.promised["peak"]
    replayed = fitting.by_replay(again.trace.data, 200 * GIB, Wanted())
    assert any(one.changes.settings for one in replayed.tried)


@pytest.mark.slow
@pytest.mark.ci
def test_offloading_takes_what_a_replay_says(tmp_path, monkeypatch) -> None:
    from pytracer.imagined import script

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    plain = script.Plan(("train.py",), False, "T4")
    first = script.imagine(plain, tmp_path).trace
    assert first is not None
    work = Work(first.data, "cuda:0")
    names = tuple(work.units)[:3]
    imagined = script.imagine(replace(plain, changes=Changes(offload=names)), tmp_path).trace
    assert imagined is not None
    assert imagined.peak.bytes == work.peak((), names) < first.peak.bytes


TRAINER = """\
import tempfile
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = GPT2LMHeadModel(config)
words = torch.randint(0, 512, (16, 128))
data = [{"input_ids": one, "labels": one} for one in words]
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=2, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, options, train_dataset=data).train()
print(repr(sum(float(one.double().abs().sum()) for one in model.parameters())))
"""


@pytest.mark.slow
@pytest.mark.ci
def test_micro_batches_of_the_trainer_keep_its_steps(tmp_path, monkeypatch, capsys) -> None:
    """They are tried where checkpoints are not enough, and compute the same but for rounding."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINER)
    command = ["fit", "--on", "H100", "--minimise", "peak", "--json", "train.py"]
    assert main(command) == 0
    tried = json.loads(capsys.readouterr().out)["tried"]
    by_parts = {one["changes"]["micro_batches"]: one["peak"] for one in tried}
    assert by_parts[8] < by_parts[4] < by_parts[2] < tried[0]["peak"]
    Path("plan.toml").write_text("micro_batches = 4\n")
    own = ["run", "--device", "cpu", "--no-watch", "--apply", "plan.toml"]
    root = str(Path(pytracer.__file__).parents[1])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": root}
    plain, divided = (
        subprocess.run(
            [sys.executable, *words, "train.py"],
            capture_output=True, text=True, check=True, env=environment,
        ).stdout.splitlines()[-1]
        for words in ((), ("-m", "pytracer", *own))
    )  # fmt: skip
    assert plain != divided
    assert math.isclose(float(plain), float(divided), rel_tol=1e-6)


@pytest.mark.slow
@pytest.mark.ci
def test_adapters_are_for_a_folder_of_hugging_face_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from pytracer.imagined import script

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    order = {"folder": str(tmp_path), "length": 16}
    plan = script.Plan((), False, "T4", model=order)
    plain, small = (
        script.imagine(replace(plan, changes=each), tmp_path).trace
        for each in (Changes(), Changes(lora=4))
    )
    assert plain is not None
    assert small is not None
    state = [t.peak.by_category["optimizer_state"] for t in (plain, small)]
    assert 0 < state[1] < state[0] / 4
    (tmp_path / "train.py").write_text(SCRIPT)
    program = script.Plan((str(tmp_path / "train.py"),), False, "T4", changes=Changes(lora=4))
    answer = script.imagine(program, tmp_path)
    assert answer.problem == "the plan's lora = 4 changed nothing in this program"
