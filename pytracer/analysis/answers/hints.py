"""One concrete suggestion that follows from the data: a change that makes the peak smaller."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pytracer import health, meta
from pytracer.analysis.allocator import advice as allocator_advice, blocks
from pytracer.analysis.answers import findings
from pytracer.analysis.facts import devices, grouping, phases, scopes, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.names import called_layer, layers_alike, numbers_text, short_line
from pytracer.recorded import Trace, once_per_trace
from pytracer.schema import ACTION, CATEGORY, PHASE, ROLE, Mask
from pytracer.units import size_text

_WORTH_A_HINT = 0.05  # of the peak
_WORTH_A_CHANGE = 0.1  # of the peak: the least that a saving must save
_SMALLEST_CHANGE = 1 << 20
_LARGE_STATE = 256 << 20  # a smaller model's state is not worth a hint
_CAN_BE_FUSED = {  # the devices for which torch has such a kernel
    "Adam": ("cpu", "cuda"),
    "AdamW": ("cpu", "cuda"),
    "SGD": ("cpu", "cuda"),
    "Adagrad": ("cpu",),
}
_MOST_APART = 8  # children of a Sequential

_WORDS = {
    "checkpoint": "torch.utils.checkpoint on them",
    "batch": "a smaller batch",
    "16 bits": "bfloat16 autocast",
    "8 bits": "an 8-bit optimizer",
    "views": "gradient_as_bucket_view=True",
}
# The same, for programs that leave it to a framework.
_WORDS_OF = {
    "transformers.Trainer": {
        "checkpoint": "gradient_checkpointing=True in TrainingArguments",
        "batch": "a smaller per_device_train_batch_size",
        "16 bits": "bf16=True in TrainingArguments",
        "8 bits": 'optim="adamw_bnb_8bit" in TrainingArguments',
    },
    "transformers.PreTrainedModel": {"checkpoint": "model.gradient_checkpointing_enable()"},
    "lightning.Trainer": {
        "16 bits": 'Trainer(precision="bf16-mixed")',
        "views": "DDPStrategy(gradient_as_bucket_view=True)",
    },
    "accelerate.Accelerator": {
        "16 bits": 'Accelerator(mixed_precision="bf16")',
        "views": "DistributedDataParallelKwargs(gradient_as_bucket_view=True)",
    },
}
_WORDS_OF["pytorch_lightning.Trainer"] = _WORDS_OF["lightning.Trainer"]


@dataclass(frozen=True)
class Hint:
    """A suggestion, and the bytes at the peak that it concerns."""

    text: str
    bytes: int


@dataclass(frozen=True)
class _Situation:
    """The input of the rules."""

    trace: Trace
    peak: usage.Peak
    at_peak: Mask

    def share(self, category: str) -> float:
        """The category's share of the bytes at the peak."""
        return self.peak.by_category[category] / max(self.peak.bytes, 1)

    def of_category(self, category: str) -> Mask:
        """The allocations of the category that are alive at the peak."""
        is_of_it: Mask = self.at_peak & (allocations(self.trace).category == CATEGORY[category])
        return is_of_it


def hint(trace: Trace, device: str | None = None) -> Hint | None:
    """The first rule that applies: mistakes first, then free savings, then other savings.

    Small savings are not advised: no hint is better. Before a saving is advised, a mistake that is
    not at the peak goes first.
    """
    if len(allocations(trace)) == 0:
        return Hint("No allocation was seen. Is the model on one of the traced devices?", 0)
    return _hint(trace, device or usage.main_device(trace))


@once_per_trace
def _hint(trace: Trace, device: str) -> Hint | None:
    peak = usage.peak(trace, device)
    now = _Situation(trace, peak, usage.alive(trace, "peak", device))
    if health.has_holes(trace.losses):  # the losses may cause anything else
        return next(_out_of_memory(now), None)
    for mistake in (_out_of_memory, _unknown, _finding):
        for each in mistake(now):
            return each
    for rules in (
        (_fused_optimizer, _fused_functions, _loss, _buckets),
        (_activations, _twins, _state, _temporaries, _cache),
    ):
        savings = [each for rule in rules for each in rule(now)]
        worth = max(_WORTH_A_CHANGE * peak.bytes, _SMALLEST_CHANGE)
        savings = [each for each in savings if each.bytes >= worth]
        if savings:
            most = max(savings, key=lambda each: each.bytes)
            return next(_finding_elsewhere(now), most)
    return None


