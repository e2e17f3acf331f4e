"""FLOPs and bytes of single calls, against values worked out by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pytracer.cost import classes, flops
from pytracer.cost.calls import Argument
from pytracer.cost.traffic import Traffic, traffic

BF16, FP32 = "c10::BFloat16", "float"


def tensor(*shape: int, dtype: str = FP32, strides: tuple[int, ...] | None = None) -> Argument:
    if strides is None:
        strides = tuple(torch.empty(shape, device="meta").stride())
    return Argument(shape, strides, dtype)


def given(value: object = None) -> Argument:
    return Argument(value=value)


def convolution(
    x: Argument, weight: Argument, *, padding: int = 0, transposed: bool = False, groups: int = 1
) -> tuple[Argument, ...]:
    one = given((1, 1))
    return (
        x,
        weight,
        given(),
        one,
        given((padding, padding)),
        one,
        given(transposed),
        given((0, 0)),
        given(groups),
    )


def convolution_backward(
    grad: Argument, x: Argument, weight: Argument, wanted: tuple[bool, bool, bool], groups: int = 1
) -> tuple[Argument, ...]:
    one = given((1, 1))
    rest = (given((0,)), one, given((0, 0)), one, given(False), given((0, 0)), given(groups))
    return (grad, x, weight, *rest, given(wanted))


# ---------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        ("mm", (tensor(3, 5), tensor(5, 7)), 2 * 3 * 5 * 7),
        ("addmm", (tensor(7), tensor(3, 5), tensor(5, 7)), 2 * 3 * 5 * 7),
        ("bmm", (tensor(2, 3, 5), tensor(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        ("baddbmm", (tensor(2, 3, 7), tensor(2, 3, 5), tensor(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        ("mv", (tensor(3, 5), tensor(5)), 2 * 3 * 5),
        ("dot", (tensor(5), tensor(5)), 2 * 5),
        # 9 weights over 4 input channels at each of 6x6 places, for 8 channels and 2 images.
        (
            "convolution",
            convolution(tensor(2, 4, 8, 8), tensor(8, 4, 3, 3)),
            2 * 2 * 8 * 4 * 9 * 36,
        ),
        # Each channel on its own.
        (
            "convolution",
            convolution(tensor(2, 4, 8, 8), tensor(4, 1, 3, 3), padding=1, groups=4),
            2 * 2 * 4 * 9 * 64,
        ),
        # A transposed one spreads each input pixel.
        (
            "convolution",
            convolution(tensor(2, 4, 8, 8), tensor(4, 6, 3, 3), transposed=True),
            2 * 2 * 4 * 6 * 9 * 64,
        ),
        # Scores and their product with the values, for 2 batches of 3 heads.
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            (tensor(2, 3, 10, 4), tensor(2, 3, 20, 4), tensor(2, 3, 20, 4)),
            2 * (2 * 2 * 3 * 10 * 20 * 4),
        ),
        # Five products where the forward has two: the scores are made again.
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            (tensor(2, 3, 10, 4), tensor(2, 3, 10, 4), tensor(2, 3, 20, 4), tensor(2, 3, 20, 4)),
            5 * (2 * 2 * 3 * 10 * 20 * 4),
        ),
        # One LSTM layer over 5 steps of batch 2: four gates from 8 features and 16 hidden ones.
        (
            "mkldnn_rnn_layer",
            (tensor(5, 2, 8), tensor(64, 8), tensor(64, 16)),
            5 * 2 * 2 * (64 * 8 + 64 * 16),
        ),
    ],
)
def test_a_contractions_flops(op: str, arguments: tuple[Argument, ...], expected: int) -> None:
    """A multiplication and an addition are two."""
    assert flops.contraction(f"aten::{op}", arguments) == expected


def test_cudnns_recurrent_layers() -> None:
    """Two bidirectional LSTM layers: the second reads both directions of the first."""
    numbers = [given(value) for value in (2, 16, 0, 2, False, 0.0, True, True)]
    forward = (tensor(5, 2, 8), given(), given(), given(), tensor(4, 2, 16), tensor(4, 2, 16))
    expected = 5 * 2 * 2 * 2 * (4 * 16 * (8 + 16) + 4 * 16 * (32 + 16))
    assert flops.contraction("aten::_cudnn_rnn", (*forward, *numbers)) == expected
    backward = (*forward, given(), given(), given(), given(), *numbers)
    assert flops.contraction("aten::_cudnn_rnn_backward", backward) == 2 * expected


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolutions_backward_is_twice_its_forward(groups: int) -> None:
    """Also where it is grouped, and once where one of the two gradients is not wanted."""
    x, weight = tensor(2, 4, 8, 8), tensor(8, 4 // groups, 3, 3)
    grad = tensor(2, 8, 6, 6)
    forward = flops.contraction("aten::convolution", convolution(x, weight, groups=groups))
    assert forward is not None
    for wanted, times in (((True, True, False), 2), ((False, True, True), 1)):
        arguments = convolution_backward(grad, x, weight, wanted, groups)
        assert flops.contraction("aten::convolution_backward", arguments) == times * forward


def test_where_torch_counts_a_grouped_convolutions_backward_wrongly() -> None:
    """The correction is still needed: when this fails, torch counts as we do."""
    x = torch.randn(1, 64, 8, 8, requires_grad=True)
    layer = torch.nn.Conv2d(64, 64, 3, groups=64, bias=False)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() > 2 * forward.get_total_flops()


def test_what_does_not_fit_its_formula_is_uncounted_and_not_zero() -> None:
    assert flops.contraction("aten::mm", (tensor(3, 5), tensor(6, 7))) is None
    assert flops.contraction("aten::mm", ()) is None
    assert flops.contraction("aten::_grouped_mm", (tensor(3, 5), tensor(5, 7))) is None
    assert flops.per_element("mine::op", (tensor(3),)) is None


def test_conventions_for_what_is_no_contraction() -> None:
    """One per element made or read; softmax four; a look-up and a view none."""
    x = tensor(4, 8)
    assert flops.per_element("aten::gelu", (x,)) == 32
    assert flops.per_element("aten::add", (x, tensor(8))) == 32
    assert flops.per_element("aten::sum", (x, given((0,)))) == 32
    assert flops.per_element("aten::_softmax", (x, given(1), given(False))) == 4 * 32
    assert flops.per_element("aten::native_layer_norm", (x, given((8,)))) == 7 * 32
    assert flops.per_element("aten::embedding", (tensor(100, 8), tensor(4, dtype="long int"))) == 0
    assert flops.per_element("aten::view", (x,)) == 0


# ---------------------------------------------------------------- bytes

N = 1000 * 64  # elements of the tensor that these are about
U = 2 * N  # its bytes
X = tensor(1000, 64, dtype=BF16)
WEIGHT = tensor(64, dtype=BF16)
STATS = tensor(1000, 1)
TARGET = tensor(1000, dtype="long int")


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        ("gelu", (X, given("none")), 2 * U),
        ("gelu_backward", (X, X, given("none")), 3 * U),
        ("threshold_backward", (X, X, given(0)), 3 * U),
        ("add", (X, X, given(1)), 3 * U),
        ("add_", (X, X, given(1)), 3 * U),
        ("mul", (X, WEIGHT), 2 * U + 128),
        ("mul", (X, Argument((), (), "double")), 2 * U + 8),
        ("eq", (X, given(0)), U + N),
        ("native_dropout", (X, given(0.1), given(True)), 2 * U + N),
        ("native_dropout_backward", (X, tensor(1000, 64, dtype="bool"), given(1.1)), 2 * U + N),
        ("copy_", (tensor(1000, 64), X, given(False)), 3 * U),
        ("zero_", (X,), U),
        ("_softmax", (X, given(1), given(False)), 2 * U),
        ("_log_softmax", (X, given(1), given(True)), 3 * U),
        ("_log_softmax_backward_data", (X, X, given(1), given(15)), 3 * U),
        ("nll_loss_forward", (X, TARGET, given(), given(1), given(-100)), 10 * 1000),
        ("nll_loss_backward", (tensor(), X, TARGET), U + 10 * 1000),
        ("sum", (X, given((0,)), given(True), given()), U + 128),
        ("sum", (X, given()), U + 2),
        ("view", (X, given((64, 1000))), 0),
        ("native_layer_norm", (X, given((64,)), WEIGHT, WEIGHT, given(1e-5)), 2 * U + 256 + 8000),
        ("mm", (X, tensor(64, 32, dtype=BF16)), U + 64 * 32 * 2 + 1000 * 32 * 2),
        ("addmm", (WEIGHT, X, tensor(64, 64, dtype=BF16)), 2 * U + 64 * 64 * 2 + 128),
        ("bmm", (tensor(2, 3, 5), tensor(2, 5, 7)), 4 * 2 * (15 + 35 + 21)),
        ("embedding", (tensor(500, 64, dtype=BF16), TARGET), 2 * U + 8000),
        (
            "convolution",
            convolution(tensor(2, 4, 8, 8), tensor(8, 4, 3, 3)),
            4 * (2 * 4 * 64 + 8 * 4 * 9 + 2 * 8 * 36),
        ),
    ],
)
def test_bytes_by_definition(op: str, arguments: tuple[Argument, ...], expected: int) -> None:
    """Each input read once, each output written once."""
    assert traffic(f"aten::{op}", arguments) == Traffic(expected, expected)


def test_a_layer_norms_backward_is_two_kernels_on_cuda() -> None:
    """Reads two and writes one by definition; each of the two kernels reads both again."""
    wanted = given((True, True, True))
    arguments = (X, X, given((64,)), STATS, STATS, WEIGHT, WEIGHT, wanted)
    stats, weights = 8000, 256
    assert traffic("aten::native_layer_norm_backward", arguments) == Traffic(
        3 * U + stats + 2 * weights, 5 * U + 2 * stats + 2 * weights
    )
    frozen = (*arguments[:-1], given((True, False, False)))
    assert traffic("aten::native_layer_norm_backward", frozen) == Traffic(
        3 * U + stats + weights, 3 * U + stats + weights
    )


def test_a_softmaxs_backward_writes_a_product_first_on_cuda() -> None:
    """Reads gradient and result and writes their product, then reads that and the result again."""
    found = traffic("aten::_softmax_backward_data", (X, X, given(1), given(15)))
    assert found == Traffic(3 * U, 6 * U)


def test_an_embeddings_backward_zeroes_the_whole_gradient() -> None:
    arguments = (X, TARGET, given(500), given(-1), given(False))
    by_definition = U + 8000 + 500 * 128
    assert traffic("aten::embedding_dense_backward", arguments) == Traffic(
        by_definition, by_definition + U
    )


def test_what_is_expanded_is_read_once() -> None:
    """The gradient of a sum is one number, shown many times."""
    expanded = tensor(1000, 64, dtype=BF16, strides=(0, 0))
    assert traffic("aten::mul", (expanded, X)) == Traffic(2 * U + 2, 2 * U + 2)


def test_what_has_no_model_is_uncounted_and_not_zero() -> None:
    assert traffic("aten::_foreach_add_", (given(((3,),)),)) is None
    assert traffic("aten::cat", (given(((3,), (3,))), given(0))) is None
    assert traffic("aten::gelu", (Argument((3,), (1,), "a new type"),)) is None
    assert traffic("triton_poi_fused_add_0", (X,)) is None


# ---------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten::addmm", "contraction"),
        ("aten::convolution_backward", "contraction"),
        ("aten::_softmax", "normalisation"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::gelu_backward", "element-wise"),
        ("aten::add_", "element-wise"),
        ("aten::masked_fill_", "element-wise"),
        ("aten::copy_", "data movement"),
        ("aten::sum", "other"),
        ("nccl:all_reduce", "communication"),
        ("triton_poi_fused_add_gelu_0", "element-wise"),
        ("triton_per_fused_native_layer_norm_3", "normalisation"),
        ("aten::linear", None),
        ("MyFunction", None),
    ],
)
def test_classes(op: str, expected: str | None) -> None:
    assert classes.class_of(op) == expected


def test_every_contraction_of_torchs_registry_is_one_here() -> None:
    """What torch learns to count belongs to the class, whatever its name."""
    from torch.utils.flop_counter import flop_registry

    names = {
        packet._qualified_op_name
        for packet in flop_registry
        if getattr(packet, "_qualified_op_name", "").startswith("aten::")
    }
    assert len(names) > 10
    missing = {name for name in names if classes.class_of(name) != "contraction"}
    assert missing == set()
