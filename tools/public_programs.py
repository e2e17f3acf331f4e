"""Runs public programs of other people. A few lines drive each, with synthetic data.

    python tools/public_programs.py               # runs all, untraced and in each mode; the table
    python tools/public_programs.py gan diffusion # some of them
    python tools/public_programs.py --programs FOLDER   # scripts from a folder of yours, unchanged

Losses, parameters, stdout, stderr, warnings and exit status must be those of the untraced program,
bit for bit. Only times in the printed text are left out. None of these programs is part of this
project. Their packages must not replace your torch, so hold it with a constraint:

    python -m pip freeze | grep -E '^(torch|numpy)==' > constraints.txt
    python -m pip install -c constraints.txt '.[programs]'
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import random
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import transparency_page  # noqa: E402
from run_torch_tests import MODES as ALL_MODES, UNTRACED, WHOLE  # noqa: E402

MODES = [mode for mode in ALL_MODES if mode != WHOLE]  # the run is one trace anyway
PROGRAMS: dict[str, "Public"] = {}
F = TypeVar("F", bound=Callable[..., Any])


class Public:
    """A program, and the packages that it needs."""

    def __init__(self, run: Callable[[], Any], needs: tuple[str, ...]) -> None:
        self.run, self.needs = run, needs

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    @property
    def versions(self) -> str:
        names = {"torch_geometric": "torch-geometric", "pyro": "pyro-ppl", "ignite": "pytorch-ignite",
                 "backpack": "backpack-for-pytorch"}  # fmt: skip
        return ", ".join(f"{name} {version(names.get(name, name))}" for name in self.needs)


def program(*needs: str) -> Callable[[F], F]:
    """Registers a program. Its results are compared: losses, models, tensors, numbers."""

    def add(run: F) -> F:
        PROGRAMS[run.__name__] = Public(run, needs)
        return run

    return add


# -------------------------------------------------------------------------- the programs


@program("transformers", "accelerate")
def hugging_face_trainer() -> Any:
    import torch
    import transformers

    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=64,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    words = torch.randint(0, 64, (64, 16))
    data = [{"input_ids": row, "labels": row} for row in words]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            logging_steps=3, eval_steps=6, eval_strategy="steps", save_strategy="no",
            report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
    return trainer.state.log_history, model


@program("transformers", "peft")
def lora_fine_tuning() -> Any:
    import peft
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    losses = []
    for _ in range(4):
        words = torch.randint(0, 64, (2, 12))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    written = model.generate(words[:, :4], max_new_tokens=6, do_sample=True, pad_token_id=0)
    return losses, written, model


@program("transformers")
def compiled_transformer() -> Any:
    import torch
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for size in (8, 8, 12, 16):
        words = torch.randint(0, 64, (2, size))
        loss = compiled(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    from torch._dynamo.utils import counters

    return losses, model, {name: dict(counters[name]) for name in ("frames", "stats")}


@program("accelerate")
def accelerate_loop() -> Any:
    import torch
    from accelerate import Accelerator
    from torch import nn

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss)
    accelerator.print("trained", len(losses))
    return losses, accelerator.unwrap_model(model)


@program("lightning")
def gan() -> Any:
    """Two optimizers, by hand, in Lightning."""
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.nn import functional

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
            self.losses: list[Any] = []

        def configure_optimizers(self) -> Any:
            kinds = (self.generator, self.critic)
            return [torch.optim.Adam(kind.parameters(), lr=1e-3) for kind in kinds]

        def training_step(self, batch: Any, index: int) -> None:
            of_generator, of_critic = self.optimizers()
            (real,) = batch
            made = self.generator(torch.randn(len(real), 4))
            self.toggle_optimizer(of_generator)
            loss = functional.softplus(-self.critic(made)).mean()
            self.manual_backward(loss)
            of_generator.step()
            of_generator.zero_grad()
            self.untoggle_optimizer(of_generator)
            self.toggle_optimizer(of_critic)
            both = functional.softplus(-self.critic(real)) + functional.softplus(
                self.critic(made.detach())
            )
            self.manual_backward(both.mean())
            of_critic.step()
            of_critic.zero_grad()
            self.untoggle_optimizer(of_critic)
            self.losses += [loss.detach(), both.mean().detach()]
            self.log("loss", loss)

    model = Gan()
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    return model.losses, model


@program("gpytorch")
def gaussian_process() -> Any:
    import gpytorch
    import torch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    x = torch.linspace(0, 1, 40)
    y = torch.sin(6 * x) + 0.1 * torch.randn(40)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Exact(x, y, likelihood)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    model.eval()
    likelihood.eval()
    with gpytorch.settings.fast_pred_var():
        predicted = likelihood(model(torch.linspace(0, 1, 7)))
    return losses, predicted.mean, predicted.variance, model


@program("botorch", "gpytorch")
def bayesian_optimisation() -> Any:
    import torch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x = torch.rand(10, 2, dtype=torch.double)
    y = -(x - 0.3).square().sum(-1, keepdim=True)
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
    acquisition = LogExpectedImprovement(model, best_f=y.max())
    return *optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=16), model


@program("pyro")
def variational_inference() -> Any:
    import pyro
    import pyro.distributions as dist
    import torch
    from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.optim import ClippedAdam

    pyro.set_rng_seed(0)
    x = torch.randn(50, 2)
    y = x @ torch.tensor([1.0, -2.0]) + 0.1 * torch.randn(50)

    def model(x: Any, y: Any) -> None:
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)

    guide = AutoNormal(model)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(20)]
    chain = MCMC(NUTS(model), num_samples=10, warmup_steps=5, disable_progbar=True)
    chain.run(x, y)
    return losses, dict(pyro.get_param_store().items()), chain.get_samples()


@program("stable_baselines3")
def reinforcement_learning() -> Any:
    import gymnasium
    import numpy as np
    from stable_baselines3 import PPO, SAC

    class Point(gymnasium.Env):  # type: ignore[type-arg, misc]
        """Walk to the origin."""

        observation_space = gymnasium.spaces.Box(-4, 4, (2,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.at = self.np_random.uniform(-1, 1, 2).astype(np.float32)
            self.left = 20
            return self.at, {}

        def step(self, action: Any) -> Any:
            self.at = np.clip(self.at + 0.1 * action, -4, 4).astype(np.float32)
            self.left -= 1
            return self.at, -float(np.abs(self.at).sum()), self.left == 0, False, {}

    on_policy = PPO("MlpPolicy", Point(), n_steps=64, batch_size=32, seed=0, device="cpu")
    on_policy.learn(256)
    off_policy = SAC("MlpPolicy", Point(), learning_starts=20, seed=0, device="cpu", verbose=0)
    off_policy.learn(60)
    return on_policy.policy, off_policy.policy, off_policy.predict(np.zeros(2), deterministic=True)


@program("diffusers")
def diffusion() -> Any:
    import torch
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    noising = DDPMScheduler(num_train_timesteps=20)
    average = EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        clean, noise = torch.randn(2, 4, 1, 8, 8)
        times = torch.randint(0, 20, (4,))
        loss = (model(noising.add_noise(clean, noise, times), times).sample - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss)
    sample = torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        for moment in noising.timesteps[-5:]:
            sample = noising.step(model(sample, moment).sample, moment, sample).prev_sample
    return losses, sample, model, average.shadow_params


@program("torch_geometric")
def graph_network() -> Any:
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(8, 16), GATConv(16, 8, heads=2)
            self.head = torch.nn.Linear(16, 3)

        def forward(self, data: Any) -> Any:
            x = self.first(data.x, data.edge_index).relu()
            x = self.second(x, data.edge_index).relu()
            return self.head(global_mean_pool(x, data.batch))

    graphs = [
        Data(torch.randn(6, 8), torch.randint(0, 6, (2, 14)), y=torch.randint(0, 3, (1,)))
        for _ in range(24)
    ]
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batch in DataLoader(graphs, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, model


@program("timm", "torchvision")
def image_classifier() -> Any:
    import timm
    import timm.optim
    import timm.scheduler
    import timm.utils
    import torch

    model = timm.create_model("resnet10t", num_classes=4, drop_path_rate=0.1)
    average = timm.utils.ModelEmaV3(model, decay=0.9)
    optimizer = timm.optim.create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05)
    schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=4, warmup_t=1)
    model.set_grad_checkpointing(True)
    losses = []
    for step in range(4):
        loss = torch.nn.functional.cross_entropy(
            model(torch.randn(4, 3, 32, 32)), torch.randint(0, 4, (4,))
        )
        loss.backward()
        timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(step)
        average.update(model)
        losses.append(loss)
    return losses, model, average.module


@program("x_transformers")
def language_model() -> Any:
    import torch
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True, ff_glu=True)
    model = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(torch.randint(0, 64, (2, 17)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, model.generate(torch.zeros(1, 4, dtype=torch.long), 6), model


@program("vit_pytorch", "torchvision")
def vision_transformer() -> Any:
    import torch
    from vit_pytorch import MAE, ViT

    encoder = ViT(image_size=16, patch_size=4, num_classes=4, dim=32, depth=2, heads=2, mlp_dim=64)
    learner = MAE(encoder=encoder, masking_ratio=0.75, decoder_dim=32, decoder_depth=1)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = learner(torch.randn(2, 3, 16, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, learner


@program("opacus")
def differential_privacy() -> Any:
    """A gradient of each example: hooks on every module."""
    import torch
    from opacus import PrivacyEngine

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
    model.append(torch.nn.Linear(4 * 36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(0, 3, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, engine.get_epsilon(1e-3), model


@program("backpack")
def second_order() -> Any:
    """Extends every module's backward."""
    import torch
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, DiagGGNExact, Variance

    model = extend(
        torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Sigmoid(), torch.nn.Linear(5, 3))
    )
    objective = extend(torch.nn.CrossEntropyLoss())
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = objective(model(torch.randn(7, 6)), torch.randint(0, 3, (7,)))
        with backpack(BatchGrad(), Variance(), DiagGGNExact()):
            loss.backward()
        for parameter in model.parameters():
            found += [parameter.grad_batch, parameter.variance, parameter.diag_ggn_exact]
            parameter.data.sub_(0.1 * parameter.grad)
    return found, model


