"""Matrix products: shapes, the statistics of timing, kernels' names, tiles and waves, the timer."""

import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from benchmarks import gemm_tables
from pytracer import errors
from pytracer.lab.gemm import (
    device,
    kernels,
    model,
    operands,
    plot,
    report,
    shapes,
    statistics,
    sweep,
)
from pytracer.lab.gemm.device import Facts
from pytracer.lab.gemm.shapes import DTYPES, CrossEntropy, Gemm
from pytracer.lab.gemm.timer import EVEN, SUSTAINED, Comparison, Pace, Settings, Timer, Timing

H200 = Facts("cuda", "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, "2.11.0", "13.0", None, None)
CPU = torch.device("cpu")
QUICK = Settings(seconds=0.01, least_rounds=3, sample_seconds=1e-4, warm_seconds=0.01)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Where several share a product, all wait for the one that another program took the core from."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------- shapes


def test_a_linear_layer_has_three_products() -> None:
    """Forward TN, input gradient NN, weight gradient NT: sizes as the chain rule has them."""
    three = shapes.linear(rows=8192, out=50257, inner=768, dtype="bf16")
    assert [(g.m, g.n, g.k, g.layout) for g in three.values()] == [
        (8192, 50257, 768, "TN"),
        (8192, 768, 50257, "NN"),
        (50257, 768, 8192, "NT"),
    ]
    assert len({g.flops for g in three.values()}) == 1


def test_an_odd_vocabulary_misaligns_one_operand_in_each_role() -> None:
    """C forward, A in both backward products; W and x stay aligned."""
    three = shapes.linear(8192, 50257, 768, "bf16")
    assert three["forward"].alignment == {"a": 128, "b": 128, "c": 2}
    assert three["dgrad"].alignment == {"a": 2, "b": 128, "c": 128}
    assert three["wgrad"].alignment == {"a": 2, "b": 128, "c": 128}


def test_rows_align_nothing_in_forward() -> None:
    """M is no operand's leading dimension there: 4095 rows ran as fast as 4096."""
    assert Gemm(4095, 4096, 4096).alignment == Gemm(4096, 4096, 4096).alignment


@pytest.mark.parametrize("role", shapes.ROLES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8", "int8"])
def test_alignment_is_of_the_strides_that_torch_sees(
    role: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading dimensions by rule are the strides of the operands that are made."""
    gemm = Gemm(48, 32, 80, dtype, role)
    ((a, b, _),) = multiplied(monkeypatch, gemm)
    assert (a.shape, b.shape) == ((gemm.m, gemm.k), (gemm.k, gemm.n))
    for name, operand in (("a", a), ("b", b)):
        lead = max(operand.stride()) * operand.itemsize
        assert gemm.alignment[name] == shapes.aligned_to(lead)


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4]))
def test_paddings_are_larger_and_better_aligned(value: int, itemsize: int) -> None:
    """Each is a multiple of 16 bytes or more, and less than 512 bytes away."""
    for padded in shapes.paddings(value, itemsize):
        assert 0 < padded - value < 512 // itemsize
        assert shapes.aligned_to(padded * itemsize) >= 16


def test_the_paddings_of_gpt2s_vocabulary() -> None:
    """Multiples of 8, 16 and 32, 64 and 128, 256 elements."""
    assert shapes.paddings(50257, 2) == [50264, 50272, 50304, 50432]
    assert shapes.paddings(50432, 2) == []
    assert shapes.paddings(20, 2) == [24, 32]  # more than twice as much cannot pay
    assert shapes.paddings(1, 2) == [8]


@given(st.integers(1, 10_000))
def test_below_shows_every_alignment_once(value: int) -> None:
    """1, 2, 4, ... 64 elements and a multiple of 128."""
    found = sorted(min(size & -size, 128) for size in shapes.below(value))
    assert found == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", (4096,)),
        ("1,2, 3", (1, 2, 3)),
        ("4088:4091", (4088, 4089, 4090, 4091)),
        ("8:24:8,5", (8, 16, 24, 5)),
    ],
)
def test_sizes_are_read(text: str, sizes: tuple[int, ...]) -> None:
    """Numbers, lists, ranges with both ends, steps."""
    assert shapes.sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "0", "-4", "4:1", "1:9:0", "1.5", "1:99999999"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """One clear line, never a list too long to hold."""
    with pytest.raises(errors.UsageError):
        shapes.sizes(text)


@pytest.mark.parametrize(
    ("gemm", "words"),
    [
        (Gemm(0, 8, 8), "m is 0"),
        (Gemm(8, -1, 8), "n is -1"),
        (Gemm(8, 8, 8, batch=0), "batch is 0"),
        (Gemm(8, 8, 8, "bf15"), "no dtype"),
        (Gemm(64, 50257, 64, "fp8"), "nearest: 50256, 50272"),
        (Gemm(64, 64, 24, "fp8"), "k is 24"),
        (Gemm(64, 12, 64, "int8"), "multiples of 8"),
        (Gemm(16, 64, 64, "int8"), "more than 16"),
        (Gemm(64, 64, 64, "fp8", batch=2), "no batched"),
        (CrossEntropy(0, 5), "rows is 0"),
    ],
)
def test_what_cannot_be_multiplied_is_refused(gemm: shapes.Work, words: str) -> None:
    """Before anything is allocated, and saying what would be possible."""
    with pytest.raises(errors.UsageError, match=words):
        shapes.check(gemm)
    assert not shapes.possible(gemm)


# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize("count", [9, 15, 50, 200])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    """Of a skewed distribution with a known median, in at least 95 of 100 draws (less chance)."""
    draw = random.Random(count)
    true = math.log(2)  # of the exponential distribution
    held = sum(
        true in statistics.median([draw.expovariate(1) for _ in range(count)]) for _ in range(800)
    )
    assert held / 800 > 0.93


def test_the_interval_is_between_the_samples_that_the_binomial_says() -> None:
    """Of nine: the second and the eighth (96.1 %). Of five: all of them, as no pair is enough."""
    nine = statistics.median([9, 1, 8, 2, 7, 3, 6, 4, 5])
    assert (nine.low, nine.median, nine.high) == (2, 5, 8)
    five = statistics.median([5, 1, 4, 2, 3])
    assert (five.low, five.high) == (1, 5)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60))
def test_an_interval_surrounds_its_median(samples: list[float]) -> None:
    """Whatever the samples."""
    found = statistics.median(samples)
    assert min(samples) <= found.low <= found.median <= found.high <= max(samples)


def test_the_same_work_twice_has_a_ratio_of_one() -> None:
    """Under drift and noise: the device slows down by half, and the interval still holds 1."""
    draw = random.Random(3)
    drift = [1 + i / 60 for i in range(31)]
    first = [d * draw.gauss(1, 0.02) for d in drift]
    second = [d * draw.gauss(1, 0.02) for d in drift]
    found = statistics.ratio(first, second)
    assert 1 in found
    assert found.noise < 0.02  # although each alone varies by half


def test_a_real_difference_is_found_under_drift() -> None:
    """5 % in one direction while the device drifts by 50 %."""
    draw = random.Random(4)
    drift = [1 + i / 60 for i in range(31)]
    first = [1.05 * d * draw.gauss(1, 0.01) for d in drift]
    second = [d * draw.gauss(1, 0.01) for d in drift]
    assert statistics.ratio(first, second).low > 1.03


def test_the_sum_of_medians_has_the_sums_interval() -> None:
    """Three measurements with known medians, one of them counted five times."""
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        groups = [(times, draw.normal(times, 0.1, 25)) for times in (1, 5, 2)]
        held += 1 + 25 + 4 in statistics.sum_of_medians(groups, draws=300)
    assert held / 200 > 0.9


# ---------------------------------------------------------------------- kernels

NAMES = [
    # name, arch, tile m x n x k, stages, cluster, align, split
    (
        "nvjet_sm90_tst_192x144_64x5_1x2_h_bz_coopB_bias_TNT",
        (90, 144, 192, 64, 5, (1, 2), None, False),
    ),
    ("nvjet_sm90_tst_192x8_64x8_2x1_v_bz_TNT", (90, 8, 192, 64, 8, (2, 1), None, False)),
    ("nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT", (90, 8, 64, 64, 16, (4, 1), None, True)),
    ("nvjet_sm100_tst_64x32_64x16_2x1_2cta_h_bz_TNT", (100, 32, 64, 64, 16, (2, 1), None, False)),
    (
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align2>"
            "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align2::Params)"
        ),
        (80, 64, 64, 32, 6, None, 2, False),
    ),
    (
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_"
            "execute_segment_k_off_kernel__5x_cublas"
        ),
        (90, 256, 128, 64, None, None, None, False),
    ),
    (
        (
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_"
            "tensor16x8x8_kernel"
        ),
        (80, 128, 128, 32, 4, None, None, False),
    ),
    (
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        (80, 256, 128, 64, 3, None, None, False),
    ),
    ("ampere_sgemm_128x64_tn", (80, 64, 128, None, None, None, None, False)),
    ("void gemmSN_TN_kernel<float, 128, 16, 2, 4>", (None,) * 7 + (False,)),
]


@pytest.mark.parametrize(("name", "expected"), NAMES, ids=[name[:40] for name, _ in NAMES])
def test_names_of_real_kernels(name: str, expected: tuple[object, ...]) -> None:
    """What cuBLAS, cuBLASLt and CUTLASS call theirs on Ampere, Hopper and Blackwell."""
    found = kernels.parse(name)
    assert dataclasses.astuple(found)[1:] == expected


def test_the_product_is_told_from_what_helps_it() -> None:
    """A reduction beside it means that k was split; copies and padding are not the product."""
    split = kernels.main_kernel(
        ["nvjet_sm90_tst_64x64_64x8_1x1_v_bz_TNT", "void cublasLt::splitKreduce_kernel<32, 16>"]
    )
    assert split is not None
    assert (split.tile_m, split.split_k) == (64, True)
    padded = kernels.main_kernel(
        ["triton_poi_fused_constant_pad_nd_0", "nvjet_sm90_tst_64x8_64x8_1x1_v"]
    )
    assert padded is not None
    assert padded.arch == 90
    assert kernels.main_kernel([]) is None


def test_a_profile_is_split_at_the_kernels_that_wait() -> None:
    """What runs before the first belongs to nobody."""
    spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    names = ["late", spin, "a", "Memset (Device)", "b", spin, spin, "c"]
    assert kernels.split_at_markers(names) == [("a", "b"), (), ("c",)]


def test_a_kernel_older_than_its_device_is_pointed_out() -> None:
    """sm80 on sm90; sm90 is right there, and so is what says nothing."""
    ampere, hopper = kernels.parse(NAMES[4][0]), kernels.parse(NAMES[0][0])
    assert sweep._is_older(ampere, H200) is True
    assert sweep._is_older(hopper, H200) is False
    assert sweep._is_older(kernels.parse("gemm_kernel"), H200) is None


# ---------------------------------------------------------------------- tiles, waves, time


@pytest.mark.parametrize(
    ("shape", "tile", "tiles", "waves", "tile_efficiency", "wave_efficiency"),
    [
        ((8192, 50257, 768), (128, 256), 12608, 96, 0.9965, 0.9949),
        ((8192, 50304, 768), (128, 256), 12608, 96, 0.9975, 0.9949),
        ((8192, 768, 50257), (128, 256), 192, 2, 1.0, 0.727),
        ((8192, 768, 50257), (128, 128), 384, 3, 1.0, 0.970),
        ((2048, 768, 768), (128, 256), 48, 1, 1.0, 0.364),
        ((4097, 4096, 4096), (256, 128), 544, 5, 0.941, 0.824),
        ((132 * 128, 256, 64), (128, 256), 132, 1, 1.0, 1.0),
    ],
)
def test_tiles_and_waves_by_hand(
    shape: tuple[int, int, int],
    tile: tuple[int, int],
    tiles: int,
    waves: int,
    tile_efficiency: float,
    wave_efficiency: float,
) -> None:
    """On 132 multiprocessors."""
    found = model.tiling(Gemm(*shape), *tile, 132)
    assert (found.tiles, found.waves) == (tiles, waves)
    assert found.tile_efficiency == pytest.approx(tile_efficiency, abs=5e-4)
    assert found.wave_efficiency == pytest.approx(wave_efficiency, abs=5e-4)


def test_one_more_column_needs_one_more_wave() -> None:
    """A100's staircase: with 108 multiprocessors 1792 columns take one wave, 1793 two."""
    one, two = (model.tiling(Gemm(1792, n, 512), 256, 128, 108) for n in (1792, 1793))
    assert (one.tiles, one.waves) == (98, 1)
    assert (two.tiles, two.waves) == (105, 1)  # 7 x 15 tiles still fit
    bigger = model.tiling(Gemm(1792, 1793, 512), 128, 256, 108)
    assert (bigger.tiles, bigger.waves) == (112, 2)


def test_full_waves_are_full() -> None:
    """The shapes that find-peak tries leave no multiprocessor idle."""
    for rows, columns in sweep.full_waves(132):
        assert model.tiling(Gemm(rows, columns, 64), 128, 256, 132).efficiency == 1


def test_the_roofline_is_the_datasheets() -> None:
    """8192 cubed is bound by arithmetic, one row by memory; dense rates, never sparse."""
    big = model.roofline(Gemm(8192, 8192, 8192), H200)
    thin = model.roofline(Gemm(1, 8192, 8192), H200)
    assert big is not None
    assert thin is not None
    assert (big.bound, thin.bound) == ("compute", "memory")
    assert big.seconds == pytest.approx(2 * 8192**3 / 989.4e12)
    assert thin.seconds == pytest.approx(thin_bytes() / 4.8e12)
    unknown = dataclasses.replace(H200, name="Some GPU")
    assert model.roofline(Gemm(8, 8, 8), unknown) is None


def thin_bytes() -> int:
    return 2 * (8192 + 8192 * 8192 + 8192)


def test_the_time_model_finds_the_constants_that_made_the_times() -> None:
    """Fitted to times of a device with known constants, it predicts products it never saw."""
    true = model.TimeModel(4e-6, 132 / 700e12, 2e-11, 1 / 4.3e12, 132, 0.0)
    draw = random.Random(0)

    def some(count: int) -> list[Gemm]:
        return [Gemm(*(64 * draw.randint(1, 128) for _ in range(3))) for _ in range(count)]

    training, other = some(14), some(40)
    tile = {g: model.tiling(g, 128, 256, 132) for g in training + other}
    fitted = model.fit([(g, tile[g], true.predict(g, tile[g])) for g in training], 132)
    assert fitted.training_error < 0.01
    wrong = [abs(fitted.predict(g, tile[g]) / true.predict(g, tile[g]) - 1) for g in other]
    assert sorted(wrong)[len(wrong) // 2] < 0.02


def test_too_few_products_fit_nothing() -> None:
    """Four constants need four products."""
    with pytest.raises(ValueError, match="four"):
        model.fit([(Gemm(8, 8, 8), None, 1.0)] * 3, 132)


# ---------------------------------------------------------------------- devices


def test_datasheets_are_found_by_the_names_that_torch_gives() -> None:
    """The longer name first: an H200 NVL is not an H200, nor a GH200."""
    names = {
        "NVIDIA H200": "H200",
        "NVIDIA H200 NVL": "H200 NVL",
        "NVIDIA GH200 480GB": "GH200",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    }
    for name, sheet in names.items():
        found = device.datasheet(name)
        assert found is not None
        assert found.name == sheet
        assert found.tflops["bf16"] < 1000  # dense: with sparsity it would be twice that
    assert device.datasheet("AMD EPYC") is None


def test_dtypes_that_a_device_lacks_are_refused() -> None:
    """By name, with those it has."""
    ampere = dataclasses.replace(H200, name="A100", capability=(8, 0))
    with pytest.raises(errors.PytracerError, match="A100 does not multiply fp8") as caught:
        device.require_dtypes(ampere, ["bf16", "fp8"])
    assert caught.value.exit_code == 1
    with pytest.raises(errors.UsageError, match="no dtype"):
        device.require_dtypes(H200, ["fp4"])
    device.require_dtypes(H200, list(DTYPES))


def test_devices_that_are_not_there_are_refused() -> None:
    """A word, a GPU too many, and a kind that cannot be timed."""
    for name in ("banana", "cuda:77", "meta"):
        with pytest.raises(errors.UsageError):
            device.pick(name)


# ---------------------------------------------------------------------- operands and the timer


@pytest.mark.parametrize("role", shapes.ROLES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8", "fp8"])
def test_products_are_right(dtype: str, role: str) -> None:
    """Verified against float64 before they are timed, in every layout and dtype."""
    prepared = operands.prepare(Gemm(64, 48, 80, dtype, role), CPU, sets=2)
    assert prepared.error <= DTYPES[dtype].tolerance
    assert len(prepared.calls) == 2


def multiplied(
    monkeypatch: pytest.MonkeyPatch, gemm: Gemm, sets: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A, B and the result of each set, after all of them were multiplied."""
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    real = operands._product

    def watched(gemm: Gemm, on: torch.device) -> Any:
        run = real(gemm, on)

        def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            seen.append((a, b, out))
            return run(a, b, out)

        return call

    monkeypatch.setattr(operands, "_product", watched)
    prepared = operands.prepare(gemm, CPU, sets)
    seen.clear()  # the one that proved it
    for each in prepared.calls:
        each()
    return seen


@pytest.mark.ci
@given(
    st.sampled_from(["bf16", "fp32", "fp8", "int8"]),
    st.tuples(*[st.integers(17, 900)] * 3),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_operands_lie_alike_in_every_set_and_none_in_another(
    dtype: str, sizes: tuple[int, int, int], batch: int, sets: int
) -> None:
    """A large one begins where a page does; of the same product, always at the same places."""
    kind = DTYPES[dtype]
    m, n, k = (-(-size // kind.multiple) * kind.multiple for size in sizes)
    gemm = Gemm(m, n, k, dtype, batch=batch if kind.bytes > 1 else 1)
    two = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operands, "_PAGE", 1 << 16)
            patch.setattr(operands, "_verify", lambda *_: 0.0)
            two.append(multiplied(patch, gemm, sets))
            taken = operands.bytes_of(gemm, sets)
    spans = [(t.data_ptr(), t.numel() * t.itemsize) for t in itertools.chain(*two[0])]
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] - spans[0][0] <= taken
    for at, size in spans:
        assert at % (1 << 16 if size >= 1 << 16 else 512) == 0
    places = [[t.data_ptr() % (1 << 16) for t in itertools.chain(*seen)] for seen in two]
    assert places[0] == places[1]


def test_every_set_is_multiplied_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the first, which is verified."""
    for a, b, out in multiplied(monkeypatch, Gemm(40, 33, 24, "fp32"), sets=5):
        torch.testing.assert_close(out, a @ b)


def test_a_wrong_product_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong column at the edge, where tails go wrong, stops the measurement."""
    real = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        real(a, b, out=out)
        out[:, -1] = 0
        return out

    monkeypatch.setattr(operands, "_product", lambda *_: wrong)
    with pytest.raises(errors.PytracerError, match="is wrong"):
        operands.prepare(Gemm(64, 500, 64, "fp32"), CPU, sets=1)


def test_an_element_that_is_never_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that the float64 sample does not look at: results are poisoned first."""
    real = torch.mm

    def lazy(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kept = out[250, 250].clone()
        real(a, b, out=out)
        out[250, 250] = kept
        return out

    monkeypatch.setattr(operands, "_product", lambda *_: lazy)
    monkeypatch.setattr(operands, "_some", lambda *_: torch.arange(10))
    with pytest.raises(errors.PytracerError, match="is wrong"):
        operands.prepare(Gemm(500, 500, 8, "fp32"), CPU, sets=1)


def test_preparing_leaves_the_programs_random_numbers_and_precision_alone() -> None:
    """What a program draws next, and how it multiplies, do not depend on a measurement."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    before = torch.backends.cuda.matmul.fp32_precision
    operands.prepare(Gemm(32, 32, 32, "fp32"), CPU, sets=1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_the_timer_times() -> None:
    """A real comparison on the CPU: samples of every round, the null, and what it was run with.

    A small product lasts as long as a large one, where a thread of either waits for a core.
    """
    timer = Timer(CPU, QUICK)
    ratios: list[float] = []
    while not ratios or (ratios[-1] <= 4 and len(ratios) < 3):
        found = timer([Gemm(64, 64, 64, "fp32"), Gemm(256, 256, 256, "fp32")], null=True)
        ratios.append(found.ratio(1).median)
        small, large = found.timings
        assert len(small.seconds) == len(large.seconds) >= 2
        assert found.null is not None
        assert found.null.work == small.work
        assert small.sets > 1
        assert found.stopped in ("steady", "time", "rounds")
    assert ratios[-1] > 4, ratios  # 64 times the work


def test_the_timer_stops_when_it_knows_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady times end at the least number of rounds, noisy ones when the time is up."""
    timer = Timer(CPU, dataclasses.replace(QUICK, least_rounds=9, seconds=30, most_rounds=40))
    monkeypatch.setattr(timer._clock, "once", lambda ready, pause: [1.0 for _ in ready])
    steady = timer([Gemm(8, 8, 8, "fp32")], null=True)
    assert (steady.stopped, len(steady.timings[0].seconds)) == ("steady", 9)
    assert steady.doubt == 0
    draw = random.Random(0)
    monkeypatch.setattr(
        timer._clock, "once", lambda ready, pause: [draw.uniform(1, 3) for _ in ready]
    )
    noisy = timer([Gemm(8, 8, 8, "fp32")], null=True)
    assert (noisy.stopped, len(noisy.timings[0].seconds)) == ("rounds", 40)
    assert noisy.doubt > 0.05


@pytest.mark.ci
def test_many_candidates_are_known_as_well_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is given to each of them: seventeen sizes of a curve get the rounds that two get."""
    timer = Timer(CPU, dataclasses.replace(QUICK, seconds=1, noise=0.0))
    draw = random.Random(0)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    def pass_of(ready: list[Any], pause: float) -> list[float]:
        nonlocal now
        now += 0.05 * len(ready)
        return [draw.uniform(1, 2) for _ in ready]

    monkeypatch.setattr(timer._clock, "once", pass_of)
    monkeypatch.setattr(time, "perf_counter", clock)
    few, many = (timer([Gemm(8, 8 + n, 8, "fp32") for n in range(count)]) for count in (2, 17))
    assert few.stopped == many.stopped == "time"
    assert len(few.timings[0].seconds) == len(many.timings[0].seconds) >= QUICK.least_rounds


def test_each_order_runs_forwards_and_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is first in one round is last in the next: places in a round are shared fairly."""
    timer = Timer(CPU, dataclasses.replace(QUICK, least_rounds=20, most_rounds=20, noise=0.0))
    orders: list[list[int]] = []

    def pass_of(ready: list[Any], pause: float) -> list[float]:
        orders.append([one.prepared.work.n for one in ready])
        return [1.0 for _ in ready]

    monkeypatch.setattr(timer._clock, "once", pass_of)
    timer([Gemm(8, n, 8, "fp32") for n in range(8, 13)])
    orders = orders[-40:]  # without the warm-up
    assert all(
        one == list(reversed(other)) for one, other in zip(orders[::2], orders[1::2], strict=True)
    )
    assert len(set(map(tuple, orders))) > 20


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [(8,), (8, 9), (8, 16, 24, 32)])
def test_a_device_that_slows_down_changes_no_ratio(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by 1 % from one sample to the next: in a round each product is before and after
    each other."""
    timer = Timer(CPU, dataclasses.replace(QUICK, seconds=30, most_rounds=15, noise=0.0))
    passed = itertools.count()

    def pass_of(ready: list[Any], pause: float) -> list[float]:
        return [one.prepared.work.n * (1 + 1e-2 * next(passed)) for one in ready]

    monkeypatch.setattr(timer._clock, "once", pass_of)
    found = timer([Gemm(8, n, 8, "fp32") for n in sizes], null=True)
    assert found.bias is not None
    assert found.bias.median == pytest.approx(1, rel=1e-6)
    assert [found.ratio(i).median for i in range(len(sizes))] == pytest.approx(
        [n / 8 for n in sizes], rel=1e-6
    )


def test_a_device_that_is_to_rest_rests_before_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not warmed up: that is what it is to recover from. Each way of a round rests."""
    done: list[str] = []
    timer = Timer(CPU, dataclasses.replace(QUICK, most_rounds=3, noise=0.0))

    def pass_of(ready: list[Any], pause: float) -> list[float]:
        done.append("run")
        return [1.0 for _ in ready]

    monkeypatch.setattr(timer._clock, "once", pass_of)
    monkeypatch.setattr("pytracer.lab.gemm.timer.time.sleep", lambda s: done.append(f"rest {s}"))
    timer([Gemm(16, 16, 16, "fp32")], pace=Pace(rest=0.25))
    assert done == ["run", *["rest 0.25", "run"] * 3 * 2]  # three rounds, both ways


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    """With what it would take and what there is."""
    with pytest.raises(errors.PytracerError, match="has room for") as caught:
        Timer(CPU, QUICK)([Gemm(10**7, 10**7, 8, "fp32")])
    assert caught.value.exit_code == 1


def test_a_sweep_of_nine_explains_each() -> None:
    """A tiny real sweep: every row has its time, its rate, its alignment and its samples."""
    groups = sweep.alignment_groups(Gemm(128, 128, 128), ("fp32",), ("forward",), ("n",))
    timer = Timer(CPU, dataclasses.replace(QUICK, seconds=0.005))
    ((group, comparison),) = sweep.run(groups, timer)
    known = sweep.Knowledge(timer.facts, {}, {"fp32": 1.0}, {})
    rows = [sweep.explain(timing, known) for timing in comparison.timings]
    assert [row["n"] for row in rows] == [128, 64, 96, 112, 120, 124, 126, 127]
    assert group.title == "fp32 forward n"
    for row in rows:
        time = row["microseconds"]
        assert 0 < time["low"] <= time["median"] <= time["high"]
        assert row["tflops"] == pytest.approx(2 * 128 * row["n"] * 128 / time["median"] / 1e6)
        assert len(row["samples_microseconds"]) == 2 * row["rounds"]
        assert row["kernel"] is None  # unknown on a CPU, not made up
    json.dumps(rows)


def test_fp8_is_swept_where_it_can_be() -> None:
    """Only sizes that are multiples of 16, and one layout."""
    groups = sweep.alignment_groups(
        Gemm(4096, 4096, 4096), ("fp8",), sweep.roles_of("fp8"), ("n", "m")
    )
    by_title = {
        group.title: [w.n if "n" in group.title else w.m for w in group.works] for group in groups
    }
    assert by_title["fp8 forward n"] == [4096, 4032, 4064, 4080]
    assert len(by_title["fp8 forward m"]) == 8


def test_two_libraries_take_turns_in_the_same_rounds() -> None:
    """So that their ratio is not the clock's; what one cannot multiply is left to the other."""
    group = sweep.Group("bf16", (Gemm(32, 32, 32), Gemm(32, 48, 32, "fp8")))
    (both,) = sweep.through([group], shapes.LIBRARIES)
    assert [(work.dtype, work.library) for work in both.works] == [
        ("bf16", "cublas"),
        ("bf16", "cublaslt"),
        ("fp8", "cublaslt"),
    ]
    with pytest.raises(errors.UsageError, match="fp8 by cublaslt only"):
        sweep.through([sweep.Group("fp8", group.works[1:])], ("cublas",))
    assert str(both.works[1]) == "32x32x32 bf16 forward by cublaslt"


def test_a_table_names_libraries_where_they_were_asked_for() -> None:
    known = sweep.Knowledge(H200, {}, {}, {})
    by = [Timing(Gemm(32, 32, 32, library=name), (1e-6, 1e-6)) for name in (None, "cublaslt")]
    plain, named = (sweep.explain(timing, known) for timing in by)
    assert "library" not in report.table([plain])
    head, _, last = report.table([plain, named]).splitlines()
    assert head.split()[5] == "library"
    assert last.split()[5] == "cublaslt"


def measured(sizes: dict[int, float], bias: float = 0.0) -> dict[str, Any]:
    """A group of a sweep whose n was varied, at these TFLOP/s."""
    rows = [
        {"m": 512, "n": n, "k": 512, "library": None, "tflops": rate} for n, rate in sizes.items()
    ]
    null = {"low": 1 - bias, "median": 1.0, "high": 1.0} if bias else None
    return {"title": "bf16 forward n", "bias": null, "rows": rows}


@pytest.mark.parametrize(
    ("sizes", "bias", "said"),
    [
        (
            {4088: 97, 4092: 40, 4095: 13, 4096: 100},
            0.001,
            "worst 4095, 7.7 times as long per FLOP as the best, 4096; multiples of 8 within 3%",
        ),
        ({4092: 40, 4095: 100}, 0.0, "worst 4092, 2.5 times as long per FLOP as the best, 4095"),
        ({4095: 99, 4096: 100}, 0.0, "all within 1% of the best per FLOP"),
        (
            {4095: 80, 4096: 100},
            0.3,
            "all within 25% of the best per FLOP, and the measurement may be off by as much",
        ),
    ],
)
def test_a_sweep_says_what_the_worst_alignment_costs(
    sizes: dict[int, float], bias: float, said: str
) -> None:
    """Nobody has to find it in a hundred rows; and noise is not told as a finding."""
    assert report.conclusions([measured(sizes, bias)]) == [f"bf16 forward n: {said}"]


def test_a_sweep_through_two_libraries_says_it_of_each() -> None:
    group = measured({4095: 50, 4096: 100})
    group["rows"] = [dict(row, library=name) for name in ("a", "b") for row in group["rows"]]
    assert [line.partition(":")[0] for line in report.conclusions([group])] == [
        "bf16 forward n, a",
        "bf16 forward n, b",
    ]


def test_the_best_is_found() -> None:
    """find-peak returns the fastest first, from a device with one size that is best; a device
    that has rested does more than one that is held down by its power, and both are told."""

    def measure(works: list[Gemm], *, null: bool = False, pace: Pace = EVEN) -> Comparison:
        best = Gemm(8192, 8192, 4096)
        rates = [
            (700e12 if pace == SUSTAINED else 800e12) if work == best else 500e12 for work in works
        ]
        times = (Timing(w, (w.flops / rate,) * 12) for w, rate in zip(works, rates, strict=True))
        return Comparison(tuple(times))

    found = sweep.find_peak(H200, "bf16", measure)  # type: ignore[arg-type]
    assert found.bursts.timings[0].work == Gemm(8192, 8192, 4096)
    assert found.bursts.timings[0].tflops == pytest.approx(800)
    assert found.sustained.timings[0].tflops == pytest.approx(700)


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    """As PNG and as SVG, from the document alone."""
    pytest.importorskip("matplotlib")
    known = sweep.Knowledge(H200, {}, {}, {})
    works = shapes.vary(Gemm(128, 128, 128), "n", shapes.below(128))
    rows = [sweep.explain(Timing(w, (1e-5, 2e-5, 2e-5, 3e-5)), known) for w in works]
    document = {"device": H200.document(), "groups": [{"title": "bf16 n", "rows": rows}]}
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        plot.check(tmp_path / name, overwrite=False)
        plot.draw(document, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
        with pytest.raises(errors.CannotWrite):
            plot.check(tmp_path / name, overwrite=False)


def test_a_line_stands_where_the_same_tile_needs_one_more_wave() -> None:
    def row(n: int, waves: int, tile_n: int = 256) -> dict[str, Any]:
        return {"n": n, "tiling": {"tile_m": 128, "tile_n": tile_n, "waves": waves}}

    rows = [
        row(100, 1),
        row(200, 1),
        row(300, 2),
        row(400, 3, tile_n=128),
        {"n": 500, "tiling": None},
    ]
    assert list(plot._wave_boundaries("n", rows)) == [250]


def test_each_library_has_a_line_of_its_own() -> None:
    rows = [{"n": n, "library": library} for n in (1, 2) for library in shapes.LIBRARIES]
    drawn = dict(plot._by_library({"title": "bf16 n", "rows": rows}))
    assert list(drawn) == ["bf16 n by cublas", "bf16 n by cublaslt"]
    assert [row["n"] for row in drawn["bf16 n by cublas"]] == [1, 2]


def test_the_readmes_table_is_made_from_what_was_measured() -> None:
    """A row per vocabulary, a column per role, the rate and whose kernel ran."""
    slow, fast = shapes.linear(8192, 50257, 768, "bf16"), shapes.linear(8192, 50304, 768, "bf16")
    kernel = kernels.parse(NAMES[4][0])
    known = sweep.Knowledge(H200, dict.fromkeys(slow.values(), kernel), {}, {})
    rows = [
        {
            "group": f"eager {gemm.role}",
            **sweep.explain(Timing(gemm, (gemm.flops / rate,) * 2), known),
        }
        for three, rate in ((slow, 95e12), (fast, 636e12))
        for gemm in three.values()
    ]
    result: dict[str, Any] = {
        "parts": {"vocabulary": {"rows": rows}},
        "device": H200.document(),
        "machine": {"torch": "2.11.0"},
        "measured": {"vocabulary": {"date": "2026-11-21T10:00:00"}},
    }
    lines = gemm_tables.vocabulary(result).splitlines()
    assert lines[0] == "| vocabulary | eager forward | eager dgrad | eager wgrad |"
    assert lines[2:4] == [
        "| 50257 | 95 (sm80) | 95 (sm80) | 95 (sm80) |",
        "| 50304 | 636 | 636 | 636 |",
    ]
    spread = {"median": 25.4, "low": 25.3, "high": 25.7}
    result["parts"]["gpt2"] = {
        "step": {"before_ms": 69.4, "saved_ms": spread, "predicted_ms": spread},
        "advice": {"dimensions": [{"name": "vocab", "advised": 50264}]},
    }
    text = gemm_tables.vocabulary(result)
    assert "50264, which would save 25.40 (25.30 to 25.70) ms of a step; applied, it saved" in text


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.cuda
@pytest.mark.alone
def test_gpu_the_same_product_twice_is_equally_fast() -> None:
    """The timer's own bias on a product that the chip's power would hold down."""
    timer = Timer(torch.device("cuda"))
    found = timer([Gemm(4096, 4096, 4096)], null=True)
    assert found.bias is not None
    assert abs(found.bias.median - 1) < 0.005
    first = found.timings[0]
    assert first.cold
    assert found.null is not None
    assert found.null.calls == first.calls
    assert first.calls % first.sets == 0  # each place in memory weighs the same


@pytest.mark.cuda
def test_gpu_every_dtype_and_role_runs_and_is_right() -> None:
    """Graphs of products, and of the loss, in what this device has."""
    timer = Timer(torch.device("cuda"), QUICK)
    for dtype in device.dtypes(timer.facts):
        for role in sweep.roles_of(dtype, shapes.ROLES):
            found = timer([Gemm(512, 256, 384, dtype, role)])
            assert found.timings[0].time.median > 0
    assert timer([CrossEntropy(256, 1001)]).timings[0].time.median > 0
    assert timer([Gemm(64, 64, 64, batch=8)]).timings[0].time.median > 0
    assert timer([Gemm(512, 333, 384, compiled=True)]).timings[0].time.median > 0


@pytest.mark.cuda
def test_gpu_a_library_is_asked_and_named_and_put_back() -> None:
    """The kernels' names are of the library that was timed, and torch's choice is as it was."""
    gpu = torch.device("cuda")
    before = torch.backends.cuda.preferred_blas_library()
    works = [Gemm(1024, 1024, 1024, library=name) for name in (None, *shapes.LIBRARIES)]
    found = Timer(gpu, QUICK)(works)
    assert [timing.work.library for timing in found.timings if isinstance(timing.work, Gemm)] == [
        None,
        *shapes.LIBRARIES,
    ]
    asked: list[str] = []
    real = torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        asked.append(str(torch.backends.cuda.preferred_blas_library()))
        return real(a, b, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", watched)
        named = kernels.names_of(works, gpu)
    assert set(named) == set(works)
    assert asked[-3:] == [str(before), "_BlasBackend.Cublas", "_BlasBackend.Cublaslt"]
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.cuda
def test_gpu_kernels_are_named() -> None:
    """Each product gets a kernel of its own profile, and the split is never off by one."""
    gpu = torch.device("cuda")
    works = [Gemm(1024, n, 1024) for n in (1024, 1023)]
    named = kernels.names_of(works, gpu)
    assert set(named) == set(works)
    assert all(kernels.main_kernel(names) for names in named.values())
