"""A Trainer of Hugging Face's that knows nothing of pytracer."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=2))
words = torch.randint(512, (32, 64))
data = [{"input_ids": text, "labels": text} for text in words]
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder, max_steps=5, per_device_train_batch_size=4, report_to="none", disable_tqdm=True
    )
    Trainer(model, settings, train_dataset=data).train()
