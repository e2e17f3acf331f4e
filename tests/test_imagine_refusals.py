"""What torch's fake tensors refuse and a device takes, an imagined run takes, with the same blocks."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

import pytracer
from pytracer import errors
from tests.imagined_oracle import compare, peaks

Program = Callable[[], None]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # scratch is for each thread
    gc.collect()
    yield
    torch.set_num_threads(threads)


def holds(program: Program, **options: Any) -> None:
    """Runs the program on the real host and on an imagined one: both take the same blocks."""
    with pytracer.trace(devices="cpu", table=False) as real:
        program()
    gc.collect()
    with pytracer.imagine("cpu", **options) as imagined:
        program()
    found = compare(real.data, imagined.data)
    assert not found.invented
    assert not found.missing
    assert peaks(real.data) == peaks(imagined.data)


def train(optimizer: Callable[[Any], Any], steps: int = 3) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    updates = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.ones(4, 32)).square().mean().backward()
        updates.step()
        updates.zero_grad()


# ---------------------------------------------------------------- optimizers and decisions

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
    "NAdam in a loop": lambda p: torch.optim.NAdam(p, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, foreach=True),
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_writes_in_place_steps(name: str) -> None:
    """It returns nothing, or keeps a running product that it divides by."""
    holds(lambda: train(OPTIMIZERS[name]))


def test_an_operator_that_only_writes_in_place_needs_no_fake_kernel() -> None:
    """One that returns something new does, and the error says so."""
    with torch.library._scoped_library("pytracer_test", "DEF") as library:
        library.define("fill(Tensor(a!) x) -> ()")
        library.define("fill_and_return(Tensor(a!) x) -> Tensor(a!)")
        library.define("make(Tensor x) -> Tensor")
        for name in ("fill", "fill_and_return", "make"):
            library.impl(name, lambda x: x.fill_(1), "CPU")
        with pytracer.imagine("H100"):
            x = torch.zeros(8, device="cuda")
            assert torch.ops.pytracer_test.fill(x) is None
            assert torch.ops.pytracer_test.fill_and_return(x) is x
            with pytest.raises(errors.CannotImagine, match="register_fake"):
                torch.ops.pytracer_test.make(x)


@pytest.mark.parametrize("size", [8, 1000])
def test_no_number_is_nan_or_infinite_however_it_is_asked(size: int) -> None:
    """Also of tensors whose values are too many to be known."""
    with pytracer.imagine("H100"):
        x = torch.randn(size, size, device="cuda")
        assert torch.isfinite(x.norm())
        assert torch.isfinite(x).all()
        assert not (x != x).any()
        assert not torch.logical_or(x.isnan(), x.isinf()).any().item()
        assert not torch.isposinf(x).any()
        assert not (~torch.isfinite(x)).any()
        assert x.isnan().sum() == 0
        mask = x.isnan()
        mask[0] = True
        if size == 8:
            assert mask.any()
        else:
            with pytest.raises(errors.CannotImagine):
                bool(mask.any())


def test_rows_that_a_known_mask_picks_have_their_count() -> None:
    """The numbers themselves are unknown."""
    with pytracer.imagine("H100"):
        x = torch.randn(6, 3, device="cuda")
        mask = torch.tensor([True, False, True, False, False, True], device="cuda")
        assert x[mask].shape == (3, 3)
        assert x[:, 0].masked_select(mask).shape == (3,)


def test_no_random_number_equals_another_one_and_the_line_is_listed() -> None:
    """A random graph has no edge from a node to itself."""
    with pytracer.imagine("H100") as t:
        edges = torch.randint(100, (2, 500), device="cuda")
        assert edges[:, edges[0] != edges[1]].shape == (2, 500)
    assert any(
        "test_imagine_refusals" in one["line"] for one in t.data.meta["imagined"]["stand_ins"]
    )


def test_a_batch_norm_is_copied_again_and_again() -> None:
    """Its counter is a number on the device."""

    with pytracer.imagine("H100"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("cuda")
        for _ in range(4):
            twin = copy.deepcopy(model)
        twin(torch.ones(4, 8, device="cuda")).sum().backward()
        assert twin[1].num_batches_tracked.item() == 1
        assert model[1].num_batches_tracked.item() == 0


def _table() -> None:
    nn.Embedding(100, 16, sparse=True)(torch.randint(0, 100, (8,))).sum().backward()


def test_a_loss_by_margins_goes_backward() -> None:
    """torch has no fake kernel for its gradient."""

    def program() -> None:
        words = torch.randn(4, 8, requires_grad=True)
        nn.functional.multi_margin_loss(words, torch.zeros(4, dtype=torch.int64)).backward()

    holds(program)


SPARSE: dict[str, Callable[[], Any]] = {
    "made": lambda: torch.sparse_coo_tensor([[0, 1], [2, 0]], torch.ones(2), (4, 4)),
    "rows": lambda: torch.randn(4, 4).to_sparse_csr(),
    "gradient": _table,
}


@pytest.mark.parametrize("how", SPARSE)
def test_sparse_tensors_are_refused_in_one_sentence(how: str) -> None:
    """How many numbers they hold depends on values."""
    with pytest.raises(errors.CannotImagine, match="sparse"), pytracer.imagine("cpu"):
        SPARSE[how]()


def test_lazy_modules_get_their_shape_in_the_first_call() -> None:
    """Their parameters and buffers are torch's own subclasses, which fake tensors are not."""

    def program() -> None:
        flat = nn.Sequential(nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
        model = nn.Sequential(nn.LazyLinear(32), flat).to(torch.float64)
        model(torch.ones(4, 16, dtype=torch.float64))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4, 16, dtype=torch.float64)).sum().backward()
        optimizer.step()

    holds(program)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_goes_on_to_its_last_iteration(search: str | None) -> None:
    """It ends earlier where a change is small. A line search depends on values."""

    def program() -> None:
        net = nn.Linear(64, 32)
        optimizer = torch.optim.LBFGS(
            net.parameters(), 1e-3, max_iter=3, history_size=2, line_search_fn=search
        )
        words = torch.randn(8, 64)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(words).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    if search is None:
        holds(program)
        return
    with pytest.raises(errors.CannotImagine, match="line search"), pytracer.imagine("cpu"):
        program()


