"""What a row is said to be, on records written by hand."""

from dataclasses import replace
from typing import Any

import pytest

from pytracer.cost import measurements, table as cost_table
from pytracer.cost.measurements import Measured, Record
from pytracer.cost.verdicts import CONFIRMED, EXPLAINED, NONE, OFF, judge

MS = 1_000_000
PEAKS = {"copy_bytes_per_s": 4e12, "flops_per_s": {"bfloat16": 700e12}}


def record(op: str, phase: str, ms: float, **more: Any) -> Record:
    made = Record(
        module="m",
        phase=phase,
        op=op,
        pair="aten::addmm",
        node="" if phase == "forward" else "AddmmBackward0",
        kind="contraction",
        shapes="",
        dtype="bfloat16",
        calls=1,
        time_ns=round(ms * MS),
        host_ns=0,
        launches=1,
        flops=0,
        other_flops=0,
        bytes=0,
        kernel_bytes=0,
        notes=(),
        kernels=(),
    )
    return replace(made, **{"kernel_bytes": more.get("bytes", 0), **more})


def linear(backward_ms: float, *, backward_flops: int = 200, **more: Any) -> list[Record]:
    return [
        record("aten::addmm", "forward", 1, flops=100, bytes=10, **more),
        record("aten::mm", "backward", backward_ms, flops=backward_flops, bytes=20, **more),
    ]


def pointwise(
    backward_ms: float, bytes_ratio: float, by_kernel: float | None = None
) -> list[Record]:
    same = {"kind": "element-wise", "pair": "aten::gelu"}
    moved = {"bytes": round(1000 * bytes_ratio)}
    moved["kernel_bytes"] = round(1000 * (by_kernel or bytes_ratio))
    return [
        record("aten::gelu", "forward", 1, bytes=1000, **same),
        record("aten::gelu_backward", "backward", backward_ms, **moved, **same),
    ]


def verdict(records: list[Record], peaks: dict[str, Any] | None = None) -> tuple[str, str]:
    found = judge(records, rates(peaks), "kernels")
    return found.verdict, found.cause


def measured(records: list[Record], peaks: dict[str, Any] | None = None) -> Measured:
    busy = sum(each.time_ns for each in records)
    return Measured(tuple(records), "cuda", "a GPU", "kernels", busy, busy, "highest", peaks)


def rates(peaks: dict[str, Any] | None) -> Any:
    return measurements.Rates(measured([], peaks), peaks)


@pytest.mark.parametrize(
    ("ms", "expected"), [(1.79, OFF), (1.8, CONFIRMED), (2.4, CONFIRMED), (2.41, OFF)]
)
def test_about_twice_is_confirmed(ms: float, expected: str) -> None:
    assert verdict(linear(ms)) == (expected, "")


@pytest.mark.parametrize(
    ("ms", "ratio", "expected"),
    [(1.5, 1.5, CONFIRMED), (1.66, 1.5, OFF), (1.34, 1.5, OFF), (1.14, 1.0, CONFIRMED)],
)
def test_bandwidth_bound_operators_take_as_long_as_their_bytes(
    ms: float, ratio: float, expected: str
) -> None:
    """Within 0.15."""
    assert verdict(pointwise(ms, ratio)) == (expected, "")


def test_a_first_layer_is_explained() -> None:
    found, cause = verdict(linear(1, backward_flops=100))
    assert found == EXPLAINED
    assert "first layer" in cause


def test_a_cause_that_leads_elsewhere_explains_nothing() -> None:
    """A first layer should take once as long, and not thrice."""
    assert verdict(linear(3, backward_flops=100)) == (OFF, "")


def test_recomputation_is_explained() -> None:
    records = [*linear(2), record("aten::addmm", "recompute", 1, flops=100)]
    found, cause = verdict(records)
    assert found == EXPLAINED
    assert "checkpoint" in cause


def test_attentions_recomputation_is_explained() -> None:
    flash = [
        record("aten::_scaled_dot_product_flash_attention", "forward", 1, flops=100),
        record("aten::_scaled_dot_product_flash_attention_backward", "backward", 2.9, flops=250),
    ]
    found, cause = verdict(flash)
    assert found == EXPLAINED
    assert "attention" in cause


