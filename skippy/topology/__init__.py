"""Planning which stage owns which layers. Pure functions over :mod:`skippy.config`; never trio, never I/O."""

from .chain import make_stage_configs, make_topology
from .plan import LayerRange, PlanError, parse_splits, plan_even, plan_splits

__all__ = [
    "LayerRange",
    "PlanError",
    "make_stage_configs",
    "make_topology",
    "parse_splits",
    "plan_even",
    "plan_splits",
]
