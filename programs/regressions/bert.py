"""BERT of transformers, which tells sentences apart."""

import torch
from transformers import BertConfig, BertForSequenceClassification

shape = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
config = BertConfig(num_hidden_layers=2, num_labels=3, **shape)
model = BertForSequenceClassification(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
hidden = []
# the loop
step = 0
while step < 4:
    ids = torch.randint(30522, (16, 128), device="cuda")
    labels = torch.randint(3, (16,), device="cuda")
    out = model(input_ids=ids, labels=labels)
    loss = out.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
