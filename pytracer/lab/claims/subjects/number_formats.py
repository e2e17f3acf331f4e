"""Number formats: the largest values of fp16 and bf16, TF32's precision, Ampere's formats."""

from typing import Any

import torch

from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    EXACT,
    REFUTED,
    Measured,
    Statement,
    Verdict,
    confirmed_if,
    near,
    ranged,
)
from pytracer.lab.claims.experiment import Lab, experiment, ratio
from pytracer.lab.gemm import shapes
from pytracer.lab.gemm.device import facts, pick
from pytracer.lab.gemm.timer import Settings, Timer

# ---------------------------------------------------------------------- F3: the largest numbers

F3 = Statement(
    "F3",
    sources=("S1",),
    quote="for fp16 the biggest number is 65535; bf16 3.39e+38",
)


@experiment("number_formats")
def number_formats(lab: Lab) -> dict[str, Any]:
    """The largest numbers, from torch."""
    return {
        "fp16_max": torch.finfo(torch.float16).max,
        "bf16_max": torch.finfo(torch.bfloat16).max,
    }


@F3.judged_by(
    "CONFIRMED if both are so; else REFUTED",
    experiments=("number_formats",),
    without_gpu=EXACT,
)
def the_largest_numbers_are_these(measured: Measured) -> Verdict:
    """Both must be as the document says."""
    figures = measured["number_formats"]
    text = f"fp16 {figures['fp16_max']:.0f}, bf16 {figures['bf16_max']:.3g}"
    good = figures["fp16_max"] == 65535 and near(figures["bf16_max"], 3.39e38)
    return confirmed_if(good, text)


# ---------------------------------------------------------------------- F4: TF32

F4 = Statement(
    "F4",
    sources=("S1",),
    quote="TF32 has 10 bits of precision and is up to 3x as fast",
)


@experiment("tf32_products", gpus=1)
def tf32_products(lab: Lab) -> dict[str, Any]:
    """One product in fp32 and in tf32: error against float64, and speed."""
    size = lab.pick(2048, 8192)
    works = [shapes.Gemm(size, size, size, dtype, "forward") for dtype in ("fp32", "tf32")]
    timer = Timer(pick(lab.device), Settings(seconds=10))
    full, reduced = timer(works, null=False).timings
    figures = {"size": size, "fp32_error": full.error, "tf32_error": reduced.error}
    figures |= {"fp32_tflops": full.tflops, "tf32_tflops": reduced.tflops}
    torch.set_float32_matmul_precision("high")
    figures["bits_kept"] = _bits_kept(lab.device)
    return figures | ratio("faster", list(full.seconds), list(reduced.seconds))


def _bits_kept(device: str) -> int:
    """The most bits of a fraction that survive a product with one."""
    one = torch.eye(256, device=device)
    for bits in range(1, 24):
        x = torch.full((256, 256), 1 + 2.0**-bits, device=device)
        if not torch.equal((x @ one)[0, 0], x[0, 0]):
            return bits - 1
    return 23


@F4.judged_by(
    "REFUTED if a product does not keep 10 bits or is no faster; CONFIRMED up to 3.3x; DEPENDS "
    "above",
    experiments=("tf32_products",),
    welcome=("trainer_vanilla", "trainer_tf32"),
    without_gpu="Nothing: CPUs have no TF32.",
)
def tf32_is_up_to_three_times_as_fast(measured: Measured) -> Verdict:
    """10 bits must survive, and the product must be faster, but at most 3.3x."""
    figures = measured["tf32_products"]
    text = (
        f"{ranged(figures, 'faster')}x fp32 ({figures['tf32_tflops']:.0f} and "
        f"{figures['fp32_tflops']:.0f} TFLOP/s at {figures['size']}), {figures['bits_kept']} bits of "
        f"precision kept, error {figures['tf32_error']:.1e} instead of {figures['fp32_error']:.1e}"
    )
    training, vanilla = measured.get("trainer_tf32"), measured.get("trainer_vanilla")
    if training and vanilla:
        faster = training["samples_per_s"] / vanilla["samples_per_s"]
        text += f"; training BERT-large {faster:.2f}x"
    if figures["bits_kept"] != 10 or figures["faster"] <= 1:
        return Verdict(REFUTED, text)
    if figures["faster"] <= 3.3:
        return Verdict(CONFIRMED, text)
    return Verdict(DEPENDS, text, "the GPU: here a pure product gains more than 3x")


# ---------------------------------------------------------------------- F5: formats since Ampere

F5 = Statement(
    "F5",
    sources=("S1",),
    quote="bf16 and TF32 only since Ampere",
)


@experiment("capability", gpus=1)
def capability(lab: Lab) -> dict[str, Any]:
    """This GPU's generation, and the formats that its units have."""
    major, minor = torch.cuda.get_device_capability()
    return {
        "name": facts(pick(lab.device)).name,
        "capability": major + minor / 10,
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "tf32_rounds": _tf32_rounds(lab.device),
    }


def _tf32_rounds(device: str) -> bool:
    """Whether TF32 changes a product. Older GPUs ignore the setting."""
    x = torch.randn(512, 512, device=device)
    torch.set_float32_matmul_precision("highest")
    exact = x @ x
    torch.set_float32_matmul_precision("high")
    return not torch.equal(exact, x @ x)


@F5.judged_by(
    "CONFIRMED if this GPU has both exactly if its compute capability is at least 8; else REFUTED",
    experiments=("capability",),
    without_gpu="Nothing: it is about GPUs.",
)
def ampere_brought_bf16_and_tf32(measured: Measured) -> Verdict:
    """Compute capability 8 is Ampere's."""
    figures = measured["capability"]
    since_ampere = figures["capability"] >= 8
    text = (
        f"{figures['name']}, compute capability {figures['capability']}: bf16 "
        f"{'yes' if figures['bf16'] else 'no'}, tf32 {'yes' if figures['tf32_rounds'] else 'no'}"
    )
    as_said = figures["bf16"] == since_ampere and figures["tf32_rounds"] == since_ampere
    return confirmed_if(as_said, text)
