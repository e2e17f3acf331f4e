"""Whoever starts a job's ranks, each has a file that names its rank, and the folder is one job.

Launchers that are not installed are skipped: SLURM, MPI and Ray take more than a package of ours.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pytracer
from pytracer.data import meta
from tests.test_autostart import ROOT, START

# Trains one small model with DistributedDataParallel, in a group of two ranks.
TRAIN = """
import os
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

def train():
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        net(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

BY_LAUNCHER = """
distributed.init_process_group("gloo")
train()
distributed.destroy_process_group()
"""

# As programs for SLURM and MPI do, which know their rank by other names.
BY_NUMBER = """
rank = os.environ.get("SLURM_PROCID") or os.environ["OMPI_COMM_WORLD_RANK"]
store = distributed.FileStore("store", 2)
distributed.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
train()
distributed.destroy_process_group()
"""

BY_ITSELF = """
from torch import multiprocessing

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, at):
        return torch.ones(64)

def rank_of_two(rank):
    store = distributed.FileStore("store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for _ in torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"):
        pass  # a worker makes tensors too, and trains nothing
    train()
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.spawn(rank_of_two, nprocs=2)
"""

BY_LIGHTNING = """
import lightning, torch
from torch import nn

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

    def training_step(self, batch, number):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", devices=2, strategy="ddp", enable_model_summary=False, **quiet
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(256, 64), batch_size=16))
"""

BY_RAY = """
import ray, ray.train
from ray.train.torch import TorchTrainer

ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
share = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
TorchTrainer(train, scaling_config=share).fit()
"""

RUN = ("-m", "pytracer", "run", "--steps", "3", "train.py")
SELF_STARTED = pytest.mark.parametrize("way", ["PYTRACER=", "pytracer run"])

Launch = Callable[..., None]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Runs a program in a folder where the package is installed, and checks what each rank left."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "pytracer.pth").write_text(f"{ROOT}\n{START.read_text()}")
    (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")

    def launch(program: str, *command: str, name: str = "train", **variables: str) -> None:
        (tmp_path / "train.py").write_text(program)
        ran = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        both = [f"{name}.rank0.pytrace", f"{name}.rank1.pytrace"]
        # Ray kills its processes, also those that trained nothing. So they cannot clean up.
        left = ("-last", ".process") if name == "ray" else ()
        files = {file.name for file in tmp_path.glob("*.pytrace")}
        ours = {file for file in files if not any(part in file for part in left)}
        assert ours == set(both), ran.stderr[-3000:]
        for rank, file in enumerate(both):
            facts = meta.of(pytracer.load(tmp_path / file).data)
            assert (facts.rank, facts.world_size, facts.sharding.wrappers) == (rank, 2, ("DDP",))
        if name != "ray":  # which may stop to pass output on before the table is ready
            assert ran.stderr.count("Written to") == 1  # by rank 0
            assert f"{both[1]}. Compare all with:" in ran.stderr
        job = pytracer.load(tmp_path)
        assert sorted(job.ranks().index) == [0, 1]

    return launch


def self_started(way: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that records a program which starts its ranks itself, and its variables."""
    if way == "PYTRACER=":
        return (sys.executable, "train.py"), {"PYTRACER": "steps=3"}
    return (sys.executable, *RUN), {}


@pytest.mark.ci
@SELF_STARTED
def test_ranks_that_torch_spawns_are_recorded_and_a_loaders_workers_are_not(
    way: str, launch: Launch
) -> None:
    command, variables = self_started(way)
    launch(TRAIN + BY_ITSELF, *command, **variables)


@pytest.mark.ci
@SELF_STARTED
def test_ranks_that_lightning_starts_are_recorded(way: str, launch: Launch) -> None:
    pytest.importorskip("lightning")
    command, variables = self_started(way)
    launch(BY_LIGHTNING, *command, **variables)


@pytest.mark.nightly
def test_under_deepspeeds_launcher(launch: Launch) -> None:
    """The launcher gives each rank an option --local_rank, which is the program's."""
    pytest.importorskip("deepspeed")
    read = (
        'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--local_rank")\n'
    )
    program = f"{read}assert parser.parse_args().local_rank in ('0', '1')\n{TRAIN}{BY_LAUNCHER}"
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    options = ("--num_accelerators", "2", "--module")
    launch(program, sys.executable, launcher, *options, *RUN[1:], DS_ACCELERATOR="cpu")


def works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


@pytest.mark.nightly
def test_under_slurms_srun(launch: Launch) -> None:
    if not works("sinfo"):
        pytest.skip("needs SLURM")
    launch(TRAIN + BY_NUMBER, "srun", "-n", "2", "--overcommit", sys.executable, *RUN)


@pytest.mark.nightly
def test_under_mpirun(launch: Launch) -> None:
    if not works("mpirun", "--version"):
        pytest.skip("needs Open MPI")
    options = ("--allow-run-as-root", "--oversubscribe", "-n", "2")
    launch(TRAIN + BY_NUMBER, "mpirun", *options, sys.executable, *RUN)


@pytest.mark.nightly
def test_workers_of_ray_train_are_recorded(launch: Launch) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    launch(TRAIN + BY_RAY, sys.executable, "train.py", name="ray", PYTRACER="steps=3")
