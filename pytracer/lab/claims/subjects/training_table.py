"""The documents' own table: BERT-large on 512 sequences of 512 tokens, in every combination.

`training.py` trains the model for each row. Most judges compare a row with the vanilla one.
"""

from pytracer.lab.claims.claim import (
    CONFIRMED,
    DEPENDS,
    REFUTED,
    Figures,
    Measured,
    Statement,
    Verdict,
    change,
    confirmed_if,
    full_size,
    mib,
    on_gpu,
    ranged,
)

_TIMES = "Times are this CPU's, and bf16 stands in for fp16. "
_RATIOS = (
    "A model of 4 layers and width 128 shows ratios of memory and what each category does; the "
    "documents' own sizes need a GPU."
)


def _row_text(row: Figures) -> str:
    """The row as the table shows it: speed, peak, NVML."""
    shown = f"{ranged(row, 'samples_per_s')} samples/s, peak {mib(row['peak_bytes'])}"
    return f"{shown}, NVML {mib(row['nvml_used'])}" if row.get("nvml_used") else shown


def _against(row: Figures, base: Figures) -> str:
    """The row's numbers, and how they differ from another row's."""
    memory = change(row["peak_bytes"], base["peak_bytes"])
    speed = row["samples_per_s"] / base["samples_per_s"]
    return f"{_row_text(row)}: memory {memory}, {speed:.2f}x as fast"


def _state_saved(row: Figures, base: Figures) -> float:
    """Bytes of optimizer state per parameter that the row saves."""
    saved: float = base["optimizer_state_most"] - row["optimizer_state_most"]
    saved /= row["parameters"]
    return saved


# ---------------------------------------------------------------------- V1, V2: vanilla

V1 = Statement(
    "V1",
    sources=("S0", "S1"),
    quote="vanilla, batch size 4: 57.82 s, 8.86 samples/s, 14949 MB",
    arithmetic="14949 - 1343 - 16 B per parameter (5114) = 8492 MiB of activations, temporaries, "
    "cache",
)


@V1.judged_by(
    "CONFIRMED if weights, gradients and Adam are 16 B per parameter (1 %) and reserved memory "
    "is within 15 % of 14949 - 1343 MiB; DEPENDS if only the first; else REFUTED",
    experiments=("trainer_vanilla",),
    without_gpu=_RATIOS,
)
def vanilla_needs_13606_mib(measured: Measured) -> Verdict:
    """Without the 1343 MiB of the context."""
    return _vanilla(measured["trainer_vanilla"], 14949 - 1343)


V2 = Statement(
    "V2",
    sources=("S4",),
    quote="vanilla, batch size 4: 40.96 s, 12.50 samples/s, 12852 MB",
    arithmetic="12852 - 1278 that was in use before = 11574 MiB, context included",
)


@V2.judged_by(
    "as V1, of 12852 - 1278 MiB",
    experiments=("trainer_vanilla",),
    without_gpu=_RATIOS,
)
def vanilla_needs_11574_mib(measured: Measured) -> Verdict:
    """Without the 1278 MiB that were in use before."""
    return _vanilla(measured["trainer_vanilla"], 12852 - 1278)


def _vanilla(row: Figures, mib_of_document: float) -> Verdict:
    """16 B per parameter and, on a GPU, within 15 % of the document's memory."""
    states = sum(row[f"{n}_most"] for n in ("weights", "gradients", "optimizer_state"))
    per_parameter = states / row["parameters"]
    text = (
        f"{_row_text(row)}; {per_parameter:.2f} B per parameter, "
        f"activations {mib(row['activations_bytes'])}"
    )
    if abs(per_parameter - 16) > 0.16:
        return Verdict(REFUTED, text, "weights, gradients and Adam are not 16 B per parameter")
    if not (on_gpu(row) and full_size(row)):
        return Verdict(DEPENDS, text, "the model's size: this one is scaled down")
    apart = row["reserved_peak"] / 2**20 / mib_of_document - 1
    if abs(apart) <= 0.15:
        return Verdict(CONFIRMED, text)
    return Verdict(
        DEPENDS, text, f"library versions and the cache: reserved memory is {apart:+.0%}"
    )


