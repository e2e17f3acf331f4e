"""What was tried to make a program fit, as text."""

from collections.abc import Iterator

from pytracer.analysis.allocator.advice import VARIABLE
from pytracer.analysis.allocator.replay import NO
from pytracer.analysis.forecasts.fitting import Found, Tried
from pytracer.basics.names import layers_alike
from pytracer.basics.units import size_text
from pytracer.data.changes import Changes
from pytracer.export.terminal import GREEN, MARGIN, PLAIN, RED, YELLOW, Terminal

_WIDE = 76  # columns: below, the changes have lines of their own
_IN_CODE = {
    "fused": "fused=True for the optimizer",
    "foreach": "foreach=True for the optimizer",
    "loop": "foreach=False for the optimizer",
    "8bit": "torchao.optim.AdamW8bit instead of torch.optim.AdamW",
}


_FOR_GOOD = ("weights", "gradients", "optimizer_state")


def render(found: Found, terminal: Terminal = PLAIN) -> str:
    """The answer, and a row for each candidate that no other beats in both time and memory."""
    color = GREEN if found else RED if found.chosen.verdict == NO else YELLOW
    lines = [*terminal.in_one_color("fits" if found else "no", answer(found), color), ""]
    lines += _table(found, terminal)
    lines += _stays(found, terminal)
    for problem in found.problems:
        lines += terminal.paragraph("note", f"A candidate was left out: {problem}")
    return "\n".join(line.rstrip() for line in lines)


def answer(found: Found) -> str:
    """Whether the program fits, and with what, in a sentence."""
    best, now, card = found.chosen, found.tried[0], size_text(found.card)
    if best == now and found:
        return f"on {card} as it is: it needs {size_text(best.needs)}"
    needs = f"{size_text(best.needs)} instead of {size_text(now.needs)}"
    if not found:
        alone = [one for one in found.stays if one.category in _FOR_GOOD]
        total = sum(one.bytes for one in alone)
        if total > found.room:
            names = [one.category.replace("_", " ") for one in alone]
            held = f"{', '.join(names)} alone take {size_text(total)}"
            held = held if found.room else "what lies beside torch's allocator may take all of that"
            return f"nothing that was tried surely fits on {card}: {held}; the least needs {needs}"
        least = f"the smallest candidate needs {needs}"
        if best == now:
            least = f"it needs {size_text(now.needs)}, and no change here lowers that"
        return f"nothing that was tried surely fits on {card}: {least}"
    return f"on {card}: {needs}, for {_more_time(best)}"


def _more_time(one: Tried) -> str:
    """The additional time of a step, in words."""
    least, most = (round(100 * (ratio - 1)) for ratio in (one.time_ratio, one.time_at_most))
    if most <= 0 and not one.flushes:
        return "no more time" if least == most else f"up to {-least}% less time"
    text = f"{most}% more time" if least == most else f"{least} to {most}% more time"
    return f"{text} or more" if one.flushes else text


def _time(one: Tried) -> str:
    least, most = f"{one.time_ratio:.2f}", f"{one.time_at_most:.2f}"
    return (least if least == most else f"{least}-{most}") + "+" * one.flushes


def _table(found: Found, terminal: Terminal) -> Iterator[str]:
    wide = terminal.width >= _WIDE
    title = f"{'':<{MARGIN}}{'card':>8}  {'peak':>8}  {'time':<9}  {'bits':<7}"
    yield f"{title}  change" if wide else title
    shown = found.frontier
    shown = shown if found.chosen in shown else [*shown, found.chosen]
    rows = [found.tried[0], *(one for one in shown if one != found.tried[0])]
    for one in rows:
        mark = "fits" if one.fits else ""
        if one == found.chosen:
            mark = "best" if found else "least"
        bits = one.changes.bits
        sizes = f"{size_text(one.needs):>8}  {size_text(one.peak):>8}  {_time(one):<9}"
        start = terminal.paint(f"{mark:<{MARGIN}}", GREEN if one.fits else "")
        text = "; ".join(named(one.changes)) or "none: the program as it is"
        if wide:
            head = f"{mark:<{MARGIN}}{sizes}  {bits:<7}  "
            first, *more = terminal.wrap(text, " " * len(head), " " * len(head))
            yield start + head[MARGIN:] + first.lstrip()
            yield from more
        else:
            yield f"{start}{sizes}  {bits}"
            yield from terminal.wrap(text, " " * (MARGIN + 2), " " * (MARGIN + 2))
    yield ""
    yield from terminal.paragraph(
        "",
        f"card: what the run surely needs. {found.how.capitalize()}. time: an estimate, from where the "
        "GPU is the limit to where the host is." + " +: the allocator gives its cache back in each "
        "step, which takes more." * any(one.flushes for one in rows),
    )


