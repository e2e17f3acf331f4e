"""Distributed training: shards are weights, gathered weights and buckets are communication."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import distributed, nn

from pytracer import trace
from pytracer.analysis.forecasts import changes

# One rank over gloo is enough for what belongs to whom, but for the first FSDP: alone it shards
# nothing.
PROGRAM = """
import json, sys
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from pytracer import trace

way, store, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
with trace(devices="cpu", table=False) as t:
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    if way == "first_fsdp":
        wrap = ModuleWrapPolicy({nn.Linear})
        cpu = torch.device("cpu")
        net = FullyShardedDataParallel(
            net, auto_wrap_policy=wrap, device_id=cpu, use_orig_params=True
        )
    elif way.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (1,))
        for layer in (*net, net):
            fully_shard(layer, mesh=mesh, reshard_after_forward=way == "fsdp")
    else:
        net = DistributedDataParallel(
            net, gradient_as_bucket_view=way == "view", bucket_cap_mb=0.5
        )
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        net(torch.randn(4, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = sum(p.numel() for p in net.parameters())
    if way == "dropped":
        del net, optimizer
summary = t.summary()
allocations = t.allocations()
communication = allocations[allocations.category == "communication"]
print(json.dumps({
    "parameters": parameters,
    "at_end": summary.at_end.to_dict(),
    "at_peak": summary.at_peak.to_dict(),
    "most": summary.own_peak.to_dict(),
    "roles": sorted(set(communication.role.dropna())),
    "table": str(t),
    "weight_roles": sorted(set(allocations[allocations.category == "weights"].role.dropna())),
}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    def run(way: str, ranks: int = 1) -> dict[str, Any]:
        store = tmp_path_factory.mktemp(way) / "store"
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, way, str(store), str(rank), str(ranks)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[1],
            )
            for rank in range(ranks)
        ]
        for process in reversed(started):
            told, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
        found: dict[str, Any] = json.loads(told)
        return found

    return run


@pytest.mark.slow
def test_the_buckets_of_ddp_are_communication_and_no_activations(trained) -> None:
    found = trained("buckets")
    gradients = 4 * found["parameters"]
    assert "bucket" in found["roles"]
    assert gradients <= found["at_end"]["communication"] <= gradients + 1024
    assert found["at_end"]["activations"] < 0.1 * gradients  # the last call's output and input
    assert found["most"]["gradients"] == gradients
    assert found["at_peak"]["unknown"] == 0


@pytest.mark.ci
@pytest.mark.slow
def test_buckets_are_known_though_the_model_is_gone_before_the_trace_ends(trained) -> None:
    found = trained("dropped")
    assert found["most"]["communication"] >= 4 * found["parameters"]
    assert found["most"]["functional"] < found["parameters"]


def test_three_steps_are_enough_to_know_the_buckets_of_a_model_that_is_gone(group: None) -> None:
    """It makes new buckets in its second step, and tells their sizes in its third."""

    def program() -> set[int]:
        layers = (nn.Linear(300 + 20 * i, 320 + 20 * i) for i in range(6))
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
        for _ in range(3):
            model(torch.randn(4, 300)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        told = model._get_ddp_logging_data()
        assert told["bucket_sizes"] != told["rebuilt_bucket_sizes"]
        return {int(size) for size in told["rebuilt_bucket_sizes"].split(", ")}

    with trace(table=False, devices="cpu") as t:
        sizes = program()
    assert sizes <= set(t.data.meta["ddp_buckets"])
    rows = t.allocations()
    assert sizes <= set(rows[rows.category == "communication"].requested_bytes)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", [0, 3])
def test_copies_that_a_communication_hook_sends_are_communication(
    group: None, views: bool, kind: torch.dtype, before: int
) -> None:
    """NCCL holds what a hook sends until the next backward sends something else."""
    layers = (nn.Linear(300 + 20 * i, 320 + 20 * i) for i in range(6))
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=1, gradient_as_bucket_view=views
    )
    sent: dict[int, torch.Tensor] = {}

    def compress(_: Any, bucket):  # type: ignore[no-untyped-def]  # DDP refuses another annotation
        sent[bucket.index()] = bucket.buffer().to(kind, copy=True)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(before)
    with trace(table=False, devices="cpu") as t:
        steps(4)
    sizes = {copy.nbytes for copy in sent.values()}
    rows = t.allocations()
    rows = rows[rows.requested_bytes.isin(sizes) & (rows.phase == "backward")]
    rows = rows[rows.end_ns.notna()]
    assert len(rows) >= 2 * len(sent)  # the first backward has other buckets
    assert set(rows.category) == {"communication"}


@pytest.mark.ci
@pytest.mark.slow
def test_buckets_beside_the_gradients_have_a_hint_and_others_have_none(trained) -> None:
    assert "gradient_as_bucket_view=True" in trained("buckets")["table"]
    assert "gradient_as_bucket_view" not in trained("view")["table"]


@pytest.mark.parametrize("batch", [4, 300, 900])
def test_views_of_buckets_save_what_is_said(batch: int, group: None) -> None:
    """Alone, and with the optimizer's free saving: the peak may then be in the backward."""

    def train(*, views: bool, fused: bool) -> trace:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
        net = nn.parallel.DistributedDataParallel(
            net, gradient_as_bucket_view=views, bucket_cap_mb=0.5
        )
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        with trace(net, optimizer, devices="cpu", table=False) as t:
            for _ in range(5):
                net(torch.randn(batch, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return t

    t = train(views=False, fused=False)
    found = [row for row in changes.changes(t.data, "cpu") if "bucket" in row.change]
    for row in found:
        assert row.peak_after == train(views=True, fused=False).peak.bytes
    assert found or batch > 4
    assert train(views=True, fused=True).peak.bytes <= changes.together(t.data, "cpu")


@pytest.mark.ci
def test_buckets_that_gradients_are_views_of_are_gradients(trained) -> None:
    found = trained("view")
    assert found["at_end"]["gradients"] == 4 * found["parameters"]
    assert found["most"]["communication"] < 1024


@pytest.mark.ci
@pytest.mark.slow
def test_fsdp_has_its_shards_and_what_it_gathers_as_weights(trained) -> None:
    found = trained("fsdp")
    assert found["at_end"]["weights"] == 4 * found["parameters"]
    assert found["most"]["gradients"] == 4 * found["parameters"]
    assert found["at_end"]["optimizer_state"] == pytest.approx(8 * found["parameters"], rel=0.01)
    # And a copy of one layer of six: in whole numbers, since two thirds are rounded up.
    assert 6 * found["most"]["weights"] >= 28 * found["parameters"]
    assert "unsharded" in found["weight_roles"]
    assert found["at_peak"]["unknown"] == 0


@pytest.mark.ci
@pytest.mark.slow
def test_weights_that_fsdp_keeps_for_backward_are_no_activations(trained) -> None:
    """Autograd saves them, as it does any weight."""
    found = trained("fsdp_kept")
    assert found["most"]["weights"] >= 2 * 4 * found["parameters"]
    assert found["most"]["activations"] < found["parameters"]


@pytest.mark.ci
@pytest.mark.slow
def test_the_first_fsdp_gathers_and_reduces_too(trained) -> None:
    found = trained("first_fsdp", ranks=2)
    shard = 4 * found["parameters"]  # each rank counts its own
    assert found["at_end"]["weights"] == shard
    assert found["most"]["gradients"] > shard  # and a layer's, before it is reduced
    assert found["at_end"]["optimizer_state"] == pytest.approx(2 * shard, rel=0.01)
    assert (
        3 * found["most"]["weights"] >= 4 * shard
    )  # and a copy of one layer of six, of both shards
    assert "unsharded" in found["weight_roles"]
    assert "reduce_scatter" in found["roles"]
    assert found["at_peak"]["unknown"] == 0


def test_a_buffer_that_a_thread_of_gloos_frees_late_is_no_result() -> None:
    """It tells of the end of a collective first, and lets go of the tensors later. On a machine that
    is busy that is after the phase."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:  # each waits for the other
        here, there = pool.map(
            lambda rank: distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), (0, 1)
        )
    net, theirs = nn.Linear(90, 90, bias=False), torch.zeros(8101)
    optimizer = torch.optim.SGD(net.parameters())
    may_let_go = threading.Event()

    def reduce(parameter: torch.Tensor) -> None:
        buffer = torch.cat([parameter.grad.view(-1), torch.zeros(1)])
        future = here.allreduce([buffer]).get_future()
        future.add_done_callback(lambda _: may_let_go.wait(60))  # in gloo's thread, as it goes on
        there.allreduce([theirs]).wait()
        future.wait()
        parameter.grad.copy_(buffer[:-1].view_as(parameter))

    def buffers() -> pd.DataFrame:
        rows = t.allocations()
        return rows[rows.requested_bytes == theirs.nbytes]

    net.weight.register_post_accumulate_grad_hook(reduce)
    with trace(devices="cpu", table=False) as t:
        for step in range(2):
            may_let_go.clear()
            net(torch.ones(4, 90)).sum().backward()
            optimizer.step()
            may_let_go.set()
            deadline = time.monotonic() + 60
            while buffers().end_ns.isna().any() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(buffers()) == step + 1
    assert list(buffers().free_phase) == ["other", "other"]
    assert list(buffers().category) == ["temporaries", "temporaries"]
    assert list(buffers().role) == ["backward", "backward"]


# DeepSpeed starts its own process group from torchrun's variables.
ZERO = """
import importlib, json, sys
import torch
import deepspeed
from torch import nn
from pytracer import trace

# It would be compiled first, for a minute. `deepspeed.comm` has torch itself by the module's name.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
parameters = sum(p.numel() for p in net.parameters())
engine, *_ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(sys.argv[1]), "reduce_bucket_size": 100_000,
                              "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    },
)
with trace(devices="cpu", table=False) as t:
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 256, dtype=torch.bfloat16)).sum())
        engine.step()