def test_what_is_written_into_undefined_memory_is_known() -> None:
    """An inverse permutation is, and a number beside random ones is not."""
    with pytracer.imagine("H100"):
        order = torch.tensor([2, 0, 1])
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(3))
        assert inverse.tolist() == [1, 2, 0]
        assert torch.empty(2, device="cuda").fill_(3).sum() == 6
        mixed = torch.empty(4, device="cuda").normal_()
        mixed[0].fill_(1)
        with pytest.raises(errors.CannotImagine):
            bool(mixed[1] > 2)


# ---------------------------------------------------------------- sequences

LENGTHS: dict[str, Callable[[], Any]] = {
    "list": lambda: [10, 7, 5, 2],
    "tensor": lambda: torch.tensor([10, 7, 5, 2]),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"enforce_sorted": False}, {"batch_first": False}])
def test_sequences_are_packed_and_padded_again(lengths: str, options: dict[str, bool]) -> None:
    """torch reads and writes their lengths by pointer."""
    options = {"batch_first": True, **options}

    def program() -> None:
        words = torch.ones((4, 10, 32) if options["batch_first"] else (10, 4, 32))
        layer = nn.Linear(32, 32)
        for _ in range(2):
            packed = rnn.pack_padded_sequence(layer(words), LENGTHS[lengths](), **options)
            packed = rnn.PackedSequence(torch.tanh(packed.data), *packed[1:])
            padded, many = rnn.pad_packed_sequence(packed, options["batch_first"], total_length=12)
            padded.sum().backward()
            assert many.tolist() == [10, 7, 5, 2]

    holds(program)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_packed_sequences_go_through_recurrent_layers_of_a_card(kind: Any) -> None:
    """A real CPU has other kernels, so only the result's shape is compared."""
    with pytracer.imagine("H100"):
        layer = kind(32, 64, batch_first=True, bidirectional=True).to("cuda")
        words = torch.randn(4, 10, 32, device="cuda")
        packed = rnn.pack_padded_sequence(words, [10, 7, 5, 2], batch_first=True)
        padded, _ = rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        padded.sum().backward()
    assert padded.shape == (4, 10, 128)