def test_a_second_read_by_the_kernels_is_explained() -> None:
    found, cause = verdict(pointwise(2.5, 1.5, by_kernel=2.5))
    assert found == EXPLAINED
    assert "2.50x the bytes" in cause


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (record("aten::sum", "backward", 1, kind="other", bytes=5), "bias"),
        (
            record("aten::add_", "backward", 1, kind="element-wise", node="AccumulateGrad"),
            "added up",
        ),
        (record("aten::add", "backward", 1, kind="element-wise", node="gradient sum"), "added up"),
    ],
)
def test_what_is_added_to_backward_is_named_with_its_share(extra: Record, name: str) -> None:
    """Without it, the ratio is the textbook's."""
    found, cause = verdict([*linear(2), extra])
    assert found == EXPLAINED
    assert name in cause
    assert "33%" in cause


def test_casts_are_explained() -> None:
    """As of weights under autocast, every forward."""
    cast = record("aten::copy_", "forward", 1, kind="data movement", notes=("cast",))
    found, cause = verdict([*linear(2), cast])
    assert found == EXPLAINED
    assert cause == "casts between types: 50% of forward, 0% of backward"
    assert verdict([*linear(4), cast])[0] == CONFIRMED
    assert verdict([*linear(6), cast]) == (OFF, "")


def test_what_is_added_does_not_explain_what_is_left() -> None:
    extra = record("aten::sum", "backward", 1, kind="other", bytes=5)
    assert verdict([*linear(4), extra]) == (OFF, "")


def test_unaligned_shapes_explain_only_the_side_that_is_slow() -> None:
    forward, backward = linear(4)
    note = ("unaligned: rows of 50257 elements of 2 B in the weight-gradient GEMM",)
    assert verdict([forward, replace(backward, notes=note)]) == (EXPLAINED, note[0])
    assert verdict([replace(forward, notes=note), backward]) == (OFF, "")
    forward, backward = linear(1)
    assert verdict([replace(forward, notes=note), backward]) == (EXPLAINED, note[0])


def with_kernels(records: list[Record], *kernels: dict[str, float]) -> list[Record]:
    """Milliseconds in each."""
    return [
        replace(
            each,
            kernels=tuple(named),
            kernel_ns=tuple(round(ms * MS) for ms in named.values()),
        )
        for each, named in zip(records, kernels, strict=True)
    ]


def test_turning_tensors_into_another_layout_is_explained_by_its_own_time() -> None:
    records = linear(3)
    turned = {"sm90_xmma_wgrad": 2.0, "cudnn::ops::nchwToNhwcKernel": 1.0}
    found, cause = verdict(with_kernels(records, {"sm90_xmma_fprop": 1.0}, turned))
    assert found == EXPLAINED
    assert cause == "tensors turned into another layout: 0% of forward, 33% of backward"
    too_little = {"sm90_xmma_wgrad": 2.9, "cudnn::ops::nchwToNhwcKernel": 0.1}
    assert verdict(with_kernels(records, {"sm90_xmma_fprop": 1.0}, too_little)) == (OFF, "")


@pytest.mark.parametrize(
    ("forward", "backward", "ms", "cause"),
    [
        ("nvjet_sm90_tst", "cutlass_80_tensorop_bf16", 4, "older chip: sm80"),
        ("nvjet_sm90_tst", "ampere_bf16_s16816gemm", 4, "older chip: sm80"),
        ("cutlass_80_tensorop_bf16", "nvjet_sm90_tst", 1, "older chip: sm80"),
        ("nvjet_sm90_tst", "nvjet_sm90_nnt", 4, ""),
        ("cutlass_80_tensorop_bf16", "nvjet_sm90_tst", 4, ""),  # the slow side has the newer one
        ("sm90_xmma_fprop", "conv_depthwise2d_grad_weight_kernel", 4, "not on tensor cores"),
    ],
)
def test_kernels_for_another_chip_explain_the_side_that_is_slow(
    forward: str, backward: str, ms: float, cause: str
) -> None:
    found = verdict(with_kernels(linear(ms), {forward: 1.0}, {backward: ms}))
    assert found[0] == (EXPLAINED if cause else OFF)
    assert cause in found[1]


def test_launch_bound_rows_are_explained() -> None:
    found, cause = verdict(linear(4, launches=300))
    assert found == EXPLAINED
    assert cause == "launch-bound: kernels of 8.3 us"


def test_memory_bound_contractions_are_explained_by_the_measured_peaks() -> None:
    """1.35 times, as a thin product that mostly writes its result: forward 4 ms of bytes, backward
    5.4. Without measured peaks nobody can say."""
    records = linear(1.35)
    wide = [
        replace(records[0], kernel_bytes=16 * 10**9),
        replace(records[1], kernel_bytes=21_600 * 10**6),
    ]
    found, cause = verdict(wide, PEAKS)
    assert found == EXPLAINED
    assert "bound by memory" in cause
    assert verdict(wide) == (OFF, "")


