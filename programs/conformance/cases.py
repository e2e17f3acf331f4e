"""The cases, and how one is run: three times the same training, each traced in another way."""

import gc
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from programs.conformance.expected import Reference, analytic, inputs_of, storages
from programs.conformance.models import MODELS
from programs.conformance.optimizers import OPTIMIZERS
from programs.conformance.techniques import TECHNIQUES, Checkpointed, Training
from pytracer import trace
from pytracer.analysis.allocator import blocks
from pytracer.analysis.answers import breakdown, recording_quality
from pytracer.analysis.facts import usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.grouping import role_text
from pytracer.data.recorded import Trace
from pytracer.data.schema import CATEGORIES, CATEGORY

STEPS = 2
EXACT = ("weights", "gradients", "optimizer_state", "inputs")


@dataclass(frozen=True)
class Case:
    """A model, trained in a certain way."""

    model: str
    technique: str
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.technique}-{self.optimizer}"


def _cases() -> list[Case]:
    everywhere = {
        "fp32": list(MODELS),
        "autocast_bf16": ["mlp", "resnet", "bert", "gpt2", "t5", "vit", "experts"],
        "autocast_bf16_accumulation": ["gpt2", "unet"],
        "autocast_fp16": ["mlp", "gpt2", "resnet"],
        "bf16": ["llama", "vit"],
        "bf16_masters": ["mlp", "llama", "gpt2"],
        "accumulation": ["lstm", "llama_tied", "recommender"],
        "keep_gradients": ["mlp", "unet"],
        "clipping": ["lstm", "bert", "recommender"],
        "checkpoint": ["gpt2", "resnet", "t5"],
        "checkpoint_reentrant": ["bert", "gpt2"],
        "checkpoint_selective": ["llama", "vit"],
        "autocast_checkpoint": ["bert", "llama_tied"],
        "save_on_cpu": ["mlp", "gpt2"],
        "lora": ["llama", "t5"],
        "lora_autocast": ["gpt2", "llama"],
        "lora_checkpoint": ["gpt2", "llama"],
        "distillation": ["mlp", "vit", "gpt2"],
        "ema_module": ["unet", "vit"],
        "ema_dictionary": ["mlp", "unet"],
        "compile_aot": ["mlp", "gpt2"],
        "compile_inductor": ["mlp"],
        "retained_graph": ["mlp", "bert"],
        "evaluation_inside": ["resnet", "lstm", "experts"],
        "inference": ["vit", "recommender"],
        "autocast_inference": ["bert", "resnet"],
        "generation": ["gpt2", "llama"],
        "beam_search": ["gpt2", "llama_tied"],
    }
    cases = [Case(model, way) for way, models in everywhere.items() for model in models]
    cases += [Case(model, "double_backward", "sgd") for model in ("mlp", "unet")]
    for optimizer in OPTIMIZERS:
        if optimizer != "adamw":
            cases += [Case("mlp", "fp32", optimizer), Case("llama", "fp32", optimizer)]
    cases += [Case("experts", "fp32", "adafactor"), Case("gpt2", "autocast_bf16", "adamw_fused")]
    return cases


CASES = {case.name: case for case in _cases()}


@dataclass
class Result:
    """What a case showed."""

    name: str
    device: str
    size: str
    peak_bytes: int = 0
    expected: dict[str, int] = field(default_factory=dict)  # the most bytes of each exact category
    found: dict[str, int] = field(default_factory=dict)
    at_peak: dict[str, int] = field(default_factory=dict)
    agreement: float = 0.0  # of activations' bytes at the peak, with the reference
    agreement_ever: float = 0.0  # of all that ever were activations
    reference_activations: int = 0  # bytes at the peak
    unknown_share: float = 0.0
    same_with_reference: bool = False
    inputs_with_hooks: int = 0
    auto: dict[str, int] = field(default_factory=dict)
    hooks: dict[str, int] = field(default_factory=dict)
    category: dict[str, int] = field(default_factory=dict)  # with detail="category"
    category_roles: list[str] = field(default_factory=list)
    only_category: dict[str, int] = field(
        default_factory=dict
    )  # its words for blocks, of each size
    kept_by_program: int = 0  # bytes of the caches that generation is left with
    functional_at_end: int = 0
    roles: list[str] = field(default_factory=list)  # of all allocations
    hooks_see_all: bool = True
    sums_hold: bool = False

    def without_inputs(self, which: str) -> dict[str, int]:
        """The exact categories that need no saved tensor to be seen."""
        return {name: n for name, n in getattr(self, which).items() if name != "inputs"}

    def differences(self) -> dict[str, tuple[int, int]]:
        """Bytes at the peak of the categories that differ between auto and hooks."""
        pairs = {name: (self.auto[name], self.hooks[name]) for name in self.auto}
        return {name: (auto, hooks) for name, (auto, hooks) in pairs.items() if auto != hooks}

    def coarser(self) -> dict[str, int]:
        """Bytes at the peak that detail="category" has less of than op mode, by category."""
        pairs = {name: self.auto[name] - self.category.get(name, 0) for name in self.auto}
        return {name: less for name, less in pairs.items() if less}

    def document(self) -> dict[str, Any]:
        return asdict(self)


def make(case: Case, size: str, device: str) -> Training:
    """The model and its optimizer, as the technique wants them."""
    torch.manual_seed(0)
    technique = TECHNIQUES[case.technique]
    with torch.device(device):
        recipe = MODELS[case.model](size)
    training = Training(recipe, device, recipe.model.to(device))
    technique.change(training)
    training.model.to(device)
    if technique.trains:
        training.optimizer = OPTIMIZERS[case.optimizer].make(training.trained())
    return training


