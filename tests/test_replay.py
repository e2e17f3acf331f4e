"""A trace replayed: against torch's own counters, then case by case, then as people ask."""

import json
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import pytracer
from pytracer import errors
from pytracer.analysis.allocator import (
    advice as allocator_advice,
    replay,
    settings as allocator_settings,
    steps as steps_of,
)
from pytracer.analysis.forecasts import changes
from pytracer.basics.units import size_text
from pytracer.cli import main
from pytracer.data.recorded import Trace
from pytracer.data.schema import ACTION
from pytracer.export import fits_text
from pytracer.reading.views import LoadedTrace
from tests.test_snapshot import COUNTERS, read, recorded_bytes
from tests.trace_builder import TraceBuilder

MIB = 1 << 20
GPU = {"device": "cuda:0"}
DATA = Path(__file__).parent / "data"
H200 = DATA / "h200.pytrace"


def varying(lengths: tuple[int, ...] = (60, 70, 80, 90)) -> TraceBuilder:
    """Steps whose tensors grow: what is free of the last step is too small for the next."""
    b = TraceBuilder()
    b.snapshot(**GPU)
    for length in lengths:
        with (
            b.module("model"),
            b.module("h.0"),
            b.op("aten::mm", grad=True, at=("/home/user/train.py:9",)),
        ):
            blocks = [b.alloc(length * MIB, **GPU) for _ in range(3)]
        for block in blocks:
            b.free(block)
    return b


def peak(trace: Trace, settings: str = "", **more: object) -> int:
    return replay.replay(trace, settings, **more).peak_reserved // MIB  # type: ignore[arg-type]


# ---------------------------------------------------------------- against torch


@pytest.mark.parametrize("name", ["h200", "plans-h200", "convnext-h100", "unet-h100"])
def test_a_recording_of_a_gpu_reserves_what_torch_counted(name: str) -> None:
    """Each block lies where it lay, also if the recording began after the model was made."""
    trace = pytracer.load(DATA / f"{name}.pytrace").data
    counted = trace.meta["counters"]["end"]["cuda:0"]
    found = replay.replay(trace)
    assert found.basis == replay.EXACT
    assert found.peak_reserved == counted["reserved_bytes.peak"]
    assert found.reserved == (found.peak_reserved, found.peak_reserved)
    assert found.peak_allocated == counted["allocated_bytes.peak"]
    assert found.retries == 0


def test_without_the_recorded_addresses_the_answer_is_an_interval_that_holds() -> None:
    """The orders of segments of two networks differ by 4 % of what they reserve, and by 0.2 %."""
    for name, width in (("convnext-h100", 0.04), ("unet-h100", 0.002)):
        trace = pytracer.load(DATA / f"{name}.pytrace").data
        plain = steps_of.steps(trace, "cuda:0").columns
        rules = replay.recorded_rules(trace, "cuda:0")
        found = replay.in_orders(plain, rules, replay.ORDERS)
        low, high = found["lowest_peak"], found["highest_peak"]
        assert low <= replay.replay(trace).peak_reserved <= high
        assert high / low - 1 == pytest.approx(width, abs=0.005)
        assert replay.replay(trace, "max_split_size_mb:64").basis == replay.INTERVAL
        assert replay.replay(trace, "expandable_segments:True").basis == replay.EXACT


def test_a_block_that_lies_elsewhere_than_the_model_puts_it_is_said() -> None:
    """Then a rule is missing, and no other answer can be relied on."""
    trace = pytracer.load(DATA / "unet-h100.pytrace").data
    address = trace.events.address.copy()
    made = np.flatnonzero(trace.events.action == ACTION["alloc"])[100]
    address[made] += 512
    moved = replace(trace, events=trace.events._replace(address=address))
    found = replay.replay(moved)
    assert found.basis == replay.NOT_KNOWN
    assert f"From event {made:,} on" in found.notes[0]
    assert replay.replay(moved, "max_split_size_mb:64").basis == replay.NOT_KNOWN


