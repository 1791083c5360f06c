"""Types of the compiled core. Each part of cpp/bindings has a section; the public wrappers carry the documentation."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__version__: str

# cpp/bindings/offline.cpp

class HitCurve:
    def __init__(self, num_groups: int) -> None: ...
    def add(
        self,
        ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        input_lengths: NDArray[np.int64],
        block_size: int,
        groups: NDArray[np.int32],
    ) -> None: ...
    def knots(self, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    @property
    def num_distinct_blocks(self) -> int: ...

def clairvoyant_hits(
    ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    input_lengths: NDArray[np.int64],
    block_size: int,
    capacities: Sequence[int],
) -> list[NDArray[np.int64]]: ...