def record(case: Case, size: str, device: str, how: str) -> tuple[Trace, Training, Reference]:
    """One run: `how` is "auto", "hooks", "category" or "reference" (auto, and that listens)."""
    gc.collect()  # a run before this one would be in the trace as what was there already
    training = make(case, size, device)
    reference = Reference()
    targets = [training.model, training.average, training.optimizer]
    if how == "reference" and case.technique == "lora_autocast":
        reference.weights = [p for p in training.model.parameters() if p.dim() == 2]
    given = [target for target in targets if target is not None]
    mode: Any = "hooks" if how == "hooks" else "auto"
    detail: Any = "category" if how == "category" else "op"
    options: Any = {"saved_tensors": mode, "detail": detail, "devices": training.kind}
    with trace(*given, **options, table=False) as t:
        if how == "reference":
            again = [m.layer for m in training.model.modules() if isinstance(m, Checkpointed)]
            training.watch = reference
            with reference.listening(again):
                run(case, training)
        else:
            run(case, training)
        if training.kind == "cuda":
            torch.cuda.synchronize()
    return t.data, training, reference


def run(case: Case, training: Training) -> None:
    for _ in range(STEPS):
        TECHNIQUES[case.technique].step(training)


def conform(case: Case, size: str, device: str) -> Result:
    """Runs a case in every way and puts what was found beside what was expected."""
    result = Result(case.name, device, size)
    if "compile" in case.technique or "torchao" in case.optimizer:
        run(case, make(case, size, device))  # what is compiled is compiled once
    auto, training, _ = record(case, size, device, "auto")
    peak = usage.peak(auto)
    rows = {row.category: row.own_peak for row in breakdown.category_rows(auto)}
    result.peak_bytes = peak.bytes
    result.at_peak = peak.by_category
    result.found = {name: rows[name] for name in EXACT}
    result.expected = {**analytic(training, case.optimizer), **inputs_of(case.technique, training)}
    if not TECHNIQUES[case.technique].trains:
        result.expected |= {"gradients": 0, "optimizer_state": 0}
    result.unknown_share = peak.by_category["unknown"] / max(peak.bytes, 1)
    result.kept_by_program = storages(tree_leaves(training.kept))
    at_end = {row.category: row.at_end for row in breakdown.category_rows(auto)}
    result.functional_at_end = at_end["functional"]
    result.roles = _roles(auto)
    result.sums_hold = sums_hold(auto)
    result.hooks_see_all = TECHNIQUES[case.technique].hooks
    without_casts = analytic(training, case.optimizer, casts=False)["weights"]
    del training  # its memory is not to be seen by the runs that follow

    seen, training, reference = record(case, size, device, "reference")
    del training
    expected = reference.activations(seen)
    found = allocations(seen).category == CATEGORY["activations"]
    there = usage.alive(seen)
    result.agreement = agreement(seen, expected & there, found & there)
    result.reference_activations = int(allocations(seen).requested_bytes[expected & there].sum())
    result.agreement_ever = agreement(seen, expected, found)

    if case.technique == "lora_autocast":  # casts come and go: those at the peak, by their values
        result.expected["weights"] = without_casts + reference.copies_at_peak(seen)
        result.found["weights"] = peak.by_category["weights"]
    del reference
    result.same_with_reference = _at_peak(auto) == _at_peak(seen)
    for _ in range(3):  # cuDNN may choose otherwise in one run than in another, and then stay at it
        hooks, _, _ = record(case, size, device, "hooks")
        if usage.peak(hooks).bytes == usage.peak(auto).bytes:
            break
        auto, _, _ = record(case, size, device, "auto")
    result.auto, result.hooks = _at_peak(auto), _at_peak(hooks)
    for _ in range(3):
        category, _, _ = record(case, size, device, "category")
        if usage.peak(category).bytes == usage.peak(auto).bytes:
            break
    result.category, result.category_roles = _at_peak(category), _roles(category)
    result.only_category = dict(_words_at_peak(category) - _words_at_peak(auto))
    hook_rows = {row.category: row.own_peak for row in breakdown.category_rows(hooks)}
    result.inputs_with_hooks = hook_rows["inputs"]
    return result


def _roles(trace: Trace) -> list[str]:
    roles = np.unique(allocations(trace).role)
    return sorted({role_text(trace, int(role)) for role in roles} - {""})


def _at_peak(trace: Trace) -> dict[str, int]:
    return usage.peak(trace).by_category


def _words_at_peak(trace: Trace) -> Counter[str]:
    """How many blocks of each category and size there are."""
    there, found = np.flatnonzero(usage.alive(trace)), allocations(trace)
    return Counter(f"{CATEGORIES[found.category[i]]} {found.requested_bytes[i]}" for i in there)


def agreement(trace: Trace, expected: Any, found: Any) -> float:
    """Bytes in both over bytes in either."""
    size = allocations(trace).requested_bytes
    either = int(size[expected | found].sum())
    return int(size[expected & found].sum()) / either if either else 1.0


def sums_hold(trace: Trace) -> bool:
    """Law 2: at every event the categories sum to the total, and allocated is requested and more."""
    found = allocations(trace)
    for device in usage.devices(trace):
        here = usage.on_device(trace, device)
        _, levels = usage.level_columns(trace, here, found.category, len(CATEGORIES))
        _, total = usage.level_columns(trace, here, np.zeros(len(found), np.int64), 1)
        if not np.array_equal(np.sum(levels, axis=0), total[0]):
            return False
    allocated = blocks.allocated_bytes(trace)
    known = allocated != blocks.UNKNOWN
    rounding = allocated[known] - found.requested_bytes[known].astype(np.int64)
    agrees = all(row.name != "allocator_disagrees" for row in recording_quality.health_rows(trace))
    return bool((rounding >= 0).all()) and agrees