@program("torchdiffeq")
def differential_equation() -> Any:
    import torch
    from torchdiffeq import odeint_adjoint

    class Field(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
            )

        def forward(self, time: Any, state: Any) -> Any:
            return self.net(state**3)

    field = Field()
    optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
    times, start = torch.linspace(0.0, 1.0, 5), torch.tensor([[2.0, 0.0]])
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = odeint_adjoint(field, start, times).abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, field


@program("skorch")
def packed_sequences() -> Any:
    """A recurrent network with sequences of many lengths, in a scikit-learn estimator."""
    import numpy as np
    import torch
    from skorch import NeuralNetClassifier
    from torch import nn
    from torch.nn.utils import rnn

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 8, padding_idx=0)
            self.lstm = nn.LSTM(
                8, 8, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True
            )
            self.head = nn.Linear(16, 2)

        def forward(self, x: Any) -> Any:
            lengths = (x > 0).sum(1).clamp(min=1)
            packed = rnn.pack_padded_sequence(self.words(x), lengths, True, enforce_sorted=False)
            states, _ = rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.head(states.mean(1)).softmax(-1)

    random_words = np.random.default_rng(0)
    x = random_words.integers(1, 20, (40, 9))
    for row, length in zip(x, random_words.integers(1, 9, 40), strict=True):
        row[length:] = 0
    y = (x.sum(1) > 60).astype(np.int64)
    net = NeuralNetClassifier(Reader, max_epochs=3, lr=0.1, batch_size=8, device="cpu")
    net.fit(x, y)
    history = [
        {k: v for k, v in row.items() if k in ("train_loss", "valid_loss")} for row in net.history
    ]
    return history, net.predict_proba(x), torch.tensor(net.predict(x)), net.module_


