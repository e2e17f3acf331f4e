"""A generator and a critic that take turns."""

import torch
from torch import nn

ROWS = 256


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 2048))

    def forward(self, noise):
        return self.body(noise)


generator = Generator().to("cuda")
critic = nn.Sequential(nn.Linear(2048, 1024), nn.LeakyReLU(), nn.Linear(1024, 1)).to("cuda")
of_generator = torch.optim.RMSprop(generator.parameters())
of_critic = torch.optim.RMSprop(critic.parameters())
# the loop
for _ in range(4):
    real = torch.randn(ROWS, 2048, device="cuda")
    fake = generator(torch.randn(ROWS, 64, device="cuda"))
    score_of_fake = critic(fake.detach()).mean()
    of_critic.zero_grad()
    (score_of_fake - critic(real).mean()).backward()
    of_critic.step()
    loss = -critic(generator(torch.randn(ROWS, 64, device="cuda"))).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
