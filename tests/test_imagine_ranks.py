"""Imagined ranks: torch's own FSDP2, DDP, tensor and pipeline parallelism, and one real member."""

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pytracer
from programs import parallel
from pytracer import errors
from pytracer.imagined import others

MIB = 1 << 20
WIDTH, LAYERS = 256, 4
BLOCK = 8 * WIDTH * WIDTH + 5 * WIDTH  # parameters of one block


class Block(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(LAYERS))).to("cuda")


def train(model: Any, *, steps: int = 2) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        model(torch.randn(16, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def sharded() -> Any:
    dist.init_process_group("nccl")
    model = blocks()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, 64, 512])
def test_fsdp2_keeps_a_share_of_everything_and_gathers_one_block_at_a_time(size: int) -> None:
    """On meshes of any size, whose coordinates torch looks up by value."""
    with pytracer.imagine("H100", ranks=size) as t:
        model = sharded()
        assert dist.get_world_size() == size
        optimizer = train(model)
    del optimizer
    rows = [shape[0] for block in model for shape in (p.shape for p in block.parameters())]
    wide = {4 * WIDTH: WIDTH, WIDTH: 4 * WIDTH}
    share = sum(
        -(-row // size) * (wide[row] + 1) for row in rows[::2]
    )  # of a weight and its bias, split by rows
    summary = t.summary()
    assert summary.loc["weights", "at_end"] == 4 * share
    assert summary.loc["optimizer_state", "at_end"] == 2 * 4 * share
    taken = t.allocations()
    gathered = taken[(taken["category"] == "communication") & (taken["phase"] == "forward")]
    whole = sum(-(-row // size) * size * (wide[row] + 1) for row in (4 * WIDTH, WIDTH))
    assert set(gathered["requested_bytes"]) == {4 * whole}
    assert len(gathered) == 2 * LAYERS, "each block once in each of two steps"
    assert t.data.meta["imagined"]["ranks"] == size
    assert f"rank 0 of {size}" in t.table().replace("\n          ", " ")


def ddp(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        dist.init_process_group("nccl")
        return nn.parallel.DistributedDataParallel(blocks(), device_ids=[0], **options)

    return make


def test_ddp_has_the_buckets_that_torchs_own_reducer_makes() -> None:
    """One for the first backward pass, and then by size, in the order of the gradients."""
    with pytracer.imagine("H100", ranks=8) as t:
        model = ddp(bucket_cap_mb=4)()
        train(model, steps=3)
    half = 4 * LAYERS * BLOCK // 2  # two blocks pass 4 MiB together
    assert t.data.meta["ddp_buckets"] == [half, 2 * half]
    buckets = t.allocations()
    buckets = buckets[buckets["role"] == "bucket"]
    assert buckets["requested_bytes"].tolist() == [2 * half, half, half]
    assert t.peak.by_category["communication"] == 4 * LAYERS * BLOCK


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        pytest.param(
            {"static_graph": True},
            marks=pytest.mark.skipif(
                torch.backends.cuda.is_built(), reason="times are measured on the device then"
            ),
        ),
    ],
)
def test_ddp_goes_through_with_its_options(options: dict[str, Any]) -> None:
    """And gradients that are views of buckets take no memory of their own."""
    with pytracer.imagine("H100", ranks=2) as t:
        train(ddp(**options)())
    own = t.summary()["own_peak"]
    assert own["gradients"] == 4 * LAYERS * BLOCK
    buckets = 0 if "gradient_as_bucket_view" in options else 4 * LAYERS * BLOCK
    assert own["communication"] == buckets


def test_tensor_parallel_layers_and_their_state_have_a_share() -> None:
    """DTensor does its operators by other operators, which are all seen."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    with pytracer.imagine("H100", ranks=4) as t:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
        model = blocks()
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        train(model)
    share = 2 * WIDTH * WIDTH + WIDTH + WIDTH  # the bias of `down` is whole
    assert t.summary().loc["weights", "at_end"] == 4 * LAYERS * share
    assert t.data.meta["imagined"]["meshes"] == [{"shape": [4], "names": ["tp"]}]


def test_a_table_that_is_cut_by_rows_masks_words_of_other_ranks() -> None:
    """DTensor runs operators for that, which are no bookkeeping."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    with pytracer.imagine("H100", ranks=4) as t:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
        table = nn.Embedding(1024, WIDTH, device="cuda")
        parallelize_module(table, mesh, RowwiseParallel(input_layouts=Replicate()))
        table(torch.randint(1024, (2, 8), device="cuda")).sum().backward()
    assert t.summary().loc["weights", "at_end"] == 4 * 1024 * WIDTH // 4
    assert not t.data.meta["imagined"]["doubts"]


def test_each_stage_of_a_pipeline_is_a_class_of_ranks() -> None:
    """By the dimension of the mesh, or because ranks send to each other."""
    mesh = {"shape": [4, 2, 8], "names": ["pp", "dp", "tp"]}
    assert others.classes(64, [mesh], talks=True) == [0, 16, 32, 48]
    assert others.classes(64, [{"shape": [64], "names": ["dp"]}], talks=False) == [0]
    assert others.classes(4, [], talks=True) == [0, 1, 2, 3]
    assert others.classes(64, [], talks=True) == [0, 1, 32, 63]


def test_a_stage_runs_alone_and_talks_to_nobody() -> None:
    """The first and the last stage, one forward and one backward in turn."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    peaks = []
    for rank in (0, 1):
        with pytracer.imagine("H100", ranks=2, rank=rank) as t:
            dist.init_process_group("nccl")
            like = torch.empty(4, WIDTH, device="cuda", requires_grad=True)
            stage = PipelineStage(
                blocks(), rank, 2, torch.device("cuda"), input_args=like, output_args=like
            )
            schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
            x = torch.randn(16, WIDTH, device="cuda")
            schedule.step(x) if rank == 0 else schedule.step(target=x)
        assert t.data.meta["imagined"]["point_to_point"]
        peaks.append(t.peak.by_category["activations"])
    assert peaks[0] > peaks[1], "the first stage has more batches under way"


def test_objects_of_other_ranks_are_those_of_this_one() -> None:
    """A program that gathers them is listed; one that receives another's stops, with its line."""
    with pytracer.imagine("H100", ranks=3, rank=1) as t:
        dist.init_process_group("nccl")
        assert dist.get_rank() == 1
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, "mine")
        assert objects == ["mine"] * 3
        with pytest.raises(errors.CannotImagine, match=r"test_imagine_ranks.py:\d+.*input_args"):
            dist.recv_object_list(objects, 0)
    assert len(t.data.meta["imagined"]["stand_ins"]) == 1


def test_values_of_other_ranks_are_those_of_this_one() -> None:
    """What relies on that is listed: a gathered value, and a decision by a sum over ranks."""
    with pytracer.imagine("H100", ranks=4) as t:
        dist.init_process_group("nccl")
        own = torch.tensor([7])
        parts = [torch.empty(1, dtype=torch.long) for _ in range(4)]
        dist.all_gather(parts, own)
        assert [part.item() for part in parts] == [7] * 4
        dist.broadcast(own, 0)
        assert bool(own == 7)
        dist.all_reduce(own)
        assert bool(own == 28)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        assert own.item() == 28
        dist.all_reduce(own, op=dist.ReduceOp.BXOR)
        with pytest.raises(errors.CannotImagine, match="decides"):
            bool(own == 0)
    assert len(t.data.meta["imagined"]["stand_ins"]) == 3


@pytest.mark.parametrize("last", [False, True])
def test_a_batch_norm_over_ranks_takes_what_a_card_does(last: bool) -> None:
    """Statistics go round, and with channels last blocks of threads meet in memory."""
    order = torch.channels_last if last else torch.contiguous_format
    channels, pixels, ranks = 64, 16 * 32 * 32, 4
    with pytracer.imagine("H100", ranks=ranks) as t:
        dist.init_process_group("nccl")
        norm = nn.SyncBatchNorm(channels).cuda()
        images = torch.randn(16, channels, 32, 32, device="cuda").to(memory_format=order)
        norm(images.requires_grad_()).backward(torch.empty_like(images))
    rows = t.allocations()
    whole, each = 4 * channels * pixels, 4 * channels
    blocks = pixels // (16 * 16)  # of 16 threads by 32 channels, 16 rows for each thread
    forward, backward = ([8, n * each * blocks] if last else [] for n in (4, 2))
    gathered = [4, 2 * each + 4, ranks * (2 * each + 4), ranks, 4 * ranks, *[ranks * each] * 2]
    expected = [*[each] * 2, *forward, *gathered, *[each] * 2, 4 * ranks, whole]
    expected += [whole, *[each] * 4, *backward, 2 * each, whole]
    assert rows.requested_bytes.tolist()[-len(expected) :] == expected


def test_an_uneven_shard_is_padded_once() -> None:
    """FSDP2 pads when it cuts. Before the first forward it looks again, by the address."""
    with pytracer.imagine("H100", ranks=2, rank=1) as t:
        dist.init_process_group("nccl")
        layer = fully_shard(nn.Linear(32, 33, device="cuda"))
        layer(torch.randn(4, 32, device="cuda")).sum().backward()
    rows = t.allocations()
    assert rows[rows.op == "aten::new_zeros"].requested_bytes.tolist() == [4 * 17 * 32, 4 * 17]


def test_shards_that_begin_without_memory_take_a_share() -> None:
    """A model made on the meta device gets memory after it is cut, and random weights by DTensor."""
    with pytracer.imagine("H100", ranks=4) as t:
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        mesh = init_device_mesh("cuda", (4,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        model.to_empty(device="cuda")
        for part in model:
            part.reset_parameters()
        train(model)
    assert t.summary().loc["weights", "at_end"] == 4 * 2 * (WIDTH + 1) * WIDTH // 4
    assert not t.data.meta["imagined"]["doubts"]


def test_afterwards_the_process_has_no_ranks() -> None:
    """No group, no variable, no hook, none of torch's functions."""

    def state() -> dict[str, Any]:
        groups = dist.distributed_c10d
        return {
            "environment": dict(os.environ),
            "hook": sys.excepthook,
            "group": dist.is_initialized(),
            "functions": {name: value for name, value in vars(groups).items() if callable(value)},
            "reducer": dict(vars(dist.Reducer)),
            "mesh": dict(vars(dist.DeviceMesh)),
            "layers": dict(vars(nn.RNNBase)),
        }

    before = state()
    with pytracer.imagine("H100", ranks=2):
        train(sharded())
        assert os.environ["WORLD_SIZE"] == "2"
    assert state() == before


def test_a_rank_that_is_not_there_is_refused_and_so_is_another_number_of_ranks() -> None:
    """In words."""
    with pytest.raises(errors.UsageError, match="rank 2 is not one of 2"):
        pytracer.imagine("H100", ranks=2, rank=2)
    with (
        pytest.raises(errors.CannotImagine, match="wants 4 ranks, and 2 are imagined"),
        pytracer.imagine("H100", ranks=2),
    ):
        dist.init_process_group("nccl", rank=0, world_size=4)
    with (
        pytest.raises(errors.CannotImagine, match="--ranks 8"),
        pytracer.imagine("H100"),
    ):
        dist.init_process_group("nccl")
    with pytracer.imagine("H100") as t:
        dist.init_process_group("nccl", rank=3, world_size=4)
    assert t.data.meta["imagined"]["rank"] == 3


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
def test_a_sharded_fused_optimizer_fails_where_torch_does(kind: str) -> None:
    """Not every torch shards each of them, and the imagined run gives torch's own reason."""

    def outcome(device: str) -> str:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        layer = fully_shard(nn.Linear(8, 8, device=device), mesh=mesh)
        optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1, fused=True)
        layer(torch.ones(2, 8, device=device)).sum().backward()
        try:
            optimizer.step()
        except NotImplementedError as error:
            return str(error)
        return "steps"

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        real = outcome("cpu")
    finally:
        dist.destroy_process_group()
    with pytracer.imagine("H100", ranks=2):
        dist.init_process_group("nccl")
        assert outcome("cuda") == real


def test_each_stream_has_blocks_of_its_own() -> None:
    """As on a card: what one stream has freed serves no other."""

    def reserved(*, aside: bool) -> int:
        with pytracer.imagine("H100") as t:
            stream = torch.cuda.Stream()
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(stream if aside else None):
                assert (torch.cuda.current_stream() == stream) == aside
                torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert (
            t.replay("").peak_reserved
            == t.data.meta["counters"]["end"]["cuda:0"]["reserved_bytes.peak"]
        )
        return int(t.replay("").peak_reserved)

    assert reserved(aside=False) == 64 << 20
    assert reserved(aside=True) == 128 << 20


def test_streams_and_events_have_the_attributes_of_real_ones() -> None:
    """On each torch: FSDP2 of torch 2.15 asks a stream for more than that of 2.13 does."""
    of_other_processes = {"ipc_handle", "from_ipc_handle"}
    for real in (torch.Stream, torch.cuda.Stream, torch.Event, torch.cuda.Event):
        with pytracer.imagine("H100"):
            kind = torch.cuda.Stream if "Stream" in real.__name__ else torch.cuda.Event
            there = {*dir(kind())}
        public = {name for name in dir(real) if not name.startswith("_")}
        assert public - there <= of_other_processes


def test_a_backward_runs_on_the_streams_of_its_forward() -> None:
    """As on a card: autograd goes to the stream that was the current one when it made the node."""
    with pytracer.imagine("H100") as t:
        stream = torch.cuda.Stream()
        on: list[Any] = []

        def note(gradient: torch.Tensor) -> None:
            on.append(torch.cuda.current_stream())

        x = torch.ones(1000, device="cuda", requires_grad=True)
        first = x * 2
        with torch.cuda.stream(stream):
            second = first * 3
            second.register_hook(note)
        (second * 5).sum().backward()
        assert on == [stream]
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    rows = t.allocations()
    of = rows[(rows.phase == "backward") & (rows.requested_bytes == 4000)]
    assert sorted(of.stream - rows.stream.min()) == [0, 0, stream.stream_id]


def test_a_block_that_another_stream_uses_ends_when_that_has_come_so_far() -> None:
    def most(*acts: Callable[[Any], object], on_its_own: bool = False) -> int:
        """The upper bound of the peak in MiB, with another 4 MiB made at the end."""
        with pytracer.imagine("H100") as t:
            late = types.SimpleNamespace(one=torch.ones(MIB, device="cuda"))
            late.stream = None if on_its_own else torch.cuda.Stream()
            late.one.record_stream(late.stream or torch.cuda.current_stream())
            late.event = torch.cuda.Event()
            for act in acts:
                act(late)
            torch.empty(MIB, device="cuda")
        return int(t.data.meta["imagined"].get("peak_at_most", t.peak.bytes)) // MIB

    def lets_go(late: Any) -> None:
        del late.one

    def records(late: Any) -> None:
        late.event.record(late.stream)

    def waits(late: Any) -> None:
        late.event.synchronize()

    assert most() == 8
    assert most(lets_go, on_its_own=True) == 4
    assert most(lets_go) == 8
    assert most(lets_go, lambda late: late.stream.synchronize()) == 4
    assert most(lets_go, lambda late: torch.cuda.synchronize()) == 4
    assert most(lets_go, lambda late: torch.accelerator.synchronize()) == 4
    assert most(lets_go, lambda late: torch.cuda.current_stream().synchronize()) == 8
    assert most(lets_go, records, waits) == 4
    assert most(records, lets_go, waits) == 8
    assert most(lambda late: torch.cuda.synchronize(), lets_go) == 8


def test_a_pass_that_uses_another_stream_widens_reserved() -> None:
    """The end of its gradient is not sure, though the program never waits for the card."""

    def reserved(*, aside: bool) -> tuple[int, int, int]:
        """The lower end, what the run takes, and the upper end."""
        with pytracer.imagine("H100") as t:
            x = torch.ones(MIB, device="cuda", requires_grad=True)
            first = x * 2
            with torch.cuda.stream(torch.cuda.Stream() if aside else None):
                second = first * 3
            (second * 5).sum().backward()
            both = [torch.empty(MIB, device="cuda") for _ in range(2)]
            del both
        least, most = t.fits().reserved
        return least, t.data.meta["counters"]["end"]["cuda:0"]["reserved_bytes.peak"], most

    assert len({*reserved(aside=False)}) == 1
    least, sure, most = reserved(aside=True)
    assert least < sure < most


# ---------------------------------------------------------------- what NCCL keeps


def bytes_of(program: Callable[[Any], None]) -> tuple[int, int]:
    """The peak and the upper bound in MiB, of a program that then makes another 4 MiB."""
    with pytracer.imagine("H100", ranks=2) as t:
        dist.init_process_group("nccl")
        one = torch.ones(MIB, device="cuda")
        program(one)
        torch.empty(MIB, device="cuda")
    most = t.data.meta["imagined"].get("peak_at_most", t.peak.bytes)
    return t.peak.bytes // MIB, most // MIB


def exchange(one: torch.Tensor, *, wait: bool = False) -> torch.Tensor:
    result = torch.empty(MIB, device="cuda")
    work = dist.all_to_all_single(result, one, async_op=True)
    if wait:
        work.wait()
    return result


def another() -> None:
    dist.all_reduce(torch.ones(1, device="cuda"))


def step() -> None:
    weight = torch.ones(1, device="cuda", requires_grad=True)
    weight.grad = torch.ones(1, device="cuda")
    torch.optim.SGD([weight]).step()


def test_a_collective_keeps_its_tensors_until_somebody_waits() -> None:
    """If nobody does: at least until the next one, and at most for two steps."""
    kept: list[torch.Tensor] = []

    def program(*then: Callable[[], None], wait: bool = False) -> Callable[[Any], None]:
        def run(one: torch.Tensor) -> None:
            kept[:] = [exchange(one + 1, wait=wait)]  # the sum dies here
            for each in then:
                each()

        return run

    assert bytes_of(program(wait=True)) == (12, 12)
    assert bytes_of(program()) == (16, 16)
    assert bytes_of(program(another)) == (12, 16)
    assert bytes_of(program(another, step)) == (12, 16)
    assert bytes_of(program(another, step, step)) == (12, 12)
    kept.clear()


def test_what_is_sent_may_be_in_use_until_the_program_waits_for_the_card() -> None:
    """By reading a number, by a copy to the host, or in so many words."""

    def program(wait: Callable[[torch.Tensor], object]) -> Callable[[Any], None]:
        def run(one: torch.Tensor) -> None:
            dist.send(one + 1, 1)
            wait(one)

        return run

    assert bytes_of(program(lambda one: None)) == (8, 12)
    for wait in (
        lambda one: float(one[0]),
        lambda one: one[:1].cpu(),
        lambda one: torch.cuda.synchronize(),
    ):
        assert bytes_of(program(wait)) == (8, 8)


def test_works_of_a_batch_keep_no_tensor() -> None:
    """NCCL has one work for all that a batch sends and receives, and that has no outputs."""

    def peak(*, in_a_batch: bool) -> int:
        with pytracer.imagine("H100", ranks=2) as t:
            dist.init_process_group("nccl")
            sends = dist.P2POp(dist.isend, torch.ones(MIB, device="cuda"), 1)
            works = dist.batch_isend_irecv([sends]) if in_a_batch else [dist.isend(sends.tensor, 1)]
            del sends
            torch.empty(MIB, device="cuda")
            for work in works:
                work.wait()
        return t.peak.bytes // MIB

    assert peak(in_a_batch=True) == 4
    assert peak(in_a_batch=False) == 8


def test_the_bounds_are_in_the_table_and_decide_whether_it_surely_fits() -> None:
    """A card between the two may do."""
    from pytracer.export.fits_text import on_a_card

    with pytracer.imagine("H100", ranks=2) as t:
        dist.init_process_group("nccl")
        for _ in range(4):
            dist.send(torch.ones(32 * MIB, device="cuda"), 1)
    imagined = t.data.meta["imagined"]
    assert imagined["peak_at_most"] == 4 * t.peak.bytes == 4 * 128 * MIB
    assert imagined["reserved_at_most"] == 4 * t.replay().peak_reserved
    assert "With what NCCL may keep the peak is at most 512 MiB" in " ".join(t.table().split())
    assert on_a_card(t.fits("256MiB")).startswith("may fit")
    assert on_a_card(t.fits("1GiB")).startswith("may fit")  # for what may be beside the allocator
    assert on_a_card(t.fits("2GiB")).startswith("may fit")  # for what NCCL may take
    assert on_a_card(t.fits("3GiB")).startswith("fits")


@pytest.mark.parametrize("rank", [0, 5])
def test_a_part_of_a_mesh_has_its_ranks(rank: int) -> None:
    """Torch puts the mode of fake tensors aside while it cuts a mesh."""
    with pytracer.imagine("H100", ranks=6, rank=rank):
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (3, 2), mesh_dim_names=("dp", "tp"))
        assert mesh["tp"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert mesh["dp"].mesh.tolist() == [rank % 2, rank % 2 + 2, rank % 2 + 4]
        assert mesh["dp", "tp"] is mesh
        assert mesh["dp"].get_local_rank() == rank // 2


def test_weights_are_split_by_a_part_of_a_mesh() -> None:
    """FSDP2 over one dimension, tensor parallelism over the other: each weight is cut twice."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    with pytracer.imagine("H100", ranks=6) as t:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (3, 2), mesh_dim_names=("dp", "tp"))
        model = blocks()
        for block in model:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
        train(fully_shard(model, mesh=mesh["dp"]))
    up = -(-2 * WIDTH // 3) * (WIDTH + 1)  # half of the rows, and of those a third
    down = -(-WIDTH // 3) * (2 * WIDTH + 1)
    assert t.summary().loc["weights", "at_end"] == 4 * LAYERS * (up + down)


# ---------------------------------------------------------------- which card


@pytest.mark.parametrize("selects", [True, False])
def test_a_rank_may_give_its_card_any_number(selects: bool) -> None:
    """Many programs use their rank as the number, as the tutorial of DistributedDataParallel does."""

    def peak(number: int) -> int:
        with pytracer.imagine("H100", ranks=2, rank=1) as t:
            dist.init_process_group("nccl")
            if selects:
                torch.cuda.set_device(number)
                assert torch.empty(1, device="cuda").device.index == number
                assert torch.cuda.current_device() == number
            device = torch.device("cuda", number)
            model = nn.parallel.DistributedDataParallel(
                nn.Linear(WIDTH, WIDTH, device=device), device_ids=[number]
            )
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.ones(16, WIDTH, device=device)).sum().backward()
                optimizer.step()
        return t.peak.bytes

    assert peak(0) == peak(1)


def test_a_device_may_be_chosen_for_a_block() -> None:
    with pytracer.imagine("H100"):
        with torch.cuda.device(3):
            assert torch.cuda.current_device() == 3
            with torch.cuda.device("cuda:1"):
                assert torch.cuda.current_device() == 1
            assert torch.cuda.current_device() == 3
        assert torch.cuda.current_device() == 0


def test_two_cards_in_one_process_are_refused() -> None:
    with (
        pytest.raises(errors.CannotImagine, match="uses cuda:1 beside cuda:0, and one card"),
        pytracer.imagine("H100"),
    ):
        torch.ones(8, device="cuda:0").to("cuda:1")


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:::torch")
def test_attention_of_distributed_tensors_has_the_cards_kernel() -> None:
    """Context parallel: each rank has a part of each sequence, and keys and values go round."""
    with pytracer.imagine("H100", ranks=2) as t:
        dist.init_process_group("nccl")
        place = parallel.Place(0, 2, "cuda:0", "middle")
        training = parallel.WAYS["context_parallel"].build(place)
        training.step()
    rows = t.allocations()
    saved = rows[rows.op.astype(str).str.contains("flash_attention") & (rows.phase == "forward")]
    layers, half = place.shape.layers, place.rows * place.length // 2
    of_a_layer = 2 * half * place.shape.width  # bfloat16
    assert (saved.requested_bytes == of_a_layer).sum() >= layers
