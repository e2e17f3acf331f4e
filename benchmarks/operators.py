"""Operators that take memory on a card beside their results, or may: each in its hardest layout.

    python benchmarks/operators.py --out benchmarks/results    # needs a GPU

The test `tests/test_imagine_operators.py` holds imagined operators to what was measured.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812 - as everybody names it
from torch import nn  # noqa: E402

Operator = Callable[[], Any]
KIB, ROWS, WIDE = 1 << 10, 64, 1024


def turned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose first two dimensions lie the other way round."""
    first, second, *rest = shape
    whole = torch.rand(second, first, *rest, device="cuda").to(dtype)
    return whole.transpose(0, 1).requires_grad_(dtype.is_floating_point)


def plain(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that lies as it is read."""
    whole = torch.rand(*shape, device="cuda").to(dtype)
    return whole.requires_grad_(dtype.is_floating_point)


def whole(most: int, *shape: int) -> torch.Tensor:
    """Whole numbers below `most`."""
    return torch.randint(most, shape, device="cuda")


def both(result: torch.Tensor, turned_back: bool = True) -> None:
    """Runs backward, with a gradient that lies the other way round."""
    grad = torch.ones_like(result)
    if turned_back and result.dim() > 1:
        grad = torch.ones(
            (result.shape[1], result.shape[0], *result.shape[2:]), device="cuda", dtype=result.dtype
        ).transpose(0, 1)
    result.backward(grad)


def operators() -> Iterator[tuple[str, Operator]]:
    """Names and programs."""
    for layout in (turned, plain):
        at = f", {layout.__name__}"
        x = lambda *shape, layout=layout, **how: layout(*shape, **how)  # noqa: E731
        image = lambda layout=layout: layout(8, 16, 64, 64)  # noqa: E731
        norm = lambda: plain(WIDE)  # noqa: E731
        yield (
            f"layer_norm{at}",
            lambda x=x, norm=norm: both(F.layer_norm(x(ROWS, WIDE), (WIDE,), norm(), norm())),
        )
        yield (
            f"rms_norm{at}",
            lambda x=x, norm=norm: both(F.rms_norm(x(ROWS, WIDE), (WIDE,), norm())),
        )
        yield f"softmax{at}", lambda x=x: both(F.softmax(x(ROWS, WIDE), -1))
        yield f"softmax over rows{at}", lambda x=x: both(F.softmax(x(ROWS, WIDE), 0))
        yield f"log_softmax{at}", lambda x=x: both(F.log_softmax(x(ROWS, WIDE), -1))
        yield (
            f"softmax in float{at}",
            lambda x=x: both(
                F.softmax(x(ROWS, WIDE, dtype=torch.bfloat16), -1, dtype=torch.float32)
            ),
        )
        yield f"logsumexp{at}", lambda x=x: both(torch.logsumexp(x(ROWS, WIDE), -1))
        yield (
            f"cross_entropy{at}",
            lambda x=x: both(F.cross_entropy(x(ROWS, WIDE), whole(WIDE, ROWS))),
        )
        yield (
            f"cross_entropy, smooth{at}",
            lambda x=x: both(
                F.cross_entropy(x(ROWS, WIDE), whole(WIDE, ROWS), label_smoothing=0.1)
            ),
        )
        yield (
            f"nll_loss of images{at}",
            lambda image=image: both(F.nll_loss(F.log_softmax(image(), 1), whole(16, 8, 64, 64))),
        )
        for loss in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "kl_div",
            "soft_margin_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
        ):
            yield (
                f"{loss}{at}",
                lambda x=x, loss=loss: both(
                    getattr(F, loss)(x(ROWS, WIDE), plain(ROWS, WIDE).detach())
                ),
            )
        yield (
            f"mse_loss in half{at}",
            lambda x=x: both(
                F.mse_loss(
                    x(ROWS, WIDE, dtype=torch.bfloat16),
                    plain(ROWS, WIDE, dtype=torch.bfloat16).detach(),
                )
            ),
        )
        yield (
            f"cosine_similarity{at}",
            lambda x=x: both(F.cosine_similarity(x(ROWS, WIDE), plain(ROWS, WIDE))),
        )
        yield f"cumsum of flags{at}", lambda x=x: torch.cumsum(x(ROWS, WIDE).detach() > 0.5, -1)
        yield f"cumsum{at}", lambda x=x: both(torch.cumsum(x(ROWS, WIDE), -1))
        yield f"cumprod{at}", lambda x=x: torch.cumprod(x(ROWS, WIDE).detach(), -1)
        yield f"sort{at}", lambda x=x: both(torch.sort(x(ROWS, WIDE), -1).values)
        yield f"sort whole{at}", lambda x=x: torch.sort((x(ROWS, WIDE).detach() * 100).long(), -1)
        yield f"argsort of one row{at}", lambda x=x: torch.argsort(plain(ROWS * WIDE).detach())
        yield f"topk{at}", lambda x=x: both(torch.topk(x(ROWS, WIDE), 8).values)
        yield f"max{at}", lambda x=x: both(x(ROWS, WIDE).max(-1).values)
        yield f"median{at}", lambda x=x: both(x(ROWS, WIDE).median(-1).values)
        yield f"var{at}", lambda x=x: both(x(ROWS, WIDE).var(-1))
        yield f"norm{at}", lambda x=x: both(x(ROWS, WIDE).norm(dim=-1))
        yield f"sum{at}", lambda x=x: both(x(ROWS, WIDE).sum())
        yield f"mean of rows{at}", lambda x=x: both(x(ROWS, WIDE).mean(0))
        yield f"linear{at}", lambda x=x: both(F.linear(x(ROWS, WIDE), plain(256, WIDE), plain(256)))
        yield f"bmm{at}", lambda x=x: both(torch.bmm(x(16, 64, 64), x(16, 64, 64)))
        yield (
            f"einsum{at}",
            lambda x=x: both(torch.einsum("bij,kj->bki", x(16, 64, 64), plain(32, 64))),
        )
        yield (
            f"baddbmm{at}",
            lambda x=x: both(torch.baddbmm(x(16, 64, 64), x(16, 64, 64), x(16, 64, 64))),
        )
        yield (
            f"embedding, few words{at}",
            lambda x=x: both(F.embedding(whole(1000, 16, 32), plain(1000, 64))),
        )
        yield f"gather{at}", lambda x=x: both(torch.gather(x(ROWS, WIDE), 1, whole(WIDE, ROWS, 32)))
        yield (
            f"index_select{at}",
            lambda x=x: both(torch.index_select(x(ROWS, WIDE), 1, whole(WIDE, 32))),
        )
        yield f"index{at}", lambda x=x: both(x(ROWS, WIDE)[whole(ROWS, 32)])
        yield (
            f"scatter_add{at}",
            lambda x=x: both(
                torch.zeros(ROWS, WIDE, device="cuda").scatter_add(
                    1, whole(WIDE, ROWS, 32), x(ROWS, 32)
                )
            ),
        )
        yield (
            f"index_add{at}",
            lambda x=x: both(
                torch.zeros(ROWS, WIDE, device="cuda").index_add(0, whole(ROWS, 32), x(32, WIDE))
            ),
        )
        yield (
            f"masked_fill{at}",
            lambda x=x: both(x(ROWS, WIDE).masked_fill(whole(2, ROWS, WIDE) > 0, 0.0)),
        )
        yield (
            f"where{at}",
            lambda x=x: both(torch.where(whole(2, ROWS, WIDE) > 0, x(ROWS, WIDE), 0.0)),
        )
        yield f"repeat_interleave{at}", lambda x=x: both(x(ROWS, WIDE).repeat_interleave(2, 0))
        yield f"roll{at}", lambda x=x: both(x(ROWS, WIDE).roll(1, 1))
        yield f"flip{at}", lambda x=x: both(x(ROWS, WIDE).flip(1))
        yield f"cdist{at}", lambda x=x: both(torch.cdist(x(ROWS, 64), plain(32, 64)))
        yield f"gelu{at}", lambda x=x: both(F.gelu(x(ROWS, WIDE)))
        yield f"glu{at}", lambda x=x: both(F.glu(x(ROWS, WIDE)))
        yield f"prelu{at}", lambda x=x: both(F.prelu(x(ROWS, WIDE), plain(WIDE)))
        yield f"dropout{at}", lambda x=x: both(F.dropout(x(ROWS, WIDE), 0.1))
        yield f"softplus{at}", lambda x=x: both(F.softplus(x(ROWS, WIDE)))
        yield f"logsigmoid{at}", lambda x=x: both(F.logsigmoid(x(ROWS, WIDE)))
        yield f"multinomial{at}", lambda x=x: torch.multinomial(x(ROWS, WIDE).detach(), 4)
        yield f"tril{at}", lambda x=x: both(torch.tril(x(ROWS, WIDE)))
        yield f"cat{at}", lambda x=x: both(torch.cat([x(ROWS, WIDE), plain(ROWS, 16)], 1))
        yield f"to half{at}", lambda x=x: both(x(ROWS, WIDE).to(torch.bfloat16))
        yield f"max_pool2d{at}", lambda image=image: both(F.max_pool2d(image(), 2))
        yield f"avg_pool2d{at}", lambda image=image: both(F.avg_pool2d(image(), 2))
        yield (
            f"adaptive_avg_pool2d{at}",
            lambda image=image: both(F.adaptive_avg_pool2d(image(), 7)),
        )
        yield (
            f"adaptive_avg_pool2d to 1{at}",
            lambda image=image: both(F.adaptive_avg_pool2d(image(), 1)),
        )
        yield f"nearest{at}", lambda image=image: both(F.interpolate(image(), scale_factor=2))
        yield (
            f"bilinear{at}",
            lambda image=image: both(F.interpolate(image(), scale_factor=2, mode="bilinear")),
        )
        yield (
            f"bicubic{at}",
            lambda image=image: both(F.interpolate(image(), scale_factor=2, mode="bicubic")),
        )
        yield (
            f"grid_sample{at}",
            lambda image=image: both(
                F.grid_sample(image(), plain(8, 32, 32, 2), align_corners=False)
            ),
        )
        yield f"unfold{at}", lambda image=image: both(F.unfold(image(), 3))
        yield f"pixel_shuffle{at}", lambda image=image: both(F.pixel_shuffle(image(), 2))
        yield f"pad{at}", lambda image=image: both(F.pad(image(), (1, 1, 1, 1)))
        yield (
            f"pad by reflection{at}",
            lambda image=image: both(F.pad(image(), (1, 1, 1, 1), mode="reflect")),
        )
        yield (
            f"batch_norm{at}",
            lambda image=image: both(
                F.batch_norm(image(), None, None, plain(16), plain(16), training=True)
            ),
        )
        yield (
            f"batch_norm of rows{at}",
            lambda x=x: both(
                F.batch_norm(x(ROWS, WIDE), None, None, plain(WIDE), plain(WIDE), training=True)
            ),
        )
        yield (
            f"group_norm{at}",
            lambda image=image: both(F.group_norm(image(), 4, plain(16), plain(16))),
        )
        yield f"instance_norm{at}", lambda image=image: both(F.instance_norm(image()))
        yield (
            f"lstm, rows first{at}",
            lambda x=x: both(nn.LSTM(32, 64, batch_first=True).cuda()(x(16, 8, 32))[0]),
        )
        yield f"clip_grad_norm{at}", lambda x=x: _clipped(x(ROWS, WIDE))


def _clipped(x: torch.Tensor) -> None:
    both(x * 2)
    torch.nn.utils.clip_grad_norm_([plain(ROWS, WIDE), plain(WIDE)], 1.0)


def taken(t: Any) -> dict[str, Any]:
    """The peak beside workspaces, and how often a block of each size was taken."""
    from pytracer.analysis.facts import usage
    from pytracer.analysis.facts.allocations import allocations
    from pytracer.data.schema import CATEGORY

    alloc, own = allocations(t.data), usage.on_device(t.data, "cuda:0")
    own &= alloc.category != CATEGORY["workspaces"]
    sizes = Counter(alloc.requested_bytes[own].tolist())
    return {
        "peak": usage.highest_where(t.data, own).bytes,
        "blocks": {str(size): count for size, count in sorted(sizes.items())},
    }


def imagined(program: Operator, card: str) -> dict[str, Any]:
    """What the operator takes on an imagined card."""
    import pytracer

    with pytracer.imagine(card) as t:
        program()
    return taken(t)


def main() -> None:
    """Measures each operator on this card, and prints those that are imagined otherwise."""
    import pytracer
    from benchmarks.imagine import write

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    card = "H200" if "H200" in torch.cuda.get_device_name() else "H100"
    found: dict[str, Any] = {}
    for name, program in operators():
        program()  # what is made once
        with pytracer.trace(devices="cuda", table=False) as t:
            program()
        found[name] = taken(t)
        guess = imagined(program, card)
        if guess != found[name]:
            print(f"{name:34} {guess['peak'] - found[name]['peak']:+,} bytes", flush=True)
    write(options.out, "operators", {"operators": found})


if __name__ == "__main__":
    main()
