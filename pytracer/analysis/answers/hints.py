"""Suggestions that follow from the data: changes that make the peak smaller.

`analysis/forecasts/changes.py` replays them and puts them in order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytracer.analysis.allocator import advice as allocator_advice, blocks
from pytracer.analysis.answers import findings, growth, held, postmortem, staying
from pytracer.analysis.answers.edits import Edit, peak_after
from pytracer.analysis.answers.layers import (
    Repeated,
    not_recomputed,
    recomputed_layers,
    repeated_modules,
)
from pytracer.analysis.answers.situation import Finding, Situation
from pytracer.analysis.facts import grouping, phases, scopes, usage
from pytracer.analysis.facts.allocations import allocations
from pytracer.analysis.facts.scopes import BACKWARD, NEVER
from pytracer.basics.names import called_layer, is_nameless, short_line
from pytracer.basics.units import size_text
from pytracer.data import health, meta, sanitized
from pytracer.data.recorded import Trace, once_per_trace
from pytracer.data.schema import CATEGORY, PHASE, ROLE, Mask

_WORTH_A_HINT = 0.05  # of the peak
_WORTH_A_CHANGE = 0.1  # of the peak: the least that a saving must save
SMALLEST_CHANGE = 1 << 20
_LARGE_STATE = 256 << 20  # a smaller model's state is not worth a hint
_CAN_BE_FUSED = {  # the devices for which torch has such a kernel
    "Adam": ("cpu", "cuda"),
    "AdamW": ("cpu", "cuda"),
    "SGD": ("cpu", "cuda"),
    "Adagrad": ("cpu",),
}

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


# The kinds of suggestions, in their order.
MISTAKE, FREE, TRADE, NOTICED = "mistake", "free", "trade", "noticed"
_SAME, _ROUNDED, OTHER_NUMBERS = "bit-equal", "equal up to rounding", "changed"


@dataclass(frozen=True)
class Hint:
    """A suggestion, and the bytes at the peak that it concerns."""

    text: str
    bytes: int
    kind: str = NOTICED
    edit: Edit | None = field(default=None, repr=False, compare=False)  # what it does to blocks
    price: str = "none"  # in time
    numbers: str = _SAME  # that the program computes
    modules: tuple[str, ...] = ()  # that it says to checkpoint
    grows: bool = False  # a small part of the peak, perhaps, which gets larger
    at_failure: bool = False  # the bytes are those where memory ran out, and not at the peak
    serves: bool | None = None  # whether an allocation that failed would succeed, if that is known


@once_per_trace
def every_hint(trace: Trace, device: str) -> list[Hint]:
    """The hints of all rules; none where nothing was recorded, or not all.

    What a rule does not find at the peak, it looks for where memory ran out.
    """
    if len(allocations(trace)) == 0 or health.has_holes(trace.losses):
        return []
    now = _Situation(trace, usage.peak(trace, device), usage.alive(trace, "peak", device))
    failed = postmortem.failure(trace)
    then = None
    if failed is not None and failed.moment.device == device:
        then = _Situation(trace, failed.moment, failed.alive, at_failure=True)
        then = None if np.array_equal(then.at_peak, now.at_peak) else then
    found = []
    for rules in _ALL:
        for rule in rules:
            of_rule = list(rule(now))
            if then is not None and (not of_rule or rule is _mistakes):
                of_rule += [replace(each, at_failure=True) for each in rule(then)]
            found += of_rule
    return found


@dataclass(frozen=True)
class _Situation:
    """The input of the rules."""

    trace: Trace
    peak: usage.Peak  # or the moment at which memory ran out
    at_peak: Mask
    at_failure: bool = False

    @property
    def moment(self) -> Situation:
        """The same for rules about findings."""
        peak = self.peak
        return Situation(self.trace, peak.device, peak.position, peak.phase, self.at_peak)

    def share(self, category: str) -> float:
        """The category's share of the bytes at the peak."""
        return self.peak.by_category[category] / max(self.peak.bytes, 1)

    def of_category(self, category: str) -> Mask:
        """The allocations of the category that are alive at the peak."""
        is_of_it: Mask = self.at_peak & (allocations(self.trace).category == CATEGORY[category])
        return is_of_it


@once_per_trace
def notes(trace: Trace, device: str) -> list[str]:
    """What to know before the changes: memory ran out, or part of the peak is not known."""
    if len(allocations(trace)) == 0:
        return ["No allocation was seen. Is the model on one of the traced devices?"]
    peak = usage.peak(trace, device)
    found = list(_out_of_memory(trace, peak))
    if not health.has_holes(trace.losses):  # the losses may cause anything else
        found += _unknown(trace, peak)
    return found


