"""Explains the time of a product: tiles, waves, bytes, and a prediction from them.

A kernel cuts the result into tiles. Every multiprocessor works on one tile at a time. Two losses:

* tile efficiency: the last row and column of tiles reach over the edge, and are computed anyway;
* wave efficiency: the last wave of tiles leaves multiprocessors idle.

The prediction is `t = launch + max(compute, bytes / bandwidth)`, where compute is the number of
waves times a tile's arithmetic and its fixed cost. The four constants are fitted to products measured
on the same device, so they include the clock that this device can hold.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytracer.lab.gemm.device import Facts, datasheet
from pytracer.lab.gemm.kernels import Kernel
from pytracer.lab.gemm.shapes import Gemm

# (rows, columns) of torch's result: the tiles of Hopper's kernels, largest first.
TILES = ((256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (64, 256), (128, 64), (64, 64))


@dataclass(frozen=True)
class Tiling:
    """A result cut into tiles, and the useful shares of the work."""

    tile_m: int
    tile_n: int
    split_k: int
    tiles: int
    waves: int
    tile_efficiency: float
    wave_efficiency: float

    @property
    def efficiency(self) -> float:
        """The product of both efficiencies."""
        return self.tile_efficiency * self.wave_efficiency


def tiling(gemm: Gemm, tile_m: int, tile_n: int, multiprocessors: int, split_k: int = 1) -> Tiling:
    """Cuts the result into tiles of this size."""
    covering = -(-gemm.m // tile_m) * -(-gemm.n // tile_n) * gemm.batch
    tiles = covering * split_k
    waves = -(-tiles // multiprocessors)
    useful = gemm.m * gemm.n * gemm.batch
    return Tiling(
        tile_m,
        tile_n,
        split_k,
        tiles,
        waves,
        useful / (covering * tile_m * tile_n),
        tiles / (waves * multiprocessors),
    )


def tiling_of(gemm: Gemm, kernel: Kernel | None, facts: Facts) -> Tiling | None:
    """The tiling in the kernel's name, or None. The number of parts of a split k is a guess."""
    if facts.kind != "cuda" or kernel is None or not (kernel.tile_m and kernel.tile_n):
        return None
    whole = tiling(gemm, kernel.tile_m, kernel.tile_n, facts.multiprocessors)
    if not kernel.split_k:
        return whole
    split = max(2, facts.multiprocessors // whole.tiles)
    return tiling(gemm, kernel.tile_m, kernel.tile_n, facts.multiprocessors, split)


@dataclass(frozen=True)
class Roofline:
    """The least time by the datasheet, and the limit that sets it."""

    seconds: float
    bound: str  # "compute" or "memory"


def roofline(gemm: Gemm, facts: Facts) -> Roofline | None:
    """The roofline by the datasheet; None for a device that the table does not have."""
    peaks = datasheet(facts.name)
    if peaks is None or gemm.dtype not in peaks.tflops:
        return None
    compute = gemm.flops / (peaks.tflops[gemm.dtype] * 1e12)
    memory = gemm.bytes / (peaks.tb_per_s * 1e12)
    return Roofline(max(compute, memory), "compute" if compute >= memory else "memory")


@dataclass(frozen=True)
class TimeModel:
    """Predicts seconds from four constants, fitted to aligned products of one device and dtype."""

    launch: float  # seconds
    per_flop: float  # of a tile's arithmetic on one multiprocessor
    per_tile_element: float  # seconds to set up a tile and to write it
    per_byte: float
    multiprocessors: int
    training_error: float  # median, relative

    def predict(self, gemm: Gemm, tile: Tiling | None = None) -> float:
        """The seconds of a product. Without a known tile, the fastest of `TILES` counts."""
        tilings = [tile] if tile else guesses(gemm, self.multiprocessors)
        constants = np.array([self.per_flop, self.per_tile_element])
        compute = min(float(_work(gemm, one) @ constants) for one in tilings)
        return self.launch + max(compute, self.per_byte * gemm.bytes)


def guesses(gemm: Gemm, multiprocessors: int) -> list[Tiling]:
    """The tilings to choose from when no kernel's name is known."""
    return [tiling(gemm, rows, columns, multiprocessors) for rows, columns in TILES]


def _work(gemm: Gemm, tile: Tiling) -> NDArray[np.float64]:
    """The work of one multiprocessor in all its waves: FLOPs, and tile elements."""
    elements = tile.waves * tile.tile_m * tile.tile_n
    depth = 64 * math.ceil(gemm.k / tile.split_k / 64)
    return np.array([2.0 * elements * depth, float(elements)])


def fit(measured: Sequence[tuple[Gemm, Tiling | None, float]], multiprocessors: int) -> TimeModel:
    """Fits constants of zero or more, so that the relative errors are small.

    `measured` has products, their tilings if known, and their seconds.

    Raises:
        ValueError: fewer than four products.
    """
    if len(measured) < 4:
        raise ValueError(f"four products are needed to fit four constants, not {len(measured)}")
    seconds = np.array([time for _, _, time in measured])
    bytes_ = np.array([float(gemm.bytes) for gemm, _, _ in measured])
    each = float(np.median(seconds / _flops(measured))) * multiprocessors
    model = TimeModel(0.0, each, 0.0, 0.0, multiprocessors, 1.0)
    # The limit of each product and the guessed tile depend on the constants, so the fit is repeated.
    for _ in range(8):
        chosen = [tile or _best_guess(model, gemm) for gemm, tile, _ in measured]
        work = np.array(
            [_work(gemm, tile) for (gemm, _, _), tile in zip(measured, chosen, strict=True)]
        )
        constants = np.array([model.per_flop, model.per_tile_element])
        by_memory = work @ constants < model.per_byte * bytes_
        columns = np.column_stack(
            [np.ones(len(seconds)), *np.where(by_memory[:, None], 0.0, work).T]
        )
        columns = np.column_stack([columns, np.where(by_memory, bytes_, 0.0)])
        launch, per_flop, per_element, per_byte = _least_relative(columns, seconds)
        if not by_memory.any():  # a lower bound: the fastest movement that was measured
            per_byte = float(np.min((seconds - launch).clip(1e-9) / bytes_))
        model = TimeModel(launch, per_flop, per_element, per_byte, multiprocessors, 1.0)
    errors = [abs(model.predict(gemm, tile) / time - 1) for gemm, tile, time in measured]
    return TimeModel(**{**vars(model), "training_error": float(np.median(errors))})


def _flops(measured: Sequence[tuple[Gemm, Tiling | None, float]]) -> NDArray[np.float64]:
    return np.array([float(gemm.flops) for gemm, _, _ in measured])


def _best_guess(model: TimeModel, gemm: Gemm) -> Tiling:
    constants = np.array([model.per_flop, model.per_tile_element])
    options = guesses(gemm, model.multiprocessors)
    return min(options, key=lambda one: float(_work(gemm, one) @ constants))


def _least_relative(
    columns: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[float, float, float, float]:
    """Least squares of relative errors with constants of zero or more.

    There are four columns, so every subset is tried. The best one without a negative constant wins.
    """
    relative = columns / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = relative / scale
    best, best_error = np.zeros(4), math.inf
    for count in range(1, 5):
        for subset in itertools.combinations(range(4), count):
            part, *_ = np.linalg.lstsq(scaled[:, subset], np.ones(len(seconds)), rcond=None)
            error = float(((scaled[:, subset] @ part - 1) ** 2).sum())
            if (part >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(4), error
                best[list(subset)] = part
    launch, per_flop, per_element, per_byte = best / scale
    return float(launch), float(per_flop), float(per_element), float(per_byte)
