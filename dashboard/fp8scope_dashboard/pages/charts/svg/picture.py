"""The cells of a heat map as a picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from fp8scope_dashboard.statistics.arrays import Floats


def picture_of(
    z: Floats, scale: Sequence[tuple[float, tuple[int, int, int]]], low: float, high: float
) -> str:
    """Values as a PNG in a data address; NaN is transparent."""
    with np.errstate(invalid="ignore"):
        share = np.clip((z - low) / ((high - low) or 1.0), 0, 1)
    at = [position for position, _ in scale]
    pixels = np.zeros((*z.shape, 4), np.uint8)
    for channel in range(3):
        pixels[..., channel] = np.interp(np.nan_to_num(share), at, [colour[channel] for _, colour in scale])
    pixels[..., 3] = np.where(np.isnan(z), 0, 255)
    stream = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of #rrggbb, 0 to 255 each."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
