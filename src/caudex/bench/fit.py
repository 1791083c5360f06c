"""A live server, measured and turned into a cost model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from caudex.bench.client import Endpoint, ServerError, first_model, get
from caudex.bench.steps import ServerLimits, StepMeter, server_limits
from caudex.simulate import CostModelFile, Fit, fit_model

DEFAULT_CHUNK_TOKENS = 8_192
"""Of servers that do not tell how many tokens they compute in a step."""


async def measure_server(
    endpoint: Endpoint, chunk_tokens: int | None, on_progress: Callable[[float], None], *, budget: float = 45.0
) -> tuple[CostModelFile, Fit]:
    """Measures the first model of a server that is otherwise idle, for about `budget` seconds; see `StepMeter`.

    Raises:
        ServerError, OSError: the server cannot be reached, or answers with an error.
        ValueError: what was measured is too little to fit a model to.
    """
    endpoint = dataclasses.replace(endpoint, model=endpoint.model or await first_model(endpoint))
    limits = await _limits(endpoint)
    chunk = chunk_tokens or limits.max_num_batched_tokens or DEFAULT_CHUNK_TOKENS
    measurements = await StepMeter(endpoint, chunk, budget, on_progress).run()
    fit = fit_model(measurements)
    return CostModelFile(model=fit.model, measurements=measurements, **dataclasses.asdict(limits)), fit


async def _limits(endpoint: Endpoint) -> ServerLimits:
    try:
        return server_limits((await get(endpoint, "/metrics")).decode(errors="replace"))
    except ServerError:
        return ServerLimits()
