"""Programs that make no mistake: what they keep they need. Those of programs/conformance are more of them."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pytracer import trace

WIDTH = 64

HEALTHY: dict[str, Callable[[Path], trace]] = {}


def healthy(run: Callable[[Path], trace]) -> Callable[[Path], trace]:
    HEALTHY[run.__name__] = run
    return run


class Work:
    """A model in training."""

    def __init__(self, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def traced(self, *more: Any) -> Any:
        targets = (self.model, self.optimizer, *more)
        return trace(*targets, stacks=True, devices="cpu", table=False)

    def learn(self, x: Tensor) -> float:
        loss: Tensor = (self.model(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@healthy
def an_evaluation_after_each_epoch(_: Path) -> trace:
    work = Work()
    with work.traced() as t:
        for _epoch in range(3):
            for _step in range(3):
                work.learn(torch.randn(32, WIDTH))
            work.model.eval()
            with torch.no_grad():
                sum(work.model(torch.randn(64, WIDTH)).mean().item() for _batch in range(3))
            work.model.train()
    return t


@healthy
def sequences_that_grow_longer(_: Path) -> trace:
    work = Work()
    with work.traced() as t:
        for step in range(8):
            work.learn(torch.randn(16 + 8 * step, WIDTH))
    return t


@healthy
def sequences_of_any_length(_: Path) -> trace:
    work = Work()
    with work.traced() as t:
        for rows in (40, 8, 64, 24, 56, 16, 48, 32):
            work.learn(torch.randn(rows, WIDTH))
    return t


@healthy
def a_curriculum_with_larger_images(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for side in (16, 16, 16, 24, 24, 24, 32, 32, 32):
            x, y = torch.randn(8, 3, side, side), torch.randint(0, 10, (8,))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


@healthy
def numbers_of_each_step_are_kept(_: Path) -> trace:
    work, losses = Work(), []
    with work.traced() as t:
        for _step in range(8):
            losses.append(work.learn(torch.randn(32, WIDTH)))
    return t


@healthy
def a_replay_buffer_with_a_bound(_: Path) -> trace:
    work, replay = Work(), deque[Tensor](maxlen=3)
    with work.traced() as t:
        for _step in range(9):
            replay.append(torch.randn(32, WIDTH))
            work.learn(torch.cat(list(replay)[-1:]))
    return t


@healthy
def a_replay_buffer_made_once(_: Path) -> trace:
    work, replay = Work(), torch.zeros(1000, WIDTH)
    with work.traced() as t:
        for step in range(8):
            replay[32 * step : 32 * (step + 1)] = torch.randn(32, WIDTH)
            work.learn(replay[torch.randint(0, 32 * (step + 1), (32,))])
    return t


@healthy
def an_average_of_the_weights(_: Path) -> trace:
    work = Work()
    average = [p.detach().clone() for p in work.model.parameters()]
    with work.traced() as t, torch.no_grad():
        for _step in range(5):
            with torch.enable_grad():
                work.learn(torch.randn(32, WIDTH))
            for mean, parameter in zip(average, work.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)
    return t


@healthy
def generation_with_a_cache(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval()
    with trace(model, stacks=True, devices="cpu", table=False) as t, torch.inference_mode():
        for _prompt in range(4):
            cache = torch.randn(2, 1, WIDTH)
            for _word in range(5):
                out, _weights = model(cache[:, -1:], cache, cache)
                cache = torch.cat([cache, out], 1)
    return t


@healthy
def a_teacher_without_grad_mode(_: Path) -> trace:
    work, teacher = Work(), nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, WIDTH))
    with work.traced(teacher) as t:
        for _step in range(5):
            x = torch.randn(32, WIDTH)
            with torch.no_grad():
                wanted = teacher(x)
            (work.model(x) - wanted).square().mean().backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
    return t


@healthy
def a_frozen_backbone(_: Path) -> trace:
    torch.manual_seed(0)
    backbone, head = (
        nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU()).requires_grad_(False),
        nn.Linear(512, 8),
    )
    optimizer = torch.optim.Adam(head.parameters())
    with trace(backbone, head, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _step in range(5):
            head(backbone(torch.randn(32, WIDTH))).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


@healthy
def a_generator_and_a_critic(_: Path) -> trace:
    torch.manual_seed(0)
    maker, critic = (
        nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, WIDTH)),
        nn.Linear(WIDTH, 1),
    )
    of_maker, of_critic = (torch.optim.Adam(m.parameters()) for m in (maker, critic))
    with trace(maker, critic, of_maker, of_critic, stacks=True, devices="cpu", table=False) as t:
        for _step in range(6):
            made = maker(torch.randn(32, 16))
            of_critic.zero_grad()
            (critic(made.detach()).mean() - critic(torch.randn(32, WIDTH)).mean()).backward()
            of_critic.step()
            of_maker.zero_grad()
            (-critic(made).mean()).backward()
            of_maker.step()
    return t


@healthy
def batches_of_a_loader(_: Path) -> trace:
    work = Work()
    data = DataLoader(TensorDataset(torch.randn(256, WIDTH)), batch_size=32, shuffle=True)
    with work.traced() as t:
        for _epoch in range(2):
            for (x,) in data:
                work.learn(x)
    return t


@healthy
def a_recurrent_state_that_is_detached(_: Path) -> trace:
    torch.manual_seed(0)
    cell = nn.GRUCell(32, 64)
    optimizer = torch.optim.SGD(cell.parameters(), 0.01)
    with trace(cell, optimizer, stacks=True, devices="cpu", table=False) as t:
        state = torch.zeros(16, 64)
        for _step in range(6):
            for _word in range(4):
                state = cell(torch.randn(16, 32), state)
            state.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = state.detach()
    return t


@healthy
def lbfgs_with_a_closure(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, history_size=3)
    x, y = torch.randn(128, WIDTH), torch.randn(128, WIDTH)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - y).square().mean()
        loss.backward()
        return loss

    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _step in range(5):
            optimizer.step(closure)
    return t


@healthy
def an_optimizer_in_backward(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with trace(model, *optimizers.values(), stacks=True, devices="cpu", table=False) as t:
        for _step in range(5):
            model(torch.randn(32, WIDTH)).square().mean().backward()
    return t


@healthy
def a_policy_gradient(_: Path) -> trace:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(policy.parameters())
    with trace(policy, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _episode in range(5):
            chances, rewards = [], []
            for _turn in range(10):
                found = torch.distributions.Categorical(logits=policy(torch.randn(8)))
                action = found.sample()
                chances.append(found.log_prob(action))
                rewards.append(float(action))
            (-torch.stack(chances) * torch.tensor(rewards)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


@healthy
def fast_weights_of_an_inner_loop(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.Adam(model.parameters())
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _task in range(5):
            fast = dict(model.named_parameters())
            for _turn in range(2):
                loss = (
                    torch.func.functional_call(model, fast, (torch.randn(8, 32),)).square().mean()
                )
                slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {k: v - 0.1 * g for (k, v), g in zip(fast.items(), slopes, strict=True)}
            torch.func.functional_call(
                model, fast, (torch.randn(8, 32),)
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return t


def batches(count: int) -> Iterator[Tensor]:
    for _ in range(count):
        yield torch.randn(32, WIDTH)


@healthy
def the_best_weights_so_far(_: Path) -> trace:
    work, best = Work(), {}
    with work.traced() as t:
        for x in batches(6):
            work.learn(x)
            best = {k: v.clone() for k, v in work.model.state_dict().items()}
    assert best
    return t


@healthy
def checkpoints_that_are_written(folder: Path) -> trace:
    work = Work()
    with work.traced() as t:
        for x in batches(6):
            work.learn(x)
            torch.save(work.model.state_dict(), folder / "weights.pt")
    return t


@healthy
def a_scheduler_and_clipping(_: Path) -> trace:
    work = Work()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(work.optimizer, 10)
    with work.traced() as t:
        for x in batches(6):
            (work.model(x) - x).square().mean().backward()
            nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
            work.optimizer.step()
            work.optimizer.zero_grad()
            scheduler.step()
    return t


@healthy
def a_trainer_of_transformers(folder: Path) -> trace:
    import transformers

    class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"input_ids": torch.full((16,), i), "labels": torch.full((16,), i)}

    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=Words(), eval_dataset=Words()
    )
    with trace(stacks=True, devices="cpu", table=False) as t:
        trainer.train()
    return t


@healthy
def a_trainer_of_lightning(folder: Path) -> trace:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            loss: Tensor = self.layers(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[Tensor], _index: int) -> None:
            self.log("error", self.layers(batch[0]).abs().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    data = DataLoader(TensorDataset(torch.randn(128, WIDTH)), batch_size=32)
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with trace(stacks=True, devices="cpu", table=False) as t:
        trainer.fit(Module(), data, data)
    return t
