"""Bias-free linear maps with exact adjoints."""

from locallip.ops.base import Compose, Identity, LinearOp, Masked, Sum, compose, total
from locallip.ops.cast import Cast
from locallip.ops.conv import Conv
from locallip.ops.dense import Dense
from locallip.ops.diagonal import Diagonal
from locallip.ops.patch import Patch
from locallip.ops.pool import average_pool
from locallip.ops.reshape import Permute, Reshape
from locallip.ops.window import Window, Windows

__all__ = [
    "Cast",
    "Compose",
    "Conv",
    "Dense",
    "Diagonal",
    "Identity",
    "LinearOp",
    "Masked",
    "Patch",
    "Permute",
    "Reshape",
    "Sum",
    "Window",
    "Windows",
    "average_pool",
    "compose",
    "total",
]