def advised(trace: Trace, change: str) -> str:
    """The change in the words of the framework that the program trains with."""
    for framework in meta.of(trace).frameworks:
        if words := _WORDS_OF.get(framework, {}).get(change):
            return words
    return _WORDS[change]


def _out_of_memory(now: _Situation) -> Iterator[Hint]:
    events = now.trace.events
    failed = np.flatnonzero(events.action == ACTION["oom"])
    if len(failed):
        last = int(failed[-1])  # the post-mortem shows this one, too
        wanted = int(events.bytes[last])
        rows = "; the rows show who held the memory" if _rows_are_of(now, last) else ""
        yield Hint(f"An allocation of {size_text(wanted)} failed{rows}.", wanted)


def _rows_are_of(now: _Situation, position: int) -> bool:
    """Whether the same blocks were alive after that event, on its device, as at the peak."""
    device = devices.device_of_event(now.trace, position)
    there = usage.alive_at(now.trace, position) & usage.on_device(now.trace, now.peak.device)
    return device == now.peak.device and np.array_equal(there, now.at_peak)


def _unknown(now: _Situation) -> Iterator[Hint]:
    if now.share("unknown") > 0.01:
        amount = now.peak.by_category["unknown"]
        if meta.of(now.trace).imported:
            yield Hint(
                f"A memory snapshot does not show the purpose of {size_text(amount)}: record with "
                "`with pytracer.trace():` to see it.",
                amount,
            )
            return
        yield Hint(
            f"{size_text(amount)} were allocated before the trace and belong to no known module or "
            "optimizer: pass those to trace(), or start it earlier.",
            amount,
        )


def _finding(now: _Situation) -> Iterator[Hint]:
    """The finding about the largest part of the peak; growth first, because it continues."""
    rows = findings.findings(now.trace, now.peak.device)
    rows = [
        row for row in rows if row.kind == "growth" or row.at_peak > _WORTH_A_HINT * now.peak.bytes
    ]
    yield from _as_hints(sorted(rows, key=lambda row: (row.kind != "growth", -row.at_peak)))


def _finding_elsewhere(now: _Situation) -> Iterator[Hint]:
    """Findings away from the peak. A little memory held at the peak is no more than a saving."""
    rows = findings.findings(now.trace, now.peak.device)
    yield from _as_hints(row for row in rows if row.kind not in ("cache", "held"))


def _as_hints(rows: Iterable[findings.Finding]) -> Iterator[Hint]:
    for row in rows:
        yield Hint(f"{row.evidence}: {row.change}.", row.bytes)


# ---------------------------------------------------------------- savings that cost nothing


def _without(now: _Situation, which: Mask) -> int:
    """How much lower the peak would be without these allocations."""
    here = usage.on_device(now.trace, now.peak.device) & ~which
    none = np.zeros(len(here), np.int64)
    _, (level,) = usage.level_columns(now.trace, here, none, 1)
    before = int(
        allocations(now.trace).requested_bytes[here & (allocations(now.trace).start < 0)].sum()
    )
    return now.peak.bytes - max(int(level.max(initial=0)), before)


def _fused_optimizer(now: _Situation) -> Iterator[Hint]:
    """An optimizer step's temporaries, which a fused kernel does not need."""
    tree = scopes.tree(now.trace)
    steps = tree.nearest_context(tree.kind == scopes.OPTIMIZER)
    around = steps[phases.moments(now.trace).made_scope]
    scratch = (around != 0) & (allocations(now.trace).category == CATEGORY["temporaries"])
    if now.peak.phase != "optimizer" or not (scratch & now.at_peak).any():
        return
    name = now.trace.strings[tree.name[around[scratch & now.at_peak][0]]]
    kind = name.removeprefix("Optimizer.step#").partition(".step")[0]
    if kind in _CAN_BE_FUSED and now.peak.device.startswith(_CAN_BE_FUSED[kind]):
        saved = _without(now, scratch)
        yield Hint(
            f"The peak is in the step of {kind}, with {size_text(saved)} of temporaries: "
            f"{kind}(..., fused=True) avoids them, and is faster.",
            saved,
        )
    elif scopes.scopes_named(now.trace, lambda text: text.startswith("aten::_foreach"))[
        steps != 0
    ].any():
        saved = _without(now, scratch & ~_largest_of_each_op(now, scratch))
        yield Hint(
            f"The peak is in the step of {kind}, with temporaries for all parameters at once: "
            f"{kind}(..., foreach=False) makes them for one after the other, which saves "
            f"{size_text(saved)} and is slower.",
            saved,
        )