@pytest.mark.parametrize("name", ["plain", "expandable", "native"])
def test_memory_snapshots_of_torch_reserve_what_torch_counted(name: str, tmp_path: Path) -> None:
    """Each is replayed with the settings that it was recorded with; no memory was given back."""
    found = read(recorded_bytes(name), tmp_path).replay()
    timeline = found.timeline()
    assert int(timeline["reserved"].iloc[-1]) == COUNTERS[name]["reserved_bytes.all.current"]


TAKEN = """
import json, sys, torch
taken = []
for text in json.loads(sys.argv[1]):
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings(text)
        taken.append(True)
    except (RuntimeError, ValueError):
        taken.append(False)
print(json.dumps(taken))
"""
WRITTEN = [
    "expandable_segments:True",
    "expandable_segments:true",
    "max_split_size_mb:19",
    "max_split_size_mb:20",
    " max_split_size_mb : 64 , expandable_segments:False",
    "max_non_split_rounding_mb:19",
    "max_non_split_rounding_mb:20",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[256:1,512:2,>:8]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[100:4]",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0",
    "large_segment_size_mb:10",
    "large_segment_size_mb:11",
    "large_segment_size_mb:40,max_split_size_mb:32",
]


def test_settings_are_taken_and_refused_as_torch_does() -> None:
    """torch 2.13 and later read them in one place; earlier ones know fewer."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("this torch has no large_segment_size_mb")
    command = [sys.executable, "-c", TAKEN, json.dumps(WRITTEN)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [taken(text) for text in WRITTEN] == json.loads(done.stdout)


def taken(text: str) -> bool:
    try:
        allocator_settings.parse(text)
    except errors.UsageError:
        return False
    return True


ROUNDED = """
import ctypes, json, os, sys, torch
library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
divisions = getattr(library, name)
divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
found = []
for text in json.loads(sys.argv[1]):
    torch._C._accelerator_setAllocatorSettings(text)
    found.append([divisions(1 << (20 + power)) for power in range(16)])
