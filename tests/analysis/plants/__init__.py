"""Plants one labelled prefix breaker in a clean log, so that tests and benchmarks can see whether it is named."""

from __future__ import annotations

from tests.analysis.plants.further import FURTHER
from tests.analysis.plants.history import HISTORY
from tests.analysis.plants.order import ORDER
from tests.analysis.plants.plant import Body, Plant
from tests.analysis.plants.splits import SPLITS
from tests.analysis.plants.values import VALUES

PLANTS: dict[str, Plant] = {plant.name: plant for plant in (*VALUES, *ORDER, *HISTORY, *SPLITS, *FURTHER)}

__all__ = ["PLANTS", "Body", "Plant"]