def _largest_of_each_op(now: _Situation, scratch: Mask) -> Mask:
    """What a step needs for one parameter: of each operator the largest block."""
    alloc = allocations(now.trace)
    blocks = np.flatnonzero(scratch & now.at_peak)
    blocks = blocks[np.argsort(alloc.requested_bytes[blocks], kind="stable")]
    largest = dict(zip(alloc.op[blocks].tolist(), blocks.tolist(), strict=True))
    kept = np.zeros(len(scratch), np.bool_)
    kept[list(largest.values())] = True
    return kept


@dataclass(frozen=True)
class _Fused:
    """A function that is often written by hand, and torch's own version of it."""

    name: str
    tells: tuple[str, ...]  # operators that must all occur, beside arithmetic
    instead: str


# "" and the cast are for the constants in a formula, which are made in no operator and cast.
_ARITHMETIC = (
    *("aten::mul", "aten::add", "aten::div", "aten::sub", "aten::rsub"),
    *("", "aten::_to_copy"),
)
_FUSED = (
    _Fused("GELU", ("aten::tanh", "aten::pow"), 'nn.GELU(approximate="tanh")'),
    _Fused("GELU", ("aten::erf",), "nn.GELU()"),
)


def _fused_functions(now: _Situation) -> Iterator[Hint]:
    """A function of torch's, written by hand: autograd saves the result of each of its ops."""
    alloc, strings = allocations(now.trace), now.trace.strings
    kept = now.of_category("activations") & (alloc.role == ROLE["saved"])
    forward = (alloc.phase == PHASE["forward"]) & (alloc.module != 0)
    for fused in _FUSED:
        by_hand = np.zeros(len(kept), np.bool_)
        for module in np.unique(alloc.module[kept & forward]).tolist():
            own = forward & (alloc.module == module)
            ops = {strings[op] for op in np.unique(alloc.op[own]).tolist()}
            if {*fused.tells} <= ops <= {*fused.tells, *_ARITHMETIC}:
                by_hand |= own & kept
        if by_hand.any():
            where = [row.pattern for row in repeated_modules(now.trace, by_hand, depth=False)]
            amount = int(alloc.requested_bytes[by_hand].sum())
            yield Hint(
                f"{', '.join(where[:2])} keep {size_text(amount)} for a {fused.name} that is "
                f"written by hand: {fused.instead} keeps only its input.",
                amount,
            )


def _loss(now: _Situation) -> Iterator[Hint]:
    """The elements that torch keeps behind a loss."""
    at_peak = findings.at_peak(now.trace, now.peak.device)
    yield from _as_hints(findings.behind_numbers(at_peak))


def _buckets(now: _Situation) -> Iterator[Hint]:
    """DistributedDataParallel's buckets with copies of the gradients, which can lie in them."""
    alloc = allocations(now.trace)
    bucket = (alloc.role == ROLE["bucket"]) & (alloc.category == CATEGORY["communication"])
    amount = int(alloc.requested_bytes[bucket & now.at_peak].sum())
    if meta.of(now.trace).ddp_buckets and 0 < amount <= now.peak.by_category["gradients"]:
        yield Hint(
            f"DistributedDataParallel keeps {size_text(amount)} of buckets beside the gradients: "
            f"{advised(now.trace, 'views')} keeps the gradients in them.",
            _without(now, bucket),
        )


# ---------------------------------------------------------------- savings at a price


def _twins(now: _Situation) -> Iterator[Hint]:
    """Autocast's copies of weights."""
    yield from _as_hints(findings.twins(findings.at_peak(now.trace, now.peak.device)))