print(json.dumps(found))
"""


def test_rounding_by_intervals_is_torchs() -> None:
    """Its own library says what it makes of the text."""
    lists = ("4", "[4:2,16:4,>:8]", "[256:1,512:2,1024:4,>:8]", "[>:8]", "[1:2,65536:16]")
    texts = [f"roundup_power2_divisions:{each}" for each in lists]
    command = [sys.executable, "-c", ROUNDED, json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = [list(allocator_settings.parse(text).roundup_divisions) for text in texts]
    assert ours == json.loads(done.stdout)


# ---------------------------------------------------------------- case by case


def test_other_settings_reserve_what_they_would() -> None:
    trace = varying().trace()
    assert peak(trace) == 3 * (60 + 70 + 80 + 90)
    assert peak(trace, "expandable_segments:True") == 3 * 90 + 10  # in pages of 20 MiB
    assert peak(trace, "roundup_power2_divisions:1") == 3 * (60 + 70 + 80 + 90)
    assert peak(trace, "roundup_power2_divisions:2") == 3 * (64 + 96)


def test_the_smallest_limit_runs_and_two_mebibytes_less_do_not() -> None:
    trace = varying().trace()
    smallest = replay.replay(trace, "").smallest_limit
    assert smallest == 3 * 90 * MIB
    assert replay.replay(trace, "", limit=smallest)
    below = replay.replay(trace, "", limit=smallest - 2 * MIB)
    assert not below
    assert below.failed is not None
    assert (below.failed.op, below.failed.line) == ("aten::mm", "train.py:9")
    assert below.failed.allocated == 180 * MIB
    assert below.failed.bytes == 90 * MIB


def test_the_smallest_limit_may_be_below_what_is_allocated_where_nothing_is_short() -> None:
    """An oversize block is not cut, so a cached one is larger than a new one would be."""
    b = TraceBuilder()
    b.snapshot(**GPU)
    b.free(b.alloc(80 * MIB, **GPU))
    b.free(b.alloc(110 * MIB, **GPU))
    b.alloc(64 * MIB, **GPU)
    b.free(b.alloc(100 * MIB, **GPU))
    found = replay.replay(b.trace(), "max_split_size_mb:32")
    assert found.peak_allocated == 190 * MIB
    assert found.smallest_limit == 164 * MIB
    assert replay.replay(b.trace(), "max_split_size_mb:32", limit=164 * MIB)
    assert not replay.replay(b.trace(), "max_split_size_mb:32", limit=162 * MIB)


def test_a_tight_limit_shows_the_retries() -> None:
    assert replay.replay(varying().trace(), "", limit=270 * MIB).retries == 3


def test_what_was_alive_before_comes_first_and_is_said() -> None:
    b = TraceBuilder()
    b.snapshot(**GPU)
    seed = b.seed(30 * MIB, **GPU)
    b.free(b.alloc(40 * MIB, **GPU))
    b.free(seed)
    found = replay.replay(b.trace(), "")
    assert found.peak_reserved == 70 * MIB
    assert "began late" in found.notes[0]


def segment(b: TraceBuilder, action: str, size: int) -> None:
    block = b._block(size, None, **GPU)
    b._event(action, block, size)


def test_empty_cache_is_done_where_it_was_done() -> None:
    """Without it the second, larger block would need a second segment beside the first."""
    b = TraceBuilder()
    b.snapshot(**GPU)
    segment(b, "segment_alloc", 40 * MIB)
    b.free(b.alloc(40 * MIB, **GPU))
    segment(b, "segment_free", 40 * MIB)
    segment(b, "segment_alloc", 60 * MIB)
    b.free(b.alloc(60 * MIB, **GPU))
    assert peak(b.trace()) == 60


def test_what_a_retry_gave_back_is_no_empty_cache() -> None:
    """The allocator was at its limit then; with more room it would have kept it."""
    b = TraceBuilder()
    b.meta["device_memory"] = {"allowed": {"cuda:0": 64 * MIB}}
    b.snapshot(**GPU)
    segment(b, "segment_alloc", 40 * MIB)
    b.free(b.alloc(40 * MIB, **GPU))
    segment(b, "segment_free", 40 * MIB)
    segment(b, "segment_alloc", 60 * MIB)
    b.free(b.alloc(60 * MIB, **GPU))
    assert peak(b.trace(), limit="1GiB") == 100
    assert replay.replay(b.trace()).retries == 1


def test_a_request_that_failed_is_tried_again() -> None:
    b = TraceBuilder()
    b.snapshot(**GPU)
    b.alloc(40 * MIB, **GPU)
    b.oom(30 * MIB, **GPU)
    trace = b.trace()
    assert not replay.replay(trace, "", limit=60 * MIB)
    assert replay.replay(trace, "", limit=70 * MIB)
    assert any("unknown" in note for note in replay.replay(trace, "").notes)


def test_the_timeline_ends_with_what_is_reserved_and_never_has_more_in_use() -> None:
    timeline = replay.replay(varying().trace(), "").timeline()
    assert (timeline["unused"] >= 0).all()
    assert (timeline["largest_free"] <= timeline["unused"]).all()
    assert timeline["reserved"].max() == 900 * MIB
    assert timeline.index.is_monotonic_increasing


def test_a_trace_of_the_cpu_gets_one_clear_line() -> None:
    b = TraceBuilder()
    b.alloc(10)
    with pytest.raises(errors.UsageError, match="record on a GPU"):
        LoadedTrace(b.trace()).replay()
    with pytest.raises(errors.UsageError, match="no allocation on cuda:3; it has cuda:0"):
        LoadedTrace(varying().trace()).replay(device="cuda:3")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("backend:cudaMallocAsync", "cannot be replayed"),
        ("foo:1", "has no foo"),
        ("expandable_segments", "name:value"),
        ("max_split_size_mb:x", "whole number"),
    ],
)
def test_settings_that_torch_would_not_take_get_one_clear_line(settings: str, says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        replay.replay(varying().trace(), settings)


# ---------------------------------------------------------------- advice


def test_a_setting_is_advised_where_replay_shows_that_it_helps() -> None:
    advice = allocator_advice.to_reserve_less(varying().trace(), "cuda:0")
    assert advice is not None
    assert advice.text == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert advice.bytes == (900 - 280) * MIB


def test_what_is_on_already_is_never_advised() -> None:
    b = varying()
    b.meta["allocator_settings"] = "expandable_segments:True"
    assert allocator_advice.to_reserve_less(b.trace(), "cuda:0") is None


def test_nothing_is_advised_where_nothing_helps() -> None:
    assert allocator_advice.to_reserve_less(varying((60, 60)).trace(), "cuda:0") is None


def test_settings_are_ranked_and_what_is_set_already_stays() -> None:
    b = varying()
    b.meta["allocator_settings"] = "max_split_size_mb:128"
    choices = allocator_advice.choices(b.trace(), "cuda:0")
    needs = [choice.smallest_room for choice in choices]
    assert needs == sorted(needs)
    assert [c.settings for c in choices if c.as_recorded] == ["max_split_size_mb:128"]
    assert "max_split_size_mb:128,expandable_segments:True" in [c.settings for c in choices]
    assert "" in [c.settings for c in choices]


def pieces(settings: str = "") -> TraceBuilder:
    """Of 150 MiB 40 and 40 are free between blocks where 70 are asked for."""
    b = TraceBuilder()
    b.meta["allocator_settings"] = settings
    b.snapshot(**GPU)
    segment(b, "segment_alloc", 120 * MIB)
    whole = b.alloc(120 * MIB, **GPU)
    b.free(whole)
    parts, at = [], whole.address
    for size in (40, 20, 40, 20):
        parts.append(b.alloc(size * MIB, address=at, **GPU))
        at += size * MIB
    b.free(parts[0])
    b.free(parts[2])
    with b.module("model"), b.op("aten::mm", grad=True):
        b.oom(70 * MIB, **GPU)
    limits = {"allocated_bytes.current": 40 * MIB, "limit_bytes": 150 * MIB}
    b.meta["counters"] = {"end": {"cuda:0": limits}}
    b.meta["failed"] = True
    return b


def advised(b: TraceBuilder) -> list[str]:
    trace = b.trace()
    texts = [row.change.partition(" ")[0] for row in changes.changes(trace, "cuda:0")]
    return [text for text in texts if text.startswith("PYTORCH_ALLOC_CONF")]


def test_the_post_mortem_advises_a_setting_that_would_have_served_the_request() -> None:
    assert advised(pieces()) == ["PYTORCH_ALLOC_CONF=expandable_segments:True"]
    assert advised(pieces("expandable_segments:True")) == []


# ---------------------------------------------------------------- fits


def test_a_card_that_is_too_small_for_one_setting_may_do_with_another() -> None:
    b = TraceBuilder()
    b.snapshot(**GPU)
    for _ in range(2):
        whole = b.alloc(60 * MIB, **GPU)
        b.free(whole)
        b.alloc(20 * MIB, **GPU)
    b.free(b.alloc(70 * MIB, **GPU))
    b.meta["imagined"] = {"title": "a card with nothing beside torch's allocator", "beside": 0}
    found = LoadedTrace(b.trace()).fits(150 * MIB)
    assert found.smallest_card == 130 * MIB
    tight = LoadedTrace(b.trace()).fits(125 * MIB)
    assert not tight
    assert tight.helps is not None
    assert tight.helps.settings == "expandable_segments:True"
    assert "but with expandable_segments:True" in str(tight)


def test_what_the_card_holds_beside_the_allocator_comes_from_the_ledger() -> None:
    """Context and libraries, the driver's reserve, and what no process is listed for."""
    t = pytracer.load(H200)
    found = t.fits()
    ledger = t.ledger()
    rows = ledger[(ledger["level"] == 1) & (ledger["name"] != "torch's allocator")]
    assert found.beside == int(rows["bytes"].sum())
    assert found.smallest_card == found.beside + found.replay.smallest_room
    assert t.fits(found.smallest_card)
    assert not t.fits(found.smallest_card - 2 * MIB)