def advised(trace: Trace, change: str) -> str:
    """The change in the words of the framework that the program trains with."""
    return words_of_framework(trace, change) or _WORDS[change]


def words_of_framework(trace: Trace, change: str) -> str:
    """The option of the program's framework that makes this change; "" if there is none."""
    words = (_WORDS_OF.get(name, {}).get(change, "") for name in meta.of(trace).frameworks)
    return next(filter(None, words), "")


def _out_of_memory(trace: Trace, peak: usage.Peak) -> Iterator[str]:
    failed = postmortem.failure(trace)
    if failed is not None:
        there = usage.alive(trace, "peak", peak.device)
        same = failed.moment.device == peak.device and np.array_equal(failed.alive, there)
        rows = "; the rows show who held the memory" if same else ""
        yield f"An allocation of {size_text(failed.asked)} failed{rows}."


# What a memory snapshot lacks, and what would have recorded it.
_ENABLE = {
    "history": "it has no history; enable it with `torch.cuda.memory._record_memory_history()` "
    "before the model is made",
    "stacks": 'it has no stacks; enable them with `_record_memory_history(stacks="python")`',
    "ring": "its history was full and lost the beginning; enable a longer one with "
    "`_record_memory_history(max_entries=1_000_000)`",
    "beginning": "its history begins after they were made; enable it with "
    "`_record_memory_history()` before the model is made",
    "end": "it ends before it shows what becomes of them; record two steps or more",
    "frees": 'its frees have no stacks; enable them with `_record_memory_history(context="all")`',
}


def _unknown(trace: Trace, peak: usage.Peak) -> Iterator[str]:
    amount = peak.by_category["unknown"]
    if amount <= 0.01 * peak.bytes:
        return
    if meta.of(trace).imported:
        first = next(iter(meta.of(trace).lacks), "")
        more = _ENABLE.get(first, "record with `with pytracer.trace():` to see it")
        yield f"This snapshot does not show the purpose of {size_text(amount)}: {more}."
    else:
        yield (
            f"{size_text(amount)} were allocated before the trace and belong to no known module or "
            "optimizer: pass those to trace(), or start it earlier."
        )


def _kept_results(now: _Situation) -> Iterator[Hint]:
    """What a variable keeps of equal calls: a leak, or what the program is for."""
    for row in growth.kept_results(now.moment):
        if "`" in row.evidence and row.bytes > _WORTH_A_CHANGE * now.peak.bytes:
            yield Hint(f"{row.evidence}.", row.bytes)


def _unexplained(now: _Situation) -> Iterator[Hint]:
    """Activations beside the graph. The program may need them, so nothing is advised."""
    row = held.unexplained(now.moment)
    if row is not None and row.bytes > _WORTH_A_HINT * now.peak.bytes:
        yield Hint(f"{row.evidence}: a module, a hook or a later step may need them.", row.bytes)


def _mistakes(now: _Situation) -> Iterator[Hint]:
    """All findings, but what the allocator keeps: that is a saving. Each cause is one."""
    rows = [row for row in findings.findings(now.trace, now.peak.device) if row.kind != "cache"]
    if now.at_failure:
        known = {(row.kind, row.line, row.module) for row in rows}
        then = findings.in_vain(now.moment)
        rows = [row for row in then if (row.kind, row.line, row.module) not in known]
    for row in rows:
        # Gradients of the last step may stay by choice; a replay shows what it costs.
        kind = FREE if row.kind == "late_zero_grad" else MISTAKE
        yield from _as_hints([row], kind)


def said(row: Finding) -> str:
    """The finding in a sentence, as the list of changes has it."""
    return f"{row.evidence}: {row.change}."


def _as_hints(rows: Iterable[Finding], kind: str = NOTICED) -> Iterator[Hint]:
    for row in rows:
        yield Hint(said(row), row.bytes, kind, row.edit, grows=row.kind == "growth")


# ---------------------------------------------------------------- savings that cost nothing


