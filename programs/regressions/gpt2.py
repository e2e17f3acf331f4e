"""GPT-2 of transformers under autocast."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 128
config = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=4096, use_cache=False)
model = GPT2LMHeadModel(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
# the loop
for _ in range(4):
    ids = torch.randint(4096, (8, LENGTH), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=True):
        given = model(input_ids=ids, labels=ids)
    loss = given.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
