"""Measurements; each writes what it found below results/."""

import re


def slug(device: str) -> str:
    """Of a device's name, for a file: nvidia-h200 of "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
