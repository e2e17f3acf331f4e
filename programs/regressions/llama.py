"""Llama of transformers with checkpoints, its weights of 16 bits."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=4096,
    use_cache=False,
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
# the loop
for _ in range(4):
    words = torch.randint(4096, (8, 256), device="cuda")
    loss = model(input_ids=words, labels=words)[0]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
