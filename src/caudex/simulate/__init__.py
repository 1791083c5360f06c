"""Floor 4: a fleet in virtual time, on the real cache and the real routing policies.

A `Workload` of arrivals goes through the same `Policy` and `Fleet` objects as the gateway uses, to `Replica`s whose
prefix cache is the engine's own, while a `CostModel` says how long each step of computing takes.
"""

from caudex.simulate.cost_model import CostModel, FittedModel, RooflineModel, fit_cost_model, fit_steps
from caudex.simulate.fleet_simulation import FleetChange, FleetSimulation, SimulationSettings
from caudex.simulate.model_shape import ModelShape, find_model
from caudex.simulate.replica import ReplicaLimits
from caudex.simulate.result import SimulationResult, Slo
from caudex.simulate.sequential import SequentialResult, replay_sequentially
from caudex.simulate.workload import Workload, read_workload
from caudex.sizing.gpus import Gpu, find_gpu

__all__ = [
    "CostModel",
    "FittedModel",
    "FleetChange",
    "FleetSimulation",
    "Gpu",
    "ModelShape",
    "ReplicaLimits",
    "RooflineModel",
    "SequentialResult",
    "SimulationResult",
    "SimulationSettings",
    "Slo",
    "Workload",
    "find_gpu",
    "find_model",
    "fit_cost_model",
    "fit_steps",
    "read_workload",
    "replay_sequentially",
]
