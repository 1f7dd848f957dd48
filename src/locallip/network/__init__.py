"""From a user's module to stages of affine maps and activations."""

from locallip.network import activation_rules as _activation_rules  # noqa: F401 - registers its rules
from locallip.network.checks import UnsupportedLayer, check_no_cache, unwrap
from locallip.network.described import Digests, bytes_of, described
from locallip.network.lower import lower, lower_again
from locallip.network.normalize import Normalize
from locallip.network.precision import in_precision
from locallip.network.rules import Affine, Refused, module_rule, register_layer
from locallip.network.stages import Network, Offset, PassThrough, Stage

__all__ = [
    "Affine",
    "Digests",
    "Network",
    "Normalize",
    "Offset",
    "PassThrough",
    "Refused",
    "Stage",
    "UnsupportedLayer",
    "bytes_of",
    "check_no_cache",
    "described",
    "in_precision",
    "lower",
    "lower_again",
    "module_rule",
    "register_layer",
    "unwrap",
]
