"""Propagation of ball and box, and the worst logits behind them."""

from locallip.bounds.branching import branched
from locallip.bounds.deployed import deployed_error
from locallip.bounds.jacobian import fits, jacobian_bounds
from locallip.bounds.margin import SLOPE_STEPS, MarginForm, WorstLogits, rises_by_lines, worst_logits
from locallip.bounds.multipliers import multiplier_bounds
from locallip.bounds.propagate import (
    BoxRadii,
    CeilingNorm,
    GlobalBound,
    PartlyLocal,
    Relax,
    dense_places,
    global_bound,
    norm_keys,
    propagate,
)
from locallip.bounds.region import Region, Trace
from locallip.bounds.relaxation import LIMIT
from locallip.bounds.support import support

__all__ = [
    "LIMIT",
    "SLOPE_STEPS",
    "BoxRadii",
    "CeilingNorm",
    "GlobalBound",
    "MarginForm",
    "PartlyLocal",
    "Region",
    "Relax",
    "Trace",
    "WorstLogits",
    "branched",
    "dense_places",
    "deployed_error",
    "fits",
    "global_bound",
    "jacobian_bounds",
    "multiplier_bounds",
    "norm_keys",
    "propagate",
    "rises_by_lines",
    "support",
    "worst_logits",
]
