"""The colours of a heat map."""

from __future__ import annotations

import numpy as np

# Dark to bright, with a lightness that rises evenly, so that it also reads in grey and to colour-blind eyes.
_COLORS = np.array(
    [(10, 8, 38), (62, 15, 110), (130, 28, 118), (196, 52, 84), (238, 104, 38), (252, 172, 40), (250, 250, 170)],
    "float32",
)


def ramp(heat: np.ndarray) -> np.ndarray:
    """Colours (..., 3), float32 from 0 to 255, of values from 0 to 1.

    >>> ramp(np.array([0.0, 1.0])).tolist()
    [[10.0, 8.0, 38.0], [250.0, 250.0, 170.0]]
    """
    place = heat * (len(_COLORS) - 1)
    lower = np.minimum(place.astype("int32"), len(_COLORS) - 2)
    part = (place - lower)[..., None]
    return _COLORS[lower] * (1.0 - part) + _COLORS[lower + 1] * part
