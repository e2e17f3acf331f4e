"""Training steps of convolutions in one and three dimensions, for benchmarks/imagine.py."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.imagine_programs import Program, of, trains


class Volumes(nn.Module):
    """A small U-Net of volumes: one level down and up, with a transposed convolution."""

    def __init__(self, width: int = 32) -> None:
        """Makes a network from volumes to volumes."""
        super().__init__()

        def block(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv3d(inside, outside, 3, padding=1), nn.BatchNorm3d(outside), nn.ReLU()
            )

        self.first, self.middle = block(1, width), block(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.second, self.last = block(2 * width, width), nn.Conv3d(width, 1, 1)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        """Returns the loss of reproducing the input."""
        first = self.first(volumes)
        middle = self.middle(functional.max_pool3d(first, 2))
        up = self.second(torch.cat([self.up(middle), first], 1))
        return functional.mse_loss(self.last(up).float(), volumes)


def volumes(device: str) -> dict[str, Any]:
    """Returns four volumes."""
    return {"volumes": torch.randn(4, 1, 32, 64, 64, device=device)}


def waves(device: str) -> dict[str, Any]:
    """Returns four seconds of sound, and the speakers."""
    return {
        "input_values": torch.randn(4, 64000, device=device),
        "labels": torch.randint(8, (4,), device=device),
    }


CONVOLUTIONS: dict[str, Program] = {
    "U-Net of volumes, AMP, AdamW": trains(Volumes, volumes, amp=True),
    "wav2vec, AMP, AdamW": trains(
        of(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            num_hidden_layers=4,
            num_labels=8,
            apply_spec_augment=False,
            layerdrop=0.0,
        ),
        waves,
        amp=True,
    ),
}