@program("ignite")
def engine_with_handlers() -> Any:
    import torch
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import EMAHandler, TerminateOnNan
    from ignite.metrics import Accuracy, Loss, RunningAverage

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    objective = torch.nn.CrossEntropyLoss()
    data = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(6)]
    trainer = create_supervised_trainer(model, optimizer, objective)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    average = EMAHandler(model, momentum=0.1)
    average.attach(trainer, event=Events.ITERATION_COMPLETED)
    metrics = {"accuracy": Accuracy(), "loss": Loss(objective)}
    evaluator = create_supervised_evaluator(model, metrics=metrics)
    seen = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Any) -> None:
        seen.append([engine.state.metrics["loss"], evaluator.run(data).metrics])
        print(f"epoch {engine.state.epoch}: {seen[-1]}")

    trainer.run(data, max_epochs=3)
    return seen, model, average.ema_model


@program("captum")
def explanations() -> Any:
    """Hooks on modules, gradients of inputs, layers that are listened to."""
    import torch
    from captum.attr import DeepLift, IntegratedGradients, LayerGradCam, NoiseTunnel

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 3)
    )
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    smooth = NoiseTunnel(IntegratedGradients(model))
    return [
        IntegratedGradients(model).attribute(x, target=1, n_steps=8),
        DeepLift(model).attribute(x, target=0),
        LayerGradCam(model, model[0]).attribute(x, target=2),
        smooth.attribute(x, nt_samples=2, target=1, n_steps=4),
        model,
    ]