def named(changes: Changes) -> Iterator[str]:
    """What changes, in words."""
    for what, modules in (("checkpoint", changes.checkpoint), ("offload", changes.offload)):
        if modules:
            alike: dict[str, list[str]] = {}
            for name in modules:
                alike.setdefault(layers_alike(name), []).append(name)
            texts = [
                names[0] if len(names) == 1 else f"{pattern} ({len(names)})"
                for pattern, names in alike.items()
            ]
            yield f"{what} {', '.join(texts)}"
    if changes.settings:
        yield changes.settings
    if changes.optimizer:
        yield f"{changes.optimizer} optimizer"
    if changes.set_to_none:
        yield "set_to_none=True"
    if changes.bucket_views:
        yield "gradient_as_bucket_view=True"
    if changes.micro_batches:
        yield f"{changes.micro_batches} micro-batches of each batch"
    if changes.bf16:
        yield "autocast to bfloat16"
    if changes.lora:
        yield f"LoRA of rank {changes.lora}"


def _stays(found: Found, terminal: Terminal) -> Iterator[str]:
    for at, one in enumerate(found.stays[:3]):
        text = f"{size_text(one.bytes)} of {one.category}"
        if one.module:
            text += f", {size_text(one.of_module)} of it in {one.module}"
        yield from terminal.paragraph("stays" if at == 0 else "", text)


def code(one: Tried, terminal: Terminal = PLAIN) -> list[str]:
    """What to write into the program instead of applying the plan."""
    changes = one.changes
    lines = []
    if changes.settings:
        lines.append(f"{VARIABLE}{changes.settings}  # in the environment")
    if changes.optimizer:
        lines.append(f"# {_IN_CODE[changes.optimizer]}")
    if changes.set_to_none:
        lines.append("# optimizer.zero_grad() without set_to_none=False")
    if changes.bucket_views:
        lines.append("# DistributedDataParallel(..., gradient_as_bucket_view=True)")
    if changes.micro_batches:
        parts = changes.micro_batches
        lines.append(f"# TrainingArguments(per_device_train_batch_size=N // {parts},")
        lines.append(f"#                   gradient_accumulation_steps=M * {parts})")
    if changes.bf16:
        lines.append('# the model\'s calls under torch.autocast("cuda", torch.bfloat16)')
    if changes.lora:
        lines.append(f"# peft.get_peft_model(model, peft.LoraConfig(r={changes.lora},")
        lines.append('#                     target_modules="all-linear"))')
    text = "\n".join([*lines, *([one.code] if one.code else [])])
    return terminal.code(text) if text else []


def document(found: Found) -> dict[str, object]:
    """The answer for programs."""
    return {
        "card": found.card,
        "fits": bool(found),
        "how": found.how,
        "chosen": _document(found.chosen),
        "frontier": [_document(one) for one in found.frontier],
        "tried": [_document(one) for one in found.tried],
        "stays": [one._asdict() for one in found.stays],
        "problems": list(found.problems),
    }


def _document(one: Tried) -> dict[str, object]:
    more = {"bit_equal": one.changes.is_bit_equal, "bits": one.changes.bits}
    return {**vars(one), "changes": vars(one.changes), **more}