# ---------------------------------------------------------------------- G1: gradient accumulation

G1 = Statement(
    "G1",
    sources=("S1",),
    quote="gradient accumulation, 4 of batch size 1: 66.03 s, 7.75 samples/s, 8681 MB",
    arithmetic="-42 % memory, +14 % time; what is left beyond 16 B per parameter is 1/3.8: as the "
    "batch",
)


@G1.judged_by(
    "CONFIRMED if memory falls by at least 25 % and activations per sample are constant "
    "within 2 %; else REFUTED",
    experiments=("trainer_vanilla", "trainer_accumulation"),
    without_gpu=_TIMES + _RATIOS,
)
def accumulation_saves_activations(measured: Measured) -> Verdict:
    """The peak falls, and activations are proportional to the batch."""
    row, base = measured["trainer_accumulation"], measured["trainer_vanilla"]
    slope = (row["activations_most"] / row["batch"]) / (base["activations_most"] / base["batch"])
    falls = row["peak_bytes"] <= 0.75 * base["peak_bytes"]
    text = f"{_against(row, base)}; activations per sample x {slope:.4f}"
    return confirmed_if(falls and abs(slope - 1) <= 0.02, text)


# ---------------------------------------------------------------------- C1: checkpointing

C1 = Statement(
    "C1",
    sources=("S1",),
    quote="checkpointing: 85.47 s, 5.99 samples/s, 6775 MB; slows down training by about 20 %",
    arithmetic="+29.4 %, not 20 %; a second forward is a third of the FLOPs: +33 %",
)
_SECOND_FORWARD = 1 / 3  # of a step's FLOPs


@C1.judged_by(
    "CONFIRMED if memory falls and a step takes 15 to 25 % longer, within its spread; DEPENDS if "
    "memory falls and the model is scaled down, or a batch that fills the GPU (C2's) takes no "
    "more than a third longer; else REFUTED",
    experiments=("trainer_accumulation", "trainer_checkpointing"),
    welcome=("checkpoint_curve",),
    without_gpu=_TIMES + _RATIOS,
)
def checkpointing_costs_a_fifth_of_the_time(measured: Measured) -> Verdict:
    """The peak falls, and the interval of the slowdown meets 15 to 25 %."""
    row, base = measured["trainer_checkpointing"], measured["trainer_accumulation"]
    slower = row["step_s"] / base["step_s"] - 1
    least = row.get("step_s_low", row["step_s"]) / base.get("step_s_high", base["step_s"]) - 1
    most = row.get("step_s_high", row["step_s"]) / base.get("step_s_low", base["step_s"]) - 1
    text = f"{_against(row, base)}; {slower:+.1%} ({least:+.1%} to {most:+.1%}) time"
    if row["peak_bytes"] >= base["peak_bytes"]:
        return Verdict(REFUTED, text)
    if not (on_gpu(row) and full_size(row)):
        return Verdict(DEPENDS, text, "the model's size for the time: this one is scaled down")
    full_batch = measured.get("checkpoint_curve")
    if least > 0.25 and full_batch and full_batch["slower"] <= 1 + _SECOND_FORWARD:
        because = (
            "what limits: here the host, which hands out a batch of 1 in more time than the GPU "
            f"needs for it; at batch size {full_batch['batch']} it takes {full_batch['slower']:.2f}x"
        )
        return Verdict(DEPENDS, text, because)
    return confirmed_if(least <= 0.25 and most >= 0.15, text)


# ---------------------------------------------------------------------- F1, F2: fp16

F1 = Statement(
    "F1",
    sources=("S1",),
    quote="fp16: 27.46 s, 18.64 samples/s, 13939 MB; almost twice as fast; 1.5x the original model",
    arithmetic="2.11x as fast, -6.8 % memory; but added to accumulation and checkpointing +7.4 %",
)