summary, rows = t.summary(), t.allocations()
buckets = rows[rows.requested_bytes == 200_000]  # of this size nothing else is
with open(f"{sys.argv[2]}.{engine.global_rank}", "w") as file:
    json.dump({"parameters": parameters, "at_end": summary.at_end.to_dict(),
               "most": summary.own_peak.to_dict(),
               "buckets": sorted(set(buckets.category))}, file)
"""


@pytest.mark.ci
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_shards_masters_and_buckets_are_what_they_are(
    stage: int, tmp_path: Path
) -> None:
    """Each of two ranks has half of the masters and of their state; at stage 3 of the weights too.
    A bucket in which gradients lie is theirs."""
    pytest.importorskip("deepspeed")
    (tmp_path / "zero.py").write_text(ZERO)
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         "zero.py", str(stage), str(tmp_path / "found")],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        count = found["parameters"]
        weights = (count if stage == 3 else 2 * count) + 2 * count
        assert found["at_end"]["weights"] == weights
        assert found["at_end"]["gradients"] == (count + 200_000 if stage == 3 else 0)
        assert found["at_end"]["optimizer_state"] == pytest.approx(4 * count, rel=0.001)
        assert found["buckets"] == (["communication"] if stage == 1 else ["gradients"])
        layer = 2 * (256 * 256 + 256)  # gathered, it may outlive the phase
        assert found["most"]["functional"] < (1.1 * layer if stage == 3 else 0.1 * count)
        assert found["most"]["unknown"] == 0


# DataParallel's threads begin without a CUDA context, and torch says so once.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.cuda
def test_gpu_what_data_parallel_copies_to_the_other_gpu_is_weights() -> None:
    """To the byte what the model has, in each step; and the gradients that come back are known."""
    import torch

    from pytracer import trace

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    base = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
    net = torch.nn.DataParallel(base, device_ids=[0, 1])
    optimizer = torch.optim.AdamW(base.parameters())
    with trace(net, optimizer, table=False) as t:
        for _ in range(3):
            net(torch.randn(16, 512, device="cuda:0")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = t.allocations()
    replicas = rows[(rows.device == "cuda:1") & (rows.role == "replica")]
    assert set(replicas.category) == {"weights"}
    held = replicas.groupby("step", observed=True).requested_bytes.sum()
    assert set(held) == {4 * 4 * 512 * 512}
    made = rows[rows.start_ns.notna()]  # other tests may have left blocks
    assert not (made.category == "unknown").any()
