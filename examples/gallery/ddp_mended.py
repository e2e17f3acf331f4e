"""Two ranks that train one model."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on both ranks: none need to be sent
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
model = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(4):
    batch = torch.randn(16, 512)
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