# -------------------------------------------------------------------------- one run


def run_one(name: str, mode: str, out: str) -> None:
    """Runs a program in a process of its own. Its result goes to `out`, apart from its output."""
    random.seed(0)
    import numpy as np
    import torch

    np.random.seed(0)  # noqa: NPY002 - what programs use
    torch.manual_seed(0)
    torch.set_num_threads(1)
    file = Path(name)
    run = PROGRAMS[name].run if name in PROGRAMS else lambda: variables_of(file)
    block = block_of(mode)
    with block:  # one line for all modes, because tracebacks show it
        result = run()
    if mode != UNTRACED:
        data = block.data
        assert not data.losses, data.losses
        assert not data.meta["callback_errors"], data.meta["callback_errors"]
    Path(out).write_text(json.dumps(list(digests(result))))


def block_of(mode: str) -> Any:
    if mode == UNTRACED:
        return contextlib.nullcontext()
    from pytracer import trace

    return trace(table=False, **ALL_MODES[mode])


def variables_of(script: Path) -> dict[str, Any]:
    """Returns the variables of a script that has run as a program."""
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    variables = runpy.run_path(str(script), run_name="__main__")
    return {name: value for name, value in variables.items() if not name.startswith("__")}


def digests(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Returns the bits of each number and tensor by its place. Other objects are no results."""
    import numpy as np
    import torch

    if isinstance(value, torch.nn.Module):
        yield from digests(dict(value.state_dict()), where)
    elif isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        yield (
            where,
            f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(content).hexdigest()[:16]}",
        )
    elif isinstance(value, np.ndarray):
        yield (
            where,
            f"{value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}",
        )
    elif isinstance(value, dict):
        for key, item in value.items():
            if not is_a_time(str(key)):
                yield from digests(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from digests(item, f"{where}[{index}]")
    elif isinstance(value, int | float | str | bool):
        yield where, repr(value)


def is_a_time(name: str) -> bool:
    return "runtime" in name or "per_second" in name


# -------------------------------------------------------------------------- comparing


def observed(name: str, mode: str) -> dict[str, Any]:
    """Returns everything that is visible of a run from outside, and its result."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # another version's
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        ended = subprocess.run(
            [sys.executable, "-W", "always", __file__, "--one", name, mode, str(out)],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONHASHSEED": "0",
                "HF_HUB_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        result = dict(json.loads(out.read_text())) if out.exists() else {}
        printed = {
            stream: plain(text, folder)
            for stream, text in (("stdout", ended.stdout), ("stderr", ended.stderr))
        }
    return {"status": ended.returncode, "result": result, **printed}


def plain(text: str, folder: str) -> list[str]:
    """Returns lines without the parts that vary: times, rates, process ids, the folder."""
    text = text.replace(folder, "FOLDER")
    text = re.sub(r"('?\w*(runtime|per_second)'?: )'?[0-9.e+-]+'?", r"\1T", text)
    text = re.sub(r"\d+:\d\d(:\d\d)?([.,]\d+)?|[0-9.]+ ?(it/s|s/it|ms|s\b)|pid[= ]\d+", "T", text)
    text = re.sub(r"0x[0-9a-f]+|tmp\w+|\d{4}-\d\d-\d\d", "T", text)
    text = re.sub(r"(?m)^([A-Z])\d{4} T \d+ ", r"\1 T ", text)  # torch's log: day, time, process
    return [re.sub(r"\d+[.]\d+$", "T", line) for line in text.splitlines()]


def difference(name: str, mode: str, untraced: dict[str, Any]) -> list[str]:
    traced = observed(name, mode)
    found = [
        f"{part}: {shortest(untraced[part], traced[part])}"
        for part in ("status", "stdout", "stderr")
        if traced[part] != untraced[part]
    ]
    places = untraced["result"] | traced["result"]
    different = [
        place for place in places if untraced["result"].get(place) != traced["result"].get(place)
    ]
    if different:
        found.append(f"result: {len(different)} of {len(places)} values, {different[:3]}")
    return found


def shortest(one: Any, other: Any) -> str:
    if isinstance(one, list):
        lines = [line for line in other if line not in one] or [
            line for line in one if line not in other
        ]
        return " / ".join(lines[-3:])[:300]
    return f"{one!r}, {other!r} traced"


def run_all(names: list[str], modes: list[str]) -> dict[str, Any]:
    rows = []
    for name in names:
        known = PROGRAMS.get(name)
        if known is not None and known.missing:
            print(f"{name}: skipped, needs {', '.join(known.missing)}")
            rows.append({"program": name, "skipped": f"needs {', '.join(known.missing)}"})
            continue
        untraced, again = observed(name, UNTRACED), observed(name, UNTRACED)
        row: dict[str, Any] = {
            "program": Path(name).name,
            "packages": known.versions if known is not None else "",
            "values": len(untraced["result"]),
            "status": untraced["status"],
        }
        if untraced != again:
            row["flaky"] = [part for part in untraced if untraced[part] != again[part]]
        else:
            row["differs"] = {
                mode: found for mode in modes if (found := difference(name, mode, untraced))
            }
        print(f"{row}", flush=True)
        rows.append(row)
    return {
        "about": {
            "date": time.strftime("%Y-%m-%d"),
            "torch": version("torch"),
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "modes": modes,
        "programs": rows,
    }


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        run_one(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="instead of all programs")
    parser.add_argument("--programs", type=Path, help="a folder of scripts to run as they are")
    parser.add_argument("--modes", default=",".join(MODES), help="some of them, with commas")
    options = parser.parse_args()
    scripts = sorted(options.programs.resolve().glob("*.py")) if options.programs else []
    names = [*(options.names or ([] if scripts else PROGRAMS)), *map(str, scripts)]
    results = run_all(names, options.modes.split(","))
    if not options.names and not scripts:
        transparency_page.PUBLIC_PROGRAMS.write_text(json.dumps(results, indent=1) + "\n")
        transparency_page.write()
    sys.exit(any(row.get("differs") for row in results["programs"]))


if __name__ == "__main__":
    main()