@F1.judged_by(
    "CONFIRMED if at least 1.6x as fast with no more than 5 % more memory; DEPENDS where there "
    "is no GPU, or batches that fill it (P1's BERT) are that fast; else REFUTED",
    experiments=("trainer_vanilla", "trainer_fp16", "trainer_all", "trainer_checkpointing"),
    welcome=("trainer_bf16", "autocast_models"),
    without_gpu=_TIMES + _RATIOS,
)
def fp16_is_almost_twice_as_fast(measured: Measured) -> Verdict:
    """1.6x as fast without more memory."""
    row, base = measured["trainer_fp16"], measured["trainer_vanilla"]
    added, without = measured["trainer_all"], measured["trainer_checkpointing"]
    speed = row["samples_per_s"] / base["samples_per_s"]
    text = (
        f"{_against(row, base)}; added to accumulation and checkpointing: memory "
        f"{change(added['peak_bytes'], without['peak_bytes'])}; 16-bit copies of weights "
        f"{row['weights_most'] / base['weights_most']:.2f}x the weights"
    )
    if "trainer_bf16" in measured:
        text += f"; bf16 {measured['trainer_bf16']['samples_per_s']:.2f} samples/s"
    if not on_gpu(row):
        return Verdict(DEPENDS, text, "a GPU with 16-bit units: this is a CPU's bf16")
    small = row["peak_bytes"] <= 1.05 * base["peak_bytes"]
    full_batch_speed = measured.get("autocast_models", {}).get("bert_faster", 0)
    if speed < 1.6 and small and full_batch_speed >= 1.6:
        because = (
            "what limits: here the host, which hands out a batch of 4 in more time than the GPU "
            f"needs for it; in full batches autocast makes BERT {full_batch_speed:.2f}x as fast"
        )
        return Verdict(DEPENDS, text, because)
    return confirmed_if(speed >= 1.6 and small, text)


F2 = Statement(
    "F2",
    sources=("S1",),
    quote="accumulation, checkpointing and fp16: 50.76 s, 10.09 samples/s, 7275 MB; about half the "
    "memory, slightly faster",
    arithmetic="48.7 % of the memory, 12 % faster",
)


@F2.judged_by(
    "CONFIRMED if memory is 35 to 65 % and it is no slower; REFUTED if not; DEPENDS where "
    "memory is and there is no GPU",
    experiments=("trainer_vanilla", "trainer_all"),
    without_gpu=_TIMES + _RATIOS,
)
def all_three_halve_the_memory(measured: Measured) -> Verdict:
    """About half the memory, and at least the speed."""
    row, base = measured["trainer_all"], measured["trainer_vanilla"]
    memory = row["peak_bytes"] / base["peak_bytes"]
    faster = row["samples_per_s"] >= base["samples_per_s"]
    text = _against(row, base)
    if not 0.35 <= memory <= 0.65:
        return Verdict(REFUTED, text)
    if not on_gpu(row):
        return Verdict(DEPENDS, text, "a GPU with 16-bit units for the speed; memory is as said")
    return confirmed_if(faster, text)


# ---------------------------------------------------------------------- O4 to O6: other optimizers

O4 = Statement(
    "O4",
    sources=("S1", "S4"),
    quote="Adafactor: 64.31 s, 7.96 samples/s, 12295 MB (S4: 43.82 s, 11.69 samples/s, 10440 MB)",
    arithmetic="-8.30 and -7.55 B per parameter, +11 % and +7 % time",
)


@O4.judged_by(
    "CONFIRMED if its state is at least 3.8 B per parameter less than AdamW's and the peak "
    "falls; else REFUTED",
    experiments=("trainer_vanilla", "trainer_adafactor"),
    without_gpu=_TIMES + _RATIOS,
)
def adafactor_saves_state(measured: Measured) -> Verdict:
    """At least 3.8 of AdamW's 8 B per parameter, and a lower peak."""
    row, base = measured["trainer_adafactor"], measured["trainer_vanilla"]
    saved = _state_saved(row, base)
    peak = (base["peak_bytes"] - row["peak_bytes"]) / row["parameters"]
    text = (
        f"{_against(row, base)}; optimizer state {saved:.2f} B per parameter less, "
        f"peak {peak:.2f} B per parameter less"
    )
    return confirmed_if(saved >= 3.8 and peak > 0, text)