def test_who_holds_what_adds_layers_that_are_alike() -> None:
    found = pytracer.load(H200).fits("1.5GiB")
    assert not found
    assert found.holders[0].module == "blocks.*.mlp.*"
    assert found.holders[0].category == "activations"
    assert found.holders[0].line.endswith("demo.py:29")


def test_what_is_printed_adds_up() -> None:
    """The two parts of the smallest card, and the card; whatever digits they end in."""
    parts = st.tuples(st.integers(1, 1 << 42), st.integers(1, 1 << 42))

    @given(parts)
    def adds_up(amounts: tuple[int, int]) -> None:
        texts = fits_text._adding_up(amounts)
        total, unit = size_text(sum(amounts)).split()
        numbers = [text.split() for text in texts]
        assert {of for _, of in numbers} == {unit}
        assert sum(Decimal(number) for number, _ in numbers) == Decimal(total)

    adds_up()
    text = str(pytracer.load(DATA / "convnext-h100.pytrace").fits())
    assert "needs a card of 3.54 GiB" in text
    assert "1.22 GiB are the context" in text
    assert "needs 2.32 GiB, and reserves between 2.38 GiB and 2.49 GiB if it can" in " ".join(
        text.split()
    )


def test_a_card_that_is_full_before_the_allocator_starts_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That is an answer and no error of usage."""
    file = str(DATA / "convnext-h100.pytrace")
    assert main(["fits", file, "--on", "1GiB"]) == errors.BudgetExceeded.exit_code
    said = " ".join(capsys.readouterr().out.split())
    assert "no, not on 1.00 GiB: all of it is in use before torch's allocator starts" in said
    assert main(["fits", file, "--on", "1GiB", "--plan"]) == errors.BudgetExceeded.exit_code


def test_a_card_on_which_only_some_orders_of_segments_run_may_fit() -> None:
    """Only an answer for all orders is a yes; the setting that makes it one is named."""
    found = pytracer.load(DATA / "convnext-h100.pytrace").fits("3.52GiB")
    assert not found
    assert found.verdict == "may fit"
    assert found.basis == replay.INTERVAL
    assert found.helps is not None
    assert "perhaps, on 3.52 GiB: a request fails in 3 of 64 orders" in " ".join(str(found).split())
    assert fits_text.on_a_card(found).startswith("may fit: a request fails in 3 of 64 orders")


def test_a_long_setting_and_what_is_said_of_it_stay_apart() -> None:
    b = varying()
    b.meta["allocator_settings"] = "expandable_segments:True"
    rows = str(LoadedTrace(b.trace()).fits("2GiB")).splitlines()
    at = next(i for i, row in enumerate(rows) if "max_split_size_mb:64" in row)
    assert rows[at].split() == ["280", "MiB", "expandable_segments:True,max_split_size_mb:64"]
    assert rows[at + 1].split() == ["fits"]


def test_the_settings_are_a_table() -> None:
    found = LoadedTrace(varying().trace()).fits("1GiB").settings()
    assert found["smallest_card"].is_monotonic_increasing
    assert {"settings", "peak_reserved", "retries", "runs", "as_recorded"} <= set(found.columns)


def test_the_command_says_the_same_and_exits_with_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = varying().trace().save(tmp_path / "run.pytrace")
    assert main(["fits", str(path), "--on", "2GiB"]) == 0
    assert capsys.readouterr().out.startswith("fits      yes, on 2.00 GiB")
    assert main(["fits", str(path), "--on", "1GiB"]) == errors.BudgetExceeded.exit_code
    assert capsys.readouterr().out.startswith("fits      perhaps, on 1.00 GiB")
    assert main(["fits", str(path), "--on", "200MiB"]) == errors.BudgetExceeded.exit_code
    assert "fails at  70.0 MiB for aten::mm" in capsys.readouterr().out
    assert main(["fits", str(path), "--on", "200MiB", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["failed"]["bytes"] == 70 * MIB
    assert document["fits"] is False
    assert main(["fits", str(path), "--on", "much"]) == errors.UsageError.exit_code
    capsys.readouterr()
    assert main(["fits", str(path), "--on", "rtx4090"]) == 0
    assert capsys.readouterr().out.startswith("fits      yes, on 23.6 GiB")
    assert main(["fits", str(path), "--on", "RTX4900"]) == errors.UsageError.exit_code
    said = capsys.readouterr().err
    assert "no card is called 'RTX4900'; did you mean 'RTX4090'?" in said
    assert said.endswith("For another card, write its size: --on 24GiB\n")


def test_fits_of_a_trace_of_the_cpu_names_the_imagined_card(tmp_path, capsys) -> None:
    builder = TraceBuilder()
    builder.alloc(MIB, device="cpu")
    file = builder.trace().save(tmp_path / "cpu.pytrace")
    assert main(["fits", str(file), "--on", "24GiB"]) == errors.UsageError.exit_code
    assert capsys.readouterr().err == (
        "pytracer: this trace is of the CPU, and fits needs one of a GPU, or of an imagined one. Type "
        "`pytracer imagine --on RTX4090 --keep traces train.py`, then "
        "`pytracer fits traces/RTX4090.pytrace --on 24GiB`\n"
    )


def test_a_run_that_does_not_fit_tells_the_failure_and_the_card_it_needs() -> None:
    tight = LoadedTrace(varying().trace()).fits("8MiB")
    failed = tight.replay.failed
    assert failed is not None
    text = fits_text.on_a_card(tight)
    assert text.startswith(
        f"does not fit: an allocation of {size_text(failed.bytes)} fails when torch has reserved "
    )
    least, sure = size_text(tight.smallest_card), size_text(tight.surely_needs)
    needs = (
        f"torch's allocator needs {least}, and the card must have more; {sure} are surely enough"
    )
    assert needs in text
    assert text.endswith("beside torch's allocator: not measured; up to 1.20 GiB are counted")
    page = " ".join(str(tight).split())
    assert "beside torch's allocator: not measured; up to 1.20 GiB are counted" in page
    assert "settings what torch's allocator needs with each, as replayed" in page
    assert "needs a card of" not in page


def test_the_card_that_is_surely_enough_is_enough() -> None:
    """And between the two cards that the answer names, it is not known."""
    run = LoadedTrace(varying().trace())
    asked = run.fits()
    assert asked.smallest_card < asked.surely_needs
    assert run.fits(asked.surely_needs).verdict == "fits"
    assert run.fits(asked.surely_needs - 1).verdict == "may fit"


def test_every_step_of_a_trace_is_in_its_order() -> None:
    """A block comes before it goes, and goes once."""
    found = steps_of.steps(pytracer.load(H200).data, "cuda:0")
    kind, block = found.columns["kind"], found.columns["block"]
    born = dict(zip(block[kind == 0].tolist(), np.flatnonzero(kind == 0).tolist(), strict=True))
    gone = dict(zip(block[kind == 2].tolist(), np.flatnonzero(kind == 2).tolist(), strict=True))
    assert len(born) == (kind == 0).sum()
    assert len(gone) == (kind == 2).sum()
    assert all(born[number] < at for number, at in gone.items())
