"""Features of texts of many lengths: each length leaves pieces that the next one cannot use."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
model = nn.TransformerEncoder(layer, 2).to("cuda").eval()
features = []

with torch.no_grad():
    for length in range(512, 2048, 64):
        texts = torch.randn(8, length, 512, device="cuda")
        features.append(model(texts)[:, 0].cpu())