def _saved(now: _Situation, edit: Edit) -> int:
    """How much lower the peak would be with this edit."""
    return now.peak.bytes - peak_after(now.trace, now.peak.device, [edit])


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
        edit = Edit(scratch)
        saved = _saved(now, edit)
        yield Hint(
            f"The peak is in the step of {kind}, with {size_text(saved)} of temporaries: "
            f"{kind}(..., fused=True) avoids them, and is faster.",
            saved,
            FREE,
            edit,
            "none; it is faster",
            _ROUNDED,
        )
    elif scopes.scopes_named(now.trace, lambda text: text.startswith("aten::_foreach"))[
        steps != 0
    ].any():
        edit = Edit(scratch & ~_largest_of_each_op(now, scratch))
        saved = _saved(now, edit)
        yield Hint(
            f"The peak is in the step of {kind}, with temporaries for all parameters at once: "
            f"{kind}(..., foreach=False) makes them for one after the other, which saves "
            f"{size_text(saved)} and is slower.",
            saved,
            TRADE,
            edit,
            "a slower step of the optimizer",
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
    kept = (alloc.category == CATEGORY["activations"]) & (alloc.role == ROLE["saved"])
    forward = (alloc.phase == PHASE["forward"]) & (alloc.module != 0)
    backward = alloc.phase == PHASE["backward"]
    for fused in _FUSED:
        spared = np.zeros(len(kept), np.bool_)
        for module in np.unique(alloc.module[kept & forward]).tolist():
            own = forward & (alloc.module == module)
            ops = {strings[op] for op in np.unique(alloc.op[own]).tolist()}
            if {*fused.tells} <= ops <= {*fused.tells, *_ARITHMETIC}:
                spared |= _all_but_the_last(now.trace, own, alloc.start)
                back = backward & ((alloc.module == module) | (alloc.forward_module == module))
                end = alloc.completed
                spared |= _all_but_the_last(now.trace, back, np.where(end < 0, NEVER, end))
        there = spared & kept & now.at_peak
        if there.any():
            where = [row.text for row in repeated_modules(now.trace, there, depth=False)]
            amount = int(alloc.requested_bytes[there].sum())
            yield Hint(
                f"{', '.join(where[:2])} keep {size_text(amount)} for a {fused.name} that is "
                f"written by hand: {fused.instead} keeps only its input.",
                amount,
                FREE,
                Edit(spared),
                "none; it is faster",
                _ROUNDED,
            )


def _all_but_the_last(trace: Trace, which: Mask, when: NDArray[Any]) -> Mask:
    """These allocations of a module's calls, or of their backwards, without the last of each."""
    tree, scope = scopes.tree(trace), phases.moments(trace).made_scope
    node = tree.node[scope]
    call = tree.module[np.where(node != 0, tree.forward[node], scope)]
    rows = np.flatnonzero(which)
    rows = rows[np.argsort(when[rows], kind="stable")]
    last = np.full(int(call.max(initial=0)) + 1, -1)
    last[call[rows]] = rows
    result = which.copy()
    result[last[last >= 0]] = False
    return result


def _loss(now: _Situation) -> Iterator[Hint]:
    """The elements that torch keeps behind a loss."""
    yield from _as_hints(held.behind_numbers(now.moment), FREE)


def _buckets(now: _Situation) -> Iterator[Hint]:
    """DistributedDataParallel's buckets with copies of the gradients, which can lie in them."""
    alloc = allocations(now.trace)
    bucket = (alloc.role == ROLE["bucket"]) & (alloc.category == CATEGORY["communication"])
    amount = int(alloc.requested_bytes[bucket & now.at_peak].sum())
    if meta.of(now.trace).ddp_buckets and 0 < amount <= now.peak.by_category["gradients"]:
        copied = _copied_into_buckets(now.trace)
        yield Hint(
            f"DistributedDataParallel keeps {size_text(amount)} of buckets beside the gradients: "
            f"{advised(now.trace, 'views')} keeps the gradients in them.",
            _saved(now, copied),
            FREE,
            copied,
        )


def _copied_into_buckets(trace: Trace) -> Edit:
    """Gradients end when the next but one is made, or with their backward: a bucket has them then."""
    tree, made = scopes.tree(trace), phases.moments(trace).made_ticks
    which = allocations(trace).category == CATEGORY["gradients"]
    rows = np.flatnonzero(which)
    rows = rows[np.argsort(made[rows], kind="stable")]
    passes = np.flatnonzero(tree.kind == BACKWARD)
    passes = passes[np.argsort(tree.begin[passes])]
    own = np.searchsorted(tree.begin[passes], made[rows], side="right") - 1
    until = np.append(tree.end[passes], NEVER)[own]  # the last: of what was made before all passes
    next_but_one = np.append(made[rows][2:], [NEVER, NEVER][: len(rows)])
    end = np.full(len(which), NEVER, np.uint64)
    end[rows] = np.minimum(until, next_but_one)
    return Edit(which, end=end)


def _unused(now: _Situation) -> Iterator[Hint]:
    """Gradients that no step uses, or that one uses and nothing drops."""
    for one in _as_hints(staying.gradients(now.moment), FREE):
        used = "zero_grad" in one.text  # they may have been added up
        yield replace(one, price="none; it is faster", numbers=OTHER_NUMBERS if used else _SAME)


# ---------------------------------------------------------------- savings at a price


def _twins(now: _Situation) -> Iterator[Hint]:
    """Autocast's copies of weights."""
    for one in _as_hints(findings.twins(now.moment), TRADE):
        price = "updates smaller than bfloat16's rounding are lost"
        yield replace(one, numbers=OTHER_NUMBERS, price=price)


def _activations(now: _Situation) -> Iterator[Hint]:
    amount = now.peak.by_category["activations"]
    kept = not_recomputed(now.trace, now.of_category("activations"))
    repeated = repeated_modules(now.trace, kept)
    if repeated and repeated[0].modules > 1 and repeated[0].bytes > amount // 4:
        stacks = _stacks_together(now.trace, repeated)
        names = tuple(name for stack in stacks for name in stack.names)
        total = sum(stack.bytes for stack in stacks)
        patterns = " and ".join(stack.pattern for stack in stacks if not is_nameless(stack.pattern))
        yield Hint(
            f"The {len(names)} modules{f' {patterns}' if patterns else ''} hold {size_text(total)} of "
            f"activations: {advised(now.trace, 'checkpoint')} keeps only their inputs.",
            total,
            TRADE,
            _freed_at_the_failure(now, names),
            price="up to one more forward of them",
            modules=names,
        )
    elif amount:
        ways = [advised(now.trace, "batch")]
        if not _has_16_bits(now.trace):
            ways.append(advised(now.trace, "16 bits"))
        if not recomputed_layers(now.trace):
            ways.append(advised(now.trace, "checkpoint").removesuffix(" on them"))
        *others, last = ways
        words = f"{', '.join(others)} or {last}" if others else last
        text = f"Activations are {size_text(amount)}: {words} makes them smaller."
        yield Hint(
            text, amount // 2, TRADE, price="of the one that is chosen", numbers=OTHER_NUMBERS
        )


def _stacks_together(trace: Trace, repeated: list[Repeated]) -> list[Repeated]:
    """The stack of layers that holds most, and those that a framework's switch takes with it.

    transformers' switch checkpoints the encoder's layers with the decoder's.
    """
    most = repeated[0]
    if advised(trace, "checkpoint") == _WORDS["checkpoint"]:
        return [most]
    end = most.pattern.split(".")[-2:]
    others = (one for one in repeated[1:] if one.modules > 1)
    return [most, *(one for one in others if one.pattern.split(".")[-2:] == end)]


def _has_16_bits(trace: Trace) -> bool:
    """Whether autocast made copies, or parameters are in 16 bits themselves."""
    labels = sanitized.labels(trace)
    dtypes = {trace.strings[row] for row in labels.dtype[labels.category == CATEGORY["weights"]]}
    copies = allocations(trace).role == ROLE["autocast_copy"]
    return bool(copies.any() or dtypes & {"bfloat16", "float16"})


def _freed_at_the_failure(now: _Situation, layers: tuple[str, ...]) -> Edit | None:
    """What checkpoints free where memory ran out: no results, and nothing of the last layer."""
    failed = postmortem.failure(now.trace)
    if failed is None or failed.moment.device != now.peak.device:
        return None
    alloc, called = allocations(now.trace), scopes.called_modules(now.trace)
    kept = failed.alive & (alloc.category == CATEGORY["activations"])
    kept = not_recomputed(now.trace, kept)
    groups = grouping.group(now.trace, "module", kept)
    number = {name: i for i, name in enumerate(layers)}
    of_name = [number.get(called_layer(name, called), -1) for name in groups.names]
    layer = np.full(len(kept), -1)
    layer[kept] = np.array([*of_name, -1])[groups.codes]
    freed = layer >= 0
    rows = np.flatnonzero(freed)
    rows = rows[np.argsort(alloc.start[rows], kind="stable")]
    last = dict(zip(layer[rows].tolist(), rows.tolist(), strict=True))
    freed[list(last.values())] = False
    if len(rows):
        freed[layer == layer[rows[-1]]] = False
    return Edit(freed)


def _state(now: _Situation) -> Iterator[Hint]:
    """Smaller optimizer state: only for a GPU, and not for a small model."""
    amount = now.peak.by_category["optimizer_state"]
    if amount >= _LARGE_STATE and now.peak.device != "cpu":
        yield Hint(
            f"Optimizer state is {size_text(amount)}: {advised(now.trace, '8 bits')} keeps a "
            "quarter of it, "
            "sharding (FSDP, ZeRO) a share per device.",
            amount * 3 // 4,
            TRADE,
            Edit(allocations(now.trace).category == CATEGORY["optimizer_state"], share=0.25),
            numbers=OTHER_NUMBERS,
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
            FREE,
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
        TRADE,
        price="more and smaller kernels",
    )


_FREE = (_fused_optimizer, _fused_functions, _loss, _buckets, _unused)
_TRADES = (_activations, _twins, _state, _temporaries, _cache)
_ALL = ((_mistakes,), _FREE, _TRADES, (_kept_results, _unexplained))
