"""An autoencoder whose data lie on the card."""

import torch
from torch import nn

COUNT, PIXELS = 4096, 784
HIDDEN = 512


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 64))
        self.decoder = nn.Sequential(nn.Linear(32, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, dim=1)
        hidden = mean + torch.randn_like(mean) * spread.exp()
        images = torch.sigmoid(self.decoder(hidden))
        return images, mean, spread


data = torch.randn(COUNT, PIXELS, device="cuda")
model = Autoencoder().to("cuda")
optimizer = torch.optim.Adam(model.parameters())
losses = []
# the loop
for step in range(4):
    batch = data[step * 1024 : (step + 1) * 1024]
    images, mean, spread = model(batch)
    loss = (images - batch).square().mean() + (mean.square() - spread).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
