"""From a user's module to stages of affine maps and activations."""

from locallip.network import activation_rules as _activation_rules  # noqa: F401 - registers its rules
from locallip.network.checks import UnsupportedLayer, unwrap
from locallip.network.lower import lower, steps_of
from locallip.network.normalize import Normalize
from locallip.network.precision import in_precision
from locallip.network.rules import Affine, Refused, module_rule, register_layer
from locallip.network.stages import Network, Offset, PassThrough, Stage

__all__ = [
    "Affine",
    "Network",
    "Normalize",
    "Offset",
    "PassThrough",
    "Refused",
    "Stage",
    "UnsupportedLayer",
    "in_precision",
    "lower",
    "module_rule",
    "register_layer",
    "steps_of",
    "unwrap",
]
