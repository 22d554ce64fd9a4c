"""How much of a GPU's rate a matrix product reaches, by its sizes alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILE = 128
"""Rows and columns of a tile of a product; see `product_efficiency`."""


def product_efficiency(
    products: NDArray[np.float64], processors: int, overhead: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The share of the rate of large products that products of these sizes reach.

    As NVIDIA's Matrix Multiplication Background User's Guide has it: the output is cut into tiles,
    those at its edges count as whole ones (tile quantization), as many are computed at once as
    there are processors (wave quantization), and what a tile takes beside its arithmetic weighs
    less the longer k is. Of that here is the writing of the result, which is known by the data
    sheet. Where tiles are fewer than processors, k is cut, too, if that is faster (split-k); each
    part writes its result. Tiles are 128 x 128, or half as wide as that where more is not needed.

    Args:
        products: (operations, 4), see `OpLog.products`; where they are 0 the share is 1.
        processors: see `DeviceSpec.processors`.
        overhead: of each operation, the k whose arithmetic takes as long as writing the result.
    """
    m, n, k, batch = np.maximum(products, 1.0).T
    # Sizes that were interpolated may be a little off whole numbers.
    edges = [np.where(size > TILE / 2, TILE, TILE / 2) for size in (m, n)]
    rows, columns = (np.ceil(s / e - 1e-6) for s, e in zip((m, n), edges, strict=True))
    tiles = rows * columns * np.ceil(batch - 1e-6)
    best = np.zeros_like(m)
    for parts in (np.ones_like(m), np.maximum(1.0, processors // tiles)):
        waves = np.ceil(tiles * parts / processors)
        busy = tiles * parts / (waves * processors)
        best = np.maximum(best, busy * k / (k + parts * overhead))
    share = best * (m / (rows * edges[0])) * (n / (columns * edges[1]))
    return np.where(products[:, 0] > 0, np.minimum(share, 1.0), 1.0)
