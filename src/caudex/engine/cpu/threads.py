"""The threads of the compiled kernels, and the instruction sets they can use."""

from __future__ import annotations

import os

from caudex import _core


class ThreadPool:
    """Threads for the compiled kernels; the calling thread is one of them.

    Make one and give it to everything that runs on it. Set `torch.set_num_threads(1)` where PyTorch operations and
    these kernels alternate: two pools whose idle threads spin take each other's cores.

    Args:
        num_threads: threads in all; None takes one for each CPU this process may run on.

    Raises:
        ValueError: `num_threads` is below 1 or above 1024.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.native = _core.ThreadPool(num_threads if num_threads is not None else available_cpus())

    @property
    def num_threads(self) -> int:
        return self.native.num_threads


def available_cpus() -> int:
    """How many CPUs this process may run on: its affinity where the system has such a thing."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_isas() -> list[str]:
    """The instruction sets this processor can run the kernels with, best first.

    The best is taken unless the environment variable CAUDEX_ISA names another. Two of them round differently; within
    one, results never depend on batch, chunking or cache.
    """
    return _core.available_isas()