O5 = Statement(
    "O5",
    sources=("S1", "S4"),
    quote="accumulation, checkpointing, fp16 and Adafactor: 56.54 s, 9.06 samples/s, 4847 MB, 3x "
    "less",
    arithmetic="3.08x; S4 12852 / 5142 = 2.50x, where the text says 2x",
)


@O5.judged_by(
    "CONFIRMED if at least 2.55x less memory; DEPENDS from 1.5x; else REFUTED",
    experiments=("trainer_vanilla", "trainer_all_adafactor"),
    without_gpu=_TIMES + _RATIOS,
)
def everything_with_adafactor_needs_a_third(measured: Measured) -> Verdict:
    """At least 85 % of the promised 3x."""
    row, base = measured["trainer_all_adafactor"], measured["trainer_vanilla"]
    less = base["peak_bytes"] / row["peak_bytes"]
    text = f"{_against(row, base)}; {less:.2f}x less memory"
    if less >= 0.85 * 3.0:
        return Verdict(CONFIRMED, text)
    if less >= 1.5:
        return Verdict(DEPENDS, text, "how much of the memory activations are")
    return Verdict(REFUTED, text)


O6 = Statement(
    "O6",
    sources=("S1",),
    quote="8-bit Adam: 55.95 s, 9.15 samples/s, 13085 MB; with everything 49.46 s, 5363 MB, 3x less",
    arithmetic="5.83 B per parameter; 2.79x",
)


@O6.judged_by(
    "CONFIRMED if 5.7 to 6.1 B per parameter are saved, and 2.5x with everything; else REFUTED",
    experiments=("trainer_vanilla", "trainer_8bit", "trainer_all_8bit"),
    without_gpu="bitsandbytes' optimizers are measured on a GPU only.",
)
def eight_bit_adam_saves_six_bytes(measured: Measured) -> Verdict:
    """About 6 of AdamW's 8 B per parameter."""
    row, base = measured["trainer_8bit"], measured["trainer_vanilla"]
    saved = _state_saved(row, base)
    all_less = base["peak_bytes"] / measured["trainer_all_8bit"]["peak_bytes"]
    text = (
        f"{_against(row, base)}; {saved:.2f} B per parameter saved; with all: {all_less:.2f}x less"
    )
    return confirmed_if(5.7 <= saved <= 6.1 and all_less >= 2.5, text)


# ---------------------------------------------------------------------- A2: Accelerate

A2 = Statement(
    "A2",
    sources=("S1",),
    quote="Accelerate: indeed it does use the same memory (5363 MB)",
)


@A2.judged_by(
    "CONFIRMED if at the peak no category differs by more than 0.1 % of it; else REFUTED",
    experiments=("trainer_all", "accelerate_all"),
    without_gpu=_RATIOS,
)
def accelerate_uses_the_same_memory(measured: Measured) -> Verdict:
    """Each category is equal at the peak, within 0.1 % of the peak."""
    trainer, accelerate = measured["trainer_all"], measured["accelerate_all"]
    names = [n for n in trainer if n.endswith("_bytes") and n != "peak_bytes"]
    apart = {n: accelerate[n] - trainer[n] for n in names}
    worst = max(apart, key=lambda n: abs(apart[n]))
    share = abs(apart[worst]) / trainer["peak_bytes"]
    text = (
        f"Trainer {mib(trainer['peak_bytes'])}, Accelerate {mib(accelerate['peak_bytes'])}; the "
        f"most that a category differs at the peak: {worst.removesuffix('_bytes')} "
        f"{apart[worst]:+,} B"
    )
    return confirmed_if(share <= 0.001, text)