THIN = linear(2.7)  # as a convolution with kernels of 1x1 and few channels
THIN = [
    replace(THIN[0], flops=10**9, kernel_bytes=4 * 10**9),
    replace(THIN[1], flops=2 * 10**9, kernel_bytes=8_640 * 10**6),
]


def test_products_about_as_fast_as_a_copy_are_explained_by_it() -> None:
    """Twice the bytes in 2.7 times the time; not what is further than a quarter from a copy."""
    said = "bound by memory: 100% of a copy's bandwidth forward, 80% backward"
    assert verdict(THIN, PEAKS) == (EXPLAINED, said)
    slower = [THIN[0], replace(THIN[1], kernel_bytes=7 * 10**9)]
    assert verdict(slower, PEAKS) == (OFF, "")


def test_what_adds_up_parts_of_a_product_is_no_part_of_its_bandwidth() -> None:
    names = ("gemm", "void cudnn::cnn::reduce_wgrad_nchw_helper<float>")
    slow = replace(linear(3.0)[1], flops=2 * 10**9, kernel_bytes=8 * 10**9)
    parts = [THIN[0], replace(slow, kernels=names, kernel_ns=(2_550_000, 450_000))]
    found, cause = verdict(parts, PEAKS)
    assert found == EXPLAINED
    assert cause.endswith("78% backward, and parts of a product added up: 15% of backward")
    assert verdict([THIN[0], slow], PEAKS) == (OFF, "")


def test_a_sharper_cause_is_told_rather_than_memory() -> None:
    note = "unaligned: rows of 4095 elements of 2 B in the input gradient's GEMM"
    unaligned = [THIN[0], replace(THIN[1], notes=(note,))]
    assert verdict(unaligned, PEAKS) == (EXPLAINED, note)


def test_compiled_regions_are_explained() -> None:
    fused = [
        record("triton_poi_fused_0", "forward", 1, kind="element-wise", flops=None, bytes=None),
        record("triton_red_fused_1", "backward", 3, kind="normalisation", flops=None, bytes=None),
    ]
    fused = [replace(each, pair="CompiledFunction", kernel_bytes=None) for each in fused]
    found, cause = verdict(fused)
    assert found == EXPLAINED
    assert "compiled" in cause


def test_nothing_is_said_without_a_model_or_without_a_backward() -> None:
    unknown = [
        record("mine::op", "forward", 1, kind="other", flops=None, bytes=None),
        record("mine::op_backward", "backward", 3, kind="other", flops=None, bytes=None),
    ]
    unknown = [replace(each, kernel_bytes=None) for each in unknown]
    assert verdict(unknown) == (NONE, "")
    assert verdict(linear(2)[:1]) == (NONE, "")


def test_a_row_says_how_far_from_the_devices_peaks_it_is() -> None:
    """Half the matrix rate, and three quarters of the copy's bandwidth."""
    contraction = [record("aten::mm", "forward", 1, flops=350 * 10**9)]
    (row,) = cost_table.summarised(measured(contraction, PEAKS), {"x": contraction}, "op")
    assert row.flops_per_s == pytest.approx(350e12)
    assert row.of_peak_flops == pytest.approx(0.5)
    mover = [record("aten::gelu", "forward", 1, kind="element-wise", bytes=3 * 10**9)]
    (row,) = cost_table.summarised(measured(mover, PEAKS), {"x": mover}, "op")
    assert row.of_peak_bandwidth == pytest.approx(0.75)


def test_without_peaks_nothing_is_made_up() -> None:
    records = linear(2)
    (row,) = cost_table.summarised(measured(records), {"x": records}, "op")
    assert row.of_peak_flops is None
    assert row.of_peak_bandwidth is None


def test_tf32_is_held_against_tf32() -> None:
    peaks = {"copy_bytes_per_s": 4e12, "flops_per_s": {"float32": 50e12, "tf32": 400e12}}
    records = [record("aten::mm", "forward", 1, flops=100 * 10**9, dtype="float32")]
    found = replace(measured(records, peaks), matmul_precision="high")
    (row,) = cost_table.summarised(found, {"x": records}, "op")
    assert row.of_peak_flops == pytest.approx(0.25)
