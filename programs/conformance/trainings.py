"""Training loops as people write them, each of which says what its tensors are."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, rnn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

from programs.conformance.programs import PROGRAMS, Program, Says, a_model, program

Make = Callable[[Any], torch.optim.Optimizer]


def finish(says: Says, loss: Tensor, optimizer: torch.optim.Optimizer, *models: nn.Module) -> None:
    """Backward and a step; looks at everything before, between and after."""
    says.look(*models, optimizer)
    loss.backward()
    says.look(*models, optimizer)
    optimizer.step()
    says.look(*models, optimizer)
    optimizer.zero_grad()


# -------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Make] = {
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "averaged_sgd": lambda p: torch.optim.ASGD(p),
    "centered_rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "groups": lambda p: torch.optim.AdamW([{"params": [one], "lr": 0.01} for one in p]),
}


def training_by(make: Make) -> Program:
    def run(says: Says) -> None:
        model = a_model()
        optimizer = make(model.parameters())
        with says.traced(model, optimizer):
            for _ in range(3):
                x, y = torch.randn(33, 64), torch.randn(33, 64)
                loss = F.mse_loss(model(x), y)
                says.are("inputs/batch", x)
                says.are("inputs/target", y)
                says.saves(loss, model, x, y)
                finish(says, loss, optimizer, model)

    return run


for _name, _make in OPTIMIZERS.items():
    PROGRAMS[f"an_optimizer_{_name}"] = training_by(_make)


@program
def muon_for_matrices_and_adam_for_the_rest(says: Says) -> None:
    model = a_model()
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    adam = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2])
    with says.traced(model, muon, adam):
        for _ in range(3):
            F.mse_loss(model(torch.randn(33, 64)), torch.randn(33, 64)).backward()
            says.look(model, muon, adam)
            muon.step()
            adam.step()
            says.look(model, muon, adam)
            muon.zero_grad()
            adam.zero_grad()


@program
def rows_of_an_embedding_have_sparse_gradients(says: Says) -> None:
    model = nn.Embedding(200, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            ids = torch.randint(0, 200, (8, 5))
            model(ids).square().mean().backward()
            assert model.weight.grad is not None
            # The indices of the gradient are the batch itself: what is in `.grad` is a gradient.
            says.are("gradients", model.weight.grad._values(), ids)
            optimizer.step()
            for state in optimizer.state.values():
                says.are("optimizer_state/exp_avg", state["exp_avg"])
            optimizer.zero_grad()


@program
def a_flatter_minimum_is_looked_for(says: Says) -> None:
    """SAM: a step up, a second pass there, and back."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(33, 64), torch.randn(33, 64)
            F.mse_loss(model(x), y).backward()
            says.look(model, optimizer)
            with torch.no_grad():
                moved = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
                for parameter, way in zip(model.parameters(), moved, strict=True):
                    parameter += way
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            with torch.no_grad():
                for parameter, way in zip(model.parameters(), moved, strict=True):
                    parameter -= way
            says.look(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


@program
def slow_weights_follow_fast_ones(says: Says) -> None:
    """Lookahead."""
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        slow = [p.detach().clone() for p in model.parameters()]
        for step in range(4):
            x = torch.randn(33, 64)
            finish(says, F.mse_loss(model(x), x), optimizer, model)
            if step % 2:
                with torch.no_grad():
                    for late, parameter in zip(slow, model.parameters(), strict=True):
                        late.lerp_(parameter, 0.5)
                        parameter.copy_(late)
            says.are("functional", *slow)


@program
def gradients_of_tasks_are_put_together(says: Says) -> None:
    """PCGrad: each task's gradients by `grad`, what is against another is taken out."""
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            out = model(torch.randn(33, 64))
            parameters = list(model.parameters())
            one = torch.autograd.grad(out.abs().mean(), parameters, retain_graph=True)
            two = torch.autograd.grad(out.square().mean(), parameters)
            for parameter, a, b in zip(parameters, one, two, strict=True):
                against = (a * b).sum().clamp(max=0) / b.square().sum()
                parameter.grad = a - against * b + b
            del a, b, one, two
            says.look(model, optimizer)
            optimizer.step()
            says.look(model, optimizer)
            optimizer.zero_grad()


@program
def weights_of_losses_are_learned(says: Says) -> None:
    """Uncertainty weights: parameters of no module."""
    model = a_model()
    weights = [nn.Parameter(torch.zeros(16)) for _ in range(2)]
    optimizer = torch.optim.Adam([*model.parameters(), *weights])
    with says.traced(model, optimizer):
        for _ in range(3):
            out = model(torch.randn(33, 64))
            losses = out.abs().mean(), out.square().mean()
            pairs = zip(losses, weights, strict=True)
            loss = torch.stack([(one * (-w).exp() + w).sum() for one, w in pairs]).sum()
            says.are("weights", *weights)
            loss.backward()
            says.are("gradients", *(w.grad for w in weights))
            optimizer.step()
            says.are("optimizer_state/exp_avg", *(optimizer.state[w]["exp_avg"] for w in weights))
            optimizer.zero_grad()


@program
def gradients_are_changed_by_hooks(says: Says) -> None:
    """Centred, noised and clipped on the way."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for parameter in model.parameters():
        parameter.register_hook(lambda slope: slope - slope.mean())
        parameter.register_hook(lambda slope: (slope + 0.01 * torch.randn_like(slope)).clamp(-1, 1))
    with says.traced(model, optimizer):
        for _ in range(3):
            x = torch.randn(33, 64)
            finish(says, F.mse_loss(model(x), x), optimizer, model)


# -------------------------------------------------------------------------- reinforcement learning


@program
def deep_q_learning(says: Says) -> None:
    model, target = a_model(8, 4), a_model(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    replay: deque[tuple[Tensor, Tensor]] = deque(maxlen=40)
    with says.traced(model, target, optimizer):
        for _ in range(20):
            with torch.no_grad():
                seen = torch.randn(8)
                model(seen).argmax()
            replay.append((seen, torch.randn(())))
        for _ in range(3):
            picked = [replay[i] for i in range(0, 20, 2)]
            seen, rewards = (torch.stack(part) for part in zip(*picked, strict=True))
            with torch.no_grad():
                wanted = rewards + 0.9 * target(seen).max(-1).values
            loss = F.smooth_l1_loss(model(seen)[:, 0], wanted)
            says.are("inputs/batch", seen)
            says.are("inputs/target", wanted)
            finish(says, loss, optimizer, model, target)


@program
def proximal_policy_optimisation(says: Says) -> None:
    model = a_model(8, 5)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(2):
            with torch.no_grad():
                seen = torch.randn(60, 8)
                out = model(seen)
                values, logs = out[:, 4].clone(), out[:, :4].log_softmax(-1)
                actions = logs.exp().multinomial(1)
                before = logs.gather(1, actions)
            returns = torch.randn(60)
            for rows in torch.randperm(60).split(20):
                out = model(seen[rows])
                now = out[:, :4].log_softmax(-1).gather(1, actions[rows])
                ratio = (now - before[rows]).exp().squeeze(1)
                gain = (returns - values)[rows]
                clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                loss = F.mse_loss(out[:, 4], returns[rows]) - clipped.mean()
                finish(says, loss, optimizer, model)


@program
def an_actor_with_two_critics(says: Says) -> None:
    """SAC: targets of a slow critic, an actor's loss through a frozen one."""
    actor, critic, slow = a_model(8, 2), a_model(10, 2), a_model(10, 2)
    slow.load_state_dict(critic.state_dict())
    slow.requires_grad_(False)
    of_actor, of_critic = (torch.optim.Adam(m.parameters()) for m in (actor, critic))
    with says.traced(actor, critic, slow, of_actor, of_critic):
        for _ in range(3):
            seen, rewards = torch.randn(32, 8), torch.randn(32, 1)
            with torch.no_grad():
                wanted = rewards + slow(torch.cat([seen, actor(seen)], 1)).min(1, keepdim=True)[0]
            given = torch.cat([seen, torch.randn(32, 2)], 1)
            F.mse_loss(critic(given), wanted.expand(-1, 2)).backward()
            says.are("inputs/batch", given)
            says.are("inputs/target", wanted)
            of_critic.step()
            of_critic.zero_grad()
            critic.requires_grad_(False)
            (-critic(torch.cat([seen, actor(seen)], 1)).min(1)[0].mean()).backward()
            critic.requires_grad_(True)
            says.look(actor, critic, slow, of_actor, of_critic)
            of_actor.step()
            of_actor.zero_grad()
            with torch.no_grad():
                for late, parameter in zip(slow.parameters(), critic.parameters(), strict=True):
                    late.lerp_(parameter, 0.01)


# -------------------------------------------------------------------------- generative


@program
def a_variational_autoencoder(says: Says) -> None:
    encoder, decoder = a_model(64, 16), a_model(8, 64)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    with says.traced(encoder, decoder, optimizer):
        for _ in range(3):
            x = torch.rand(33, 64)
            mean, spread = encoder(x).chunk(2, -1)
            noise = torch.randn_like(mean)
            made = decoder(mean + noise * (0.5 * spread).exp())
            likely = F.binary_cross_entropy_with_logits(made, x)
            loss = likely - 0.5 * (1 + spread - mean.square() - spread.exp()).mean()
            says.are("inputs/batch", x)
            says.saves(loss, encoder, decoder, x, noise)
            finish(says, loss, optimizer, encoder, decoder)


@program
def a_critic_with_a_gradient_penalty(says: Says) -> None:
    """WGAN-GP."""
    maker, critic = a_model(8, 64), a_model(64, 1)
    of_maker, of_critic = (torch.optim.Adam(m.parameters()) for m in (maker, critic))
    with says.traced(maker, critic, of_maker, of_critic):
        for _ in range(3):
            real = torch.randn(16, 64)
            with torch.no_grad():
                fake = maker(torch.randn(16, 8))
            between = torch.lerp(real, fake, torch.rand(16, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (critic(fake).mean() - critic(real).mean() + penalty).backward()
            says.are("inputs/batch", real, between)
            says.look(maker, critic, of_maker, of_critic)
            of_critic.step()
            of_critic.zero_grad()
            critic.requires_grad_(False)
            (-critic(maker(torch.randn(16, 8))).mean()).backward()
            critic.requires_grad_(True)
            says.look(maker, critic, of_maker, of_critic)
            of_maker.step()
            of_maker.zero_grad()


class Quantiser(nn.Module):
    """A code book in buffers, moved towards what it stands for; gradients go straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(32, 16))
        self.register_buffer("count", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.book).argmin(-1)
        with torch.no_grad():
            hot = F.one_hot(nearest, 32).type_as(x)
            self.count.lerp_(hot.sum(0), 0.1)
            self.book.add_(hot.T @ x / 100)
        return x + (self.book[nearest] - x).detach()


@program
def a_code_book_is_moved_in_the_forward(says: Says) -> None:
    model = nn.Sequential(nn.Linear(64, 16), Quantiser(), nn.Linear(16, 64))
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x = torch.randn(33, 64)
            says.are("inputs/batch", x)
            finish(says, F.mse_loss(model(x), x), optimizer, model)


# -------------------------------------------------------------------------- without labels


@program
def two_views_beside_the_rest_of_the_batch(says: Says) -> None:
    """SimCLR."""
    model = a_model(64, 16)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            raw = torch.randn(20, 64)
            views = torch.cat([raw + 0.1 * torch.randn_like(raw), raw * 1.1])
            seen = F.normalize(model(views), dim=-1)
            likeness = (seen @ seen.T / 0.1).masked_fill(torch.eye(40).bool(), -1e9)
            other = torch.arange(40).roll(20)
            says.are("inputs/raw", raw)
            says.are("inputs/batch", views)
            says.are("activations", other)  # made in the loss
            finish(says, F.cross_entropy(likeness, other), optimizer, model)


@program
def a_queue_of_keys_and_a_slow_encoder(says: Says) -> None:
    """MoCo."""
    model, slow = a_model(64, 16), a_model(64, 16).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, slow, optimizer):
        queue = F.normalize(torch.randn(60, 16), dim=-1)
        for _ in range(4):
            x = torch.randn(20, 64)
            with torch.no_grad():
                for late, parameter in zip(slow.parameters(), model.parameters(), strict=True):
                    late.lerp_(parameter, 0.01)
                keys = F.normalize(slow(x), dim=-1)
            seen = F.normalize(model(x), dim=-1)
            logits = torch.cat([(seen * keys).sum(-1, keepdim=True), seen @ queue.T], 1)
            says.are("inputs/batch", x)
            says.are("inputs/target", keys)
            zeros = torch.zeros(20, dtype=torch.long)
            finish(says, F.cross_entropy(logits, zeros), optimizer, model, slow)
            queue[:20] = keys
            queue = queue.roll(-20, 0)


@program
def a_student_of_its_own_average(says: Says) -> None:
    """BYOL and DINO: an AveragedModel is the teacher."""
    model = a_model(64, 16)
    teacher = AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, teacher, optimizer):
        for _ in range(3):
            x = torch.randn(33, 64)
            with torch.no_grad():
                wanted = teacher(x)
            says.are("inputs/target", wanted)
            finish(says, F.mse_loss(model(x), wanted), optimizer, model, teacher)
            teacher.update_parameters(model)


@program
def two_towers_and_a_learned_scale(says: Says) -> None:
    """CLIP."""
    towers = nn.ModuleDict({"images": a_model(48, 16), "texts": a_model(32, 16)})
    towers.register_parameter("scale", nn.Parameter(torch.ones(8)))
    optimizer = torch.optim.AdamW(towers.parameters())
    with says.traced(towers, optimizer):
        for _ in range(3):
            images, texts = torch.randn(20, 48), torch.randn(20, 32)
            a = F.normalize(towers["images"](images), dim=-1)
            b = F.normalize(towers["texts"](texts), dim=-1)
            logits = towers.scale.sum().exp().clamp(max=100) * a @ b.T
            labels = torch.arange(20)
            loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)
            says.are("inputs/batch", images, texts)
            says.are("activations", labels)  # made in the loss
            finish(says, loss, optimizer, towers)


# -------------------------------------------------------------------------- data and losses


@program
def batches_are_mixed(says: Says) -> None:
    """Mixup: two targets for each."""
    model = a_model(64, 10)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(20, 64), torch.randint(0, 10, (20,))
            order = torch.randperm(20)
            mixed, other = torch.lerp(x, x[order], 0.3), y[order]
            out = model(mixed)
            loss = 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, other)
            says.are("inputs/raw", x)
            says.are("inputs/batch", mixed)
            says.are("inputs/target", y, other)
            finish(says, loss, optimizer, model)


@program
def an_attack_on_the_batch(says: Says) -> None:
    """Adversarial training: the batch is moved along its own gradient."""
    model = a_model(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(20, 64).requires_grad_(), torch.randint(0, 10, (20,))
            (way,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
            moved = (x + 0.1 * way.sign()).detach()
            del way
            says.are("inputs/batch", x)
            says.are("inputs/target", y)
            finish(says, F.cross_entropy(model(moved), y), optimizer, model)


@program
def hard_triplets_are_looked_for(says: Says) -> None:
    model = a_model(64, 16)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x, y = torch.randn(24, 64), torch.arange(4).repeat(6)
            seen = model(x)
            with torch.no_grad():
                far, same = torch.cdist(seen, seen), y[:, None] == y
                positive = far.masked_fill(~same, -1).argmax(1)
                negative = far.masked_fill(same, 1e9).argmin(1)
            loss = F.triplet_margin_loss(seen, seen[positive], seen[negative])
            says.are("inputs/batch", x)
            finish(says, loss, optimizer, model)


@program
def segmentation_with_a_dice_loss(says: Says) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                          nn.Conv2d(8, 1, 1))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x, mask = torch.randn(4, 3, 12, 12), (torch.rand(4, 1, 12, 12) > 0.5).float()
            out = model(x).sigmoid()
            loss = 1 - 2 * (out * mask).sum() / (out.sum() + mask.sum())
            says.are("inputs/batch", x)
            says.are("inputs/target", mask)
            finish(says, loss, optimizer, model)


@program
def speech_with_a_ctc_loss(says: Says) -> None:
    model = nn.LSTM(16, 12)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for _ in range(3):
            x, words = torch.randn(30, 4, 16), torch.randint(1, 12, (4, 6))
            lengths, long = torch.full((4,), 6), torch.full((4,), 30)
            loss = F.ctc_loss(model(x)[0].log_softmax(-1), words, long, lengths)
            says.are("inputs/batch", x)
            says.are("inputs/target", words)
            loss.backward()
            says.look(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


@program
def sequences_are_packed(says: Says) -> None:
    embedding, model, head = nn.Embedding(40, 16), nn.GRU(16, 16), nn.Linear(16, 40)
    parts = nn.ModuleList([embedding, model, head])
    optimizer = torch.optim.Adam(parts.parameters())
    with says.traced(parts, optimizer):
        for _ in range(3):
            ids, words = torch.randint(0, 40, (9, 5)), torch.randint(0, 40, (9, 5))
            packed = rnn.pack_padded_sequence(embedding(ids), [9, 7, 4, 4, 2])
            out, _ = rnn.pad_packed_sequence(model(packed)[0])
            loss = F.cross_entropy(head(out).flatten(0, 1), words.flatten())
            says.are("inputs/batch", ids)
            says.are("inputs/target", words)
            finish(says, loss, optimizer, parts)


@program
def a_recurrent_state_is_cut_off(says: Says) -> None:
    """Truncated backpropagation through time."""
    model = nn.GRU(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        state = torch.zeros(1, 4, 16)
        for _ in range(4):
            x = torch.randn(7, 4, 16)
            out, state = model(x, state.detach())
            says.are("inputs/batch", x)
            finish(says, F.mse_loss(out[:-1], x[1:]), optimizer, model)


@program
def batches_of_a_loader_on_the_device(says: Says) -> None:
    x, y = torch.randn(60, 64), torch.randint(0, 10, (60,))
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    model = a_model(64, 10)
    optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for batch, labels in loader:
            says.are("inputs/batch", batch)
            says.are("inputs/target", labels)
            finish(says, F.cross_entropy(model(batch), labels), optimizer, model)
            # As in most loops: what the names hold lives on until the next batch is there.


# -------------------------------------------------------------------------- parts of models


def loop_with(make: Callable[[], nn.Module]) -> Program:
    def run(says: Says) -> None:
        model = make()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        with says.traced(model, optimizer):
            for _ in range(3):
                x, y = torch.randn(12, 64), torch.randn(12, 64)
                loss = F.mse_loss(model(x), y)
                says.are("inputs/batch", x)
                says.are("inputs/target", y)
                finish(says, loss, optimizer, model)

    return run


class Tied(nn.Module):
    """One matrix there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(64, 64), nn.Linear(64, 64)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(self.there(x).relu())
        return y


class LowRank(nn.Module):
    """LoRA: a frozen layer and a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.up(self.down(self.dropout(x)))
        return y


class Again(nn.Module):
    """Its layers run again in backward."""

    def __init__(self, *layers: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(64, 64), nn.ModuleList(layers)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class InPieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
        return y


class ForwardAlone(nn.Module):
    """Recomputes `forward` itself, as transformers' layers do, past the call of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(64, 64), a_model()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = x + checkpoint(self.layer.forward, x, use_reentrant=False)
        return y


class Experts(nn.Module):
    """Each row goes to one of four."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return y


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)[None]
        y: Tensor = self.attention(x, x, x, need_weights=False)[0][0]
        return y


class Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose, self.words = nn.Linear(64, 20), nn.Parameter(torch.randn(20, 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(self.choose(x), hard=True) @ self.words


class Steps(nn.Module):
    """An ODE by Euler's steps: the same layer again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.field = a_model()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + 0.1 * self.field(x)
        return x


def fake_quantised() -> nn.Module:
    """Quantisation-aware training."""
    from torch.ao.quantization import FakeQuantize

    return nn.Sequential(nn.Linear(64, 64), FakeQuantize(), nn.ReLU(), nn.Linear(64, 64))


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    model = a_model()
    prune.random_unstructured(model[0], "weight", 0.3)  # type: ignore[index]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied_weights": Tied,
    "a_weight_norm": lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
    "a_spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(64, 64)),
    "an_orthogonal_weight": lambda: parametrizations.orthogonal(nn.Linear(64, 64)),
    "pruned_weights": pruned,
    "fake_quantisation": fake_quantised,
    "experts": Experts,
    "attention": Attends,
    "discrete_choices": Gumbel,
    "a_layer_again_and_again": Steps,
    "low_rank_adapters": LowRank,
    "recomputed_adapters": lambda: Again(LowRank(), LowRank(), reentrant=False),
    "adapters_recomputed_the_old_way": lambda: Again(LowRank(), LowRank(), reentrant=True),
    "dropout_recomputed_the_old_way": lambda: Again(nn.Dropout(), a_model(), reentrant=True),
    "layers_recomputed_in_pieces": InPieces,
    "a_forward_that_is_recomputed_alone": ForwardAlone,
}
for _kind, _of in MODELS.items():
    PROGRAMS[f"a_model_with_{_kind}"] = loop_with(_of)


@program
def numbers_of_a_generator_wait_for_a_recomputation(says: Says) -> None:
    """A checkpoint keeps the state of the random numbers: autograd's own memory of the forward."""
    model = Again(nn.Sequential(nn.Dropout(), a_model()), reentrant=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with says.traced(model, optimizer):
        for _ in range(3):
            loss = model(torch.randn(12, 64)).square().mean()
            node: Any = loss.grad_fn
            while not hasattr(node, "fwd_cpu_state"):
                node = node.next_functions[0][0]
            says.are("activations", node.fwd_cpu_state)
            del node
            finish(says, loss, optimizer, model)


@program
def an_average_that_is_never_called(says: Says) -> None:
    """A copy of the model, moved after each step, and saved at the end."""
    model = a_model()
    average = a_model()
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, average, optimizer):
        for _ in range(3):
            x = torch.randn(33, 64)
            finish(says, F.mse_loss(model(x), x), optimizer, model, average)
            with torch.no_grad():
                for late, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    late.lerp_(parameter, 0.1)


@program
def features_of_a_frozen_backbone_are_kept(says: Says) -> None:
    backbone, head = a_model(64, 32).requires_grad_(False), nn.Linear(32, 10)
    optimizer = torch.optim.Adam(head.parameters())
    with says.traced(backbone, head, optimizer):
        with torch.no_grad():
            kept = [(backbone(torch.randn(20, 64)), torch.randint(0, 10, (20,))) for _ in range(3)]
        for features, labels in kept:
            loss = F.cross_entropy(head(features), labels)
            says.are("inputs/batch", features)
            says.are("inputs/target", labels)
            finish(says, loss, optimizer, backbone, head)


@program
def what_a_step_adds_is_frozen_later(says: Says) -> None:
    """Layers are unfrozen one by one, and a group is added to the optimizer for each."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)
    model[2].requires_grad_(True)
    optimizer = torch.optim.Adam(model[2].parameters())
    with says.traced(model, optimizer):
        for layer in (1, 0):
            x = torch.randn(20, 64)
            finish(says, F.mse_loss(model(x), x), optimizer, model)
            model[layer].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[layer].parameters())})
        x = torch.randn(20, 64)
        finish(says, F.mse_loss(model(x), x), optimizer, model)


@program
def training_goes_on_from_a_file(says: Says) -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        x = torch.randn(33, 64)
        finish(says, F.mse_loss(model(x), x), optimizer, model)
        states = copy.copy(model.state_dict()), optimizer.state_dict()
        kept = [{k: v.clone() for k, v in states[0].items()}]
        optimizer.load_state_dict(states[1])
        model.load_state_dict(kept[0])
        del states
        says.are("functional", *kept[0].values())
        finish(says, F.mse_loss(model(x), x), optimizer, model)


@program
def a_model_grows_while_it_is_trained(says: Says) -> None:
    """New rows for new words; the old table and its state are let go."""
    model = nn.Embedding(30, 16)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    with says.traced(model, optimizer):
        for rows in (30, 45):
            if rows != model.num_embeddings:
                larger = nn.Embedding(rows, 16)
                with torch.no_grad():
                    larger.weight[:30] = model.weight
                model, optimizer = larger, torch.optim.Adam(larger.parameters())
            for _ in range(2):
                ids = torch.randint(0, rows, (8, 5))
                loss = model(ids).square().mean()
                says.are("inputs/batch", ids)
                says.are("weights/parameter", model.weight)
                loss.backward()
                says.are("gradients", model.weight.grad)
                optimizer.step()
                says.are("optimizer_state/exp_avg", optimizer.state[model.weight]["exp_avg"])
                optimizer.zero_grad()


@program
def a_learned_loop_of_meta_parameters(says: Says) -> None:
    """An inner step with a learned rate, through `functional_call`, by `grad` of the whole."""
    model, rate = nn.Linear(32, 32), nn.Parameter(torch.full((32, 32), 0.1))
    outer = torch.optim.Adam([*model.parameters(), rate])
    with says.traced(model, outer):
        for _ in range(3):
            x, y = torch.randn(16, 32), torch.randn(16, 32)
            weight = dict(model.named_parameters())
            first = F.mse_loss(functional_call(model, weight, (x,)), y)
            slopes = torch.autograd.grad(first, list(weight.values()), create_graph=True)
            fast = {"weight": weight["weight"] - rate * slopes[0], "bias": weight["bias"]}
            loss = F.mse_loss(functional_call(model, fast, (x,)), y)
            says.are("weights", rate, *model.parameters())
            says.are("activations", fast["weight"])
            del slopes, first
            loss.backward()
            says.are("gradients", rate.grad, *(p.grad for p in model.parameters()))
            outer.step()
            outer.zero_grad()


def micro_batches(count: int) -> Iterator[tuple[int, Tensor]]:
    yield from ((number, torch.randn(11, 64)) for number in range(count))


@program
def many_small_passes_for_one_step(says: Says) -> None:
    """Accumulation over eight, in bfloat16 as far as autocast has it."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with says.traced(model, optimizer):
        for number, x in micro_batches(24):
            with torch.autocast(says.device, torch.bfloat16) if number % 2 else nullcontext():
                loss = (model(x).float() - x).abs().mean()
            says.are("inputs/batch", x)
            loss.backward()
            says.are("gradients", *(p.grad for p in model.parameters()))
            says.only("gradients", [p.grad for p in model.parameters() if p.grad is not None])
            if number % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
