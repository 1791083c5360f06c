"""Floor 4: a fleet in virtual time, on the real cache and the real routing policies.

A `Workload` of arrivals goes through the same `Policy` and `Fleet` objects as the gateway uses, to `Replica`s whose
prefix cache is the engine's own, while a `CostModel` says how long each step of computing takes.
"""

from caudex.simulate.cost_model import CostModel, RooflineModel, StepWork
from caudex.simulate.fitted_model import CostModelFile, Fit, FittedModel, Measurement, fit_model, read_cost_model
from caudex.simulate.fleet_simulation import FleetChange, FleetSimulation, SimulationSettings
from caudex.simulate.model_shape import ModelShape, find_model
from caudex.simulate.replica import DEFAULT_EVICTION, ReplicaLimits
from caudex.simulate.result import SimulationResult, Slo
from caudex.simulate.sequential import SequentialResult, replay_sequentially
from caudex.simulate.workload import Workload, read_workload
from caudex.sizing.gpus import Gpu, find_gpu

__all__ = [
    "DEFAULT_EVICTION",
    "CostModel",
    "CostModelFile",
    "Fit",
    "FittedModel",
    "FleetChange",
    "FleetSimulation",
    "Gpu",
    "Measurement",
    "ModelShape",
    "ReplicaLimits",
    "RooflineModel",
    "SequentialResult",
    "SimulationResult",
    "SimulationSettings",
    "Slo",
    "StepWork",
    "Workload",
    "find_gpu",
    "find_model",
    "fit_model",
    "read_cost_model",
    "read_workload",
    "replay_sequentially",
]
