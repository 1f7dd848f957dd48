"""Activations: the modules a user puts into a network, and the interval rule of each."""

from locallip.activations.base import Activation, Box, Hinge, Unitwise, Varying
from locallip.activations.clip import Clip, ReLUTheta, clip, relu, relu_theta
from locallip.activations.maxmin import ClippedMaxMin, MaxMin, SortPairs
from locallip.activations.maxpool import MaxPool2d
from locallip.activations.smooth import ELU, Increasing, LeakyReLU, Sigmoid, Softplus, Tanh

__all__ = [
    "ELU",
    "Activation",
    "Box",
    "Clip",
    "ClippedMaxMin",
    "Hinge",
    "Increasing",
    "LeakyReLU",
    "MaxMin",
    "MaxPool2d",
    "ReLUTheta",
    "Sigmoid",
    "Softplus",
    "SortPairs",
    "Tanh",
    "Unitwise",
    "Varying",
    "clip",
    "relu",
    "relu_theta",
]