@pytest.mark.parametrize("lengths", ["list", "long", "int"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("padded", [True, False])
def test_a_ctc_loss_takes_what_it_really_takes(lengths: str, reduction: str, padded: bool) -> None:
    """Its sizes depend on the longest target."""

    def program() -> None:
        scores = torch.ones(50, 4, 20, requires_grad=True)
        targets = torch.ones((4, 12) if padded else (34,), dtype=torch.long)
        inputs, labels = [50, 40, 50, 50], [10, 7, 9, 8]
        if lengths != "list":
            dtype = torch.long if lengths == "long" else torch.int32
            inputs, labels = torch.tensor(inputs, dtype=dtype), torch.tensor(labels, dtype=dtype)
        functional.ctc_loss(
            scores.log_softmax(2), targets, inputs, labels, reduction=reduction, zero_infinity=True
        ).sum().backward()

    holds(program)


def test_a_ctc_loss_on_a_card_is_cudnns_where_torch_takes_it() -> None:
    """Then its scratch is an interval, and it keeps a gradient of the scores."""

    def run(dtype: torch.dtype) -> Any:
        with pytracer.imagine("H100") as t:
            scores = torch.randn(50, 4, 200, device="cuda", requires_grad=True)
            targets = torch.ones(40, dtype=dtype)
            loss = functional.ctc_loss(scores.log_softmax(2), targets, (50,) * 4, (10,) * 4)
            loss.backward()
        return t.data.meta["imagined"].get("peak_at_most")

    assert run(torch.long) is None
    assert run(torch.int32) is not None


def test_unknown_lengths_of_a_ctc_loss_are_at_most_the_padded_ones() -> None:
    """Targets in one row have no padding, so it refuses."""
    with pytracer.imagine("H100"):
        scores = torch.randn(50, 4, 20, device="cuda").log_softmax(2)
        inputs, labels = torch.full((4,), 50), torch.randint(5, 10, (4,))
        functional.ctc_loss(scores, torch.ones(4, 12, dtype=torch.long), inputs, labels)
        with pytest.raises(errors.CannotImagine, match="lengths of its targets"):
            functional.ctc_loss(scores, torch.ones(34, dtype=torch.long), inputs, labels)


# ---------------------------------------------------------------- experts

EXPERTS, EACH, ROWS = 4, 2, 32


class Experts(nn.Module):
    """Experts in a loop, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        if not pytracer.is_imagining():  # a real run that is balanced
            wanted = torch.arange(ROWS)[:, None] + torch.arange(EACH)
            with torch.no_grad():
                scores.zero_().scatter_(1, wanted % EXPERTS, 1.0)
        weights, chosen = scores.topk(EACH)
        mask = functional.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
        result = torch.zeros_like(x)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = hit[0]
            if expert == EXPERTS:
                continue
            place, row = torch.where(mask[expert])
            rows = self.experts[expert](x[row]) * weights[row, place, None]
            result.index_add_(0, row, rows)
        return result


def test_a_loop_over_the_experts_that_have_rows_is_followed() -> None:
    """Balanced, each expert has as many blocks as in a real run that is balanced."""

    def program() -> None:
        model = Experts()
        model(torch.ones(ROWS, 16)).sum().backward()

    def of_experts(t: Any) -> list[int]:
        rows = t.allocations()
        mine = rows.module.astype("string").str.startswith("experts.").fillna(False)
        return sorted(rows[mine].requested_bytes.tolist())

    with pytracer.trace(devices="cpu", table=False) as real:
        program()
    with pytracer.imagine("cpu", sizes="balanced") as balanced:
        program()
    with pytracer.imagine("cpu", sizes="worst") as worst:
        program()
    assert of_experts(balanced) == of_experts(real)
    assert len(of_experts(worst)) < len(of_experts(balanced))


def test_advice_on_experts_is_given_only_once() -> None:
    """Who said how rows are spread is not told to say it."""

    def refused(sizes: str | None) -> str:
        with pytracer.imagine("H100", sizes=sizes), pytest.raises(errors.CannotImagine) as error:
            torch.randn(10, device="cuda").unique()
        return str(error.value)

    assert 'sizes="balanced"' in refused(None)
    assert "sizes=" not in refused("balanced")
    assert "is_imagining" in refused("balanced")


def test_rows_of_each_expert_are_counted() -> None:
    """By bincount, by histc and by sums over one-hot rows: then sizes follow from them."""
    with pytracer.imagine("H100", sizes="balanced"):
        scores = torch.randn(ROWS, EXPERTS, device="cuda")
        chosen = scores.topk(EACH)[1].flatten()
        assert torch.bincount(chosen, minlength=EXPERTS).tolist() == [16] * EXPERTS
        assert (
            torch.histc(chosen.int(), bins=EXPERTS, min=0, max=EXPERTS).tolist() == [16] * EXPERTS
        )
        assert functional.one_hot(chosen, EXPERTS).sum(0).tolist() == [16] * EXPERTS
        rows = torch.randn(ROWS * EACH, 8, device="cuda")
        assert [len(one) for one in rows.split(torch.bincount(chosen).tolist())] == [16] * EXPERTS
    with pytracer.imagine("H100", sizes="worst"):
        scores = torch.randn(ROWS, EXPERTS, device="cuda")
        assert torch.bincount(scores.topk(EACH)[1].flatten()).tolist() == [ROWS, ROWS, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_groups_takes_every_dtype_that_a_device_takes(dtype: torch.dtype) -> None:
    """torch's own fake kernel takes bfloat16 only; rows of 5 numbers are padded to 16 bytes."""

    def program() -> None:
        rows = torch.ones(64, 32, dtype=dtype)
        weights = torch.ones(4, 32, 8, dtype=dtype)
        ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
        torch._grouped_mm(rows, weights, offs=ends)
        torch._grouped_mm(rows, torch.ones(4, 32, 8, dtype=dtype)[..., :5], offs=ends)

    holds(program)


@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
def test_mixtures_of_experts_of_transformers_are_imagined(how: str) -> None:
    """In mixed precision, with the loss of their router."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        use_cache=False,
        output_router_logits=True,
    )
    config._experts_implementation = how
    with pytracer.imagine("H100", sizes="balanced") as t:
        model = transformers.AutoModelForCausalLM.from_config(config).to("cuda").train()
        words = torch.randint(100, (2, 32), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=words, labels=words).loss
        loss.backward()
    assert t.peak.bytes


# ---------------------------------------------------------------- kernels that a torch for the CPU lacks

ONE_KERNEL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "mish": functional.mish,
    "gelu": functional.gelu,
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_an_activation_has_one_kernel_on_a_card(name: str) -> None:
    """Its backward pass takes one result, as on a CPU, whose kernels are there."""

    def program(device: str) -> None:
        x = torch.ones(1024, 64, device=device, requires_grad=True)
        ONE_KERNEL[name](x).backward(torch.ones_like(x))

    with pytracer.trace(devices="cpu", table=False) as real:
        program("cpu")
    with pytracer.imagine("H100") as imagined:
        program("cuda")
    assert imagined.peak.bytes == real.peak.bytes


def test_a_normalization_by_squares_keeps_one_number_per_row() -> None:
    """On a card `rms_norm` is one kernel, which keeps its input and the factors."""
    with pytracer.imagine("H100"):
        x = torch.ones(1024, 64, device="cuda", requires_grad=True)
        weight = torch.ones(64, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = functional.rms_norm(x, (64,), weight)
        assert torch.cuda.memory_allocated() - before == 4 * 1024 + y.numel() * 4
        y.sum().backward()


# ---------------------------------------------------------------- questions about CUDA


def test_questions_about_cudas_software_have_an_answer() -> None:
    """A torch for the CPU would raise an error, or say that there is none."""
    with pytracer.imagine("H100"):
        assert "CUDA" in torch.__config__.show()
        assert torch.version.cuda
        assert torch.cuda.nccl.version() >= (2, 10)
    assert "imagined" not in torch.__config__.show()


def test_gradients_are_compressed_to_bfloat16_between_ranks() -> None:
    """DistributedDataParallel asks for the versions of CUDA and NCCL before."""
    from torch import distributed
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    with pytracer.imagine("H100", ranks=2) as t:
        distributed.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to("cuda"))
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        distributed.destroy_process_group()
    assert t.peak.bytes


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_module_logs(tmp_path: Any) -> None:
    """Lightning copies its results deeply."""
    lightning = pytest.importorskip("lightning")

    class Logging(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytracer.imagine("H100") as t:
        rows = torch.utils.data.TensorDataset(torch.randn(16, 8))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Logging(), torch.utils.data.DataLoader(rows, batch_size=4))
    assert t.peak.bytes


def test_a_question_of_all_numbers_is_a_decision() -> None:
    """Torch asks whether a matrix is orthogonal. The outcome can be stated."""
    weight = torch.nn.utils.parametrizations.orthogonal

    def program() -> None:
        weight(nn.Linear(16, 16))(torch.randn(2, 16)).sum().backward()

    with (
        pytest.raises(errors.CannotImagine, match="decides by the value") as refused,
        pytracer.imagine("cpu"),
    ):
        program()
    line = str(refused.value).partition(" ")[0]
    with pytracer.imagine("cpu", assume={line: True}) as t:
        program()
    assert t.data.meta["imagined"]["stand_ins"] == [{"line": line, "reads": 1}]


def test_quantization_aware_training_goes_on() -> None:
    """What an observer has not seen yet is known, and what it has seen is in order."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    with pytracer.imagine("H100") as t:
        layer = nn.Sequential(nn.Linear(64, 64), FakeQuantize(MovingAverageMinMaxObserver)).cuda()
        for _ in range(2):
            layer(torch.randn(8, 64, device="cuda")).sum().backward()
    assert t.summary().loc["gradients", "at_end"] == 4 * 64 * 65


def test_a_nested_tensor_is_refused_in_words() -> None:
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    with (
        pytest.raises(errors.CannotImagine, match="nested tensor's lengths are values"),
        pytracer.imagine("H100"),
    ):
        torch.nested.nested_tensor([one.cuda() for one in rows], layout=torch.jagged)