def _activations(now: _Situation) -> Iterator[Hint]:
    amount = now.peak.by_category["activations"]
    kept = not_recomputed(now.trace, now.of_category("activations"))
    repeated = repeated_modules(now.trace, kept)
    if repeated and repeated[0].modules > 1 and repeated[0].bytes > amount // 4:
        most = repeated[0]
        yield Hint(
            f"The {most.modules} modules {most.pattern} hold {size_text(most.bytes)} of "
            f"activations: {advised(now.trace, 'checkpoint')} saves most of that for a second "
            "forward.",
            most.bytes,
        )
    elif amount:
        batch, bits = advised(now.trace, "batch"), advised(now.trace, "16 bits")
        ways = f"{batch} or {bits}"
        if not _recomputed_layers(now.trace):
            ways = f"{batch}, {bits} or {advised(now.trace, 'checkpoint').removesuffix(' on them')}"
        yield Hint(f"Activations are {size_text(amount)}: {ways} shrink them.", amount // 2)


def _state(now: _Situation) -> Iterator[Hint]:
    """Smaller optimizer state: only for a GPU, and not for a small model."""
    amount = now.peak.by_category["optimizer_state"]
    if amount >= _LARGE_STATE and now.peak.device != "cpu":
        yield Hint(
            f"Optimizer state is {size_text(amount)}: {advised(now.trace, '8 bits')} keeps a "
            "quarter of it, "
            "sharding (FSDP, ZeRO) a share per device.",
            amount * 3 // 4,
        )


def _cache(now: _Situation) -> Iterator[Hint]:
    """A setting of the allocator; replayed only if much is reserved and not used."""
    held = blocks.device_bytes(now.trace, now.at_peak, now.peak.position, now.peak.device)
    if held.reserved is None or held.reserved - held.requested < _WORTH_A_CHANGE * now.peak.bytes:
        return
    advice = allocator_advice.to_reserve_less(now.trace, now.peak.device)
    if advice is not None:
        yield Hint(
            f"{advice.text} reserves {size_text(advice.bytes)} less, as a replay of these requests "
            "shows.",
            advice.bytes,
        )


def _temporaries(now: _Situation) -> Iterator[Hint]:
    """The largest temporary of a forward: those of a backward or step cannot be made in pieces."""
    made_phase = allocations(now.trace).phase
    temporaries = now.of_category("temporaries")
    temporaries &= np.isin(made_phase, (PHASE["forward"], PHASE["other"]))
    size = allocations(now.trace).requested_bytes
    if not temporaries.any():
        return
    largest = np.zeros(len(size), np.bool_)
    largest[int(np.where(temporaries, size, 0).argmax())] = True
    amount = int(size[largest][0])
    where = "".join(
        f" {word} {short_line(by_key[0].name)}"
        for key, word in (("op", "of"), ("line", "at"))
        if (by_key := grouping.holders(now.trace, key, largest))
    )
    yield Hint(
        f"The largest temporary at the peak is {size_text(amount)}{where}: work on it in pieces.",
        amount,
    )


# ---------------------------------------------------------------- repeated modules


@dataclass(frozen=True)
class Repeated:
    """Modules whose paths differ only in numbers: the layers of a stack."""

    pattern: str  # "h.*.mlp"; of a Sequential's children "[0, 2, 4]"
    modules: int
    bytes: int


def repeated_modules(trace: Trace, which: Mask, depth: bool = True) -> list[Repeated]:
    """The holders of these allocations, with all layers of a stack as one, largest first.

    With `depth`, modules inside a layer count for the layer (`h.3.mlp.0` for `h.*`), because people
    checkpoint or move whole layers.
    """
    totals: dict[str, int] = {}
    members: dict[str, set[str]] = {}
    rows = grouping.holders(trace, "module", which)
    called = scopes.called_modules(trace)
    names = [called_layer(row.name, called) if depth else row.name for row in rows]
    bare = {name for name in names if layers_alike(name) == "*"}
    for row, name in zip(rows, names, strict=True):
        pattern = layers_alike(name)
        if pattern == "*":
            # These children have no other name: name each if they are few, unless layers count.
            alone = not depth and len(bare) <= _MOST_APART
            pattern = numbers_text([name] if alone else bare)
        totals[pattern] = totals.get(pattern, 0) + row.bytes
        members.setdefault(pattern, set()).add(name)
    repeated = [Repeated(p, len(members[p]), total) for p, total in totals.items()]
    return sorted(repeated, key=lambda each: -each.bytes)


def not_recomputed(trace: Trace, which: Mask) -> Mask:
    """These allocations without those of layers that already run their forward a second time."""
    layers, called = _recomputed_layers(trace), scopes.called_modules(trace)
    result = which.copy()
    if layers:
        groups = grouping.group(trace, "module", which)
        again = np.array(
            [called_layer(name, called) in layers for name in groups.names] + [False], np.bool_
        )
        result[which] = ~again[groups.codes]  # code -1, no module, is the last
    return result


def _recomputed_layers(trace: Trace) -> set[str]:
    """The layers that checkpointing runs again, anywhere in the trace."""
    alloc = allocations(trace)
    modules = np.unique(alloc.module[alloc.phase == PHASE["recompute"]])
    called = scopes.called_modules(trace)
    return {called_layer(trace.strings[module], called) for module in modules if module}
