"""locallip: image classifiers whose robustness to bounded perturbations is proved, and the proof for any network."""

import os
import sys

# Threads of torch that wait for others keep their processors busy, and where those are shared everything takes many times as
# long. Whoever has set this, or has loaded torch before, is left alone.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from locallip.activations import ClippedMaxMin, MaxMin, ReLUTheta
from locallip.certify import (
    Certificate,
    Verdict,
    certified_accuracy,
    certified_radius,
    certify,
    global_lipschitz,
    local_lipschitz,
)
from locallip.models import build_model
from locallip.network import Network, Normalize, UnsupportedLayer, lower, register_layer
from locallip.norms import Guarantee, LayerTooLarge
from locallip.onnx_model import load_onnx
from locallip.zoo import load_model, save_model

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "ClippedMaxMin",
    "Guarantee",
    "LayerTooLarge",
    "MaxMin",
    "Network",
    "Normalize",
    "ReLUTheta",
    "UnsupportedLayer",
    "Verdict",
    "__version__",
    "build_model",
    "certified_accuracy",
    "certified_radius",
    "certify",
    "global_lipschitz",
    "load_model",
    "load_onnx",
    "local_lipschitz",
    "lower",
    "register_layer",
    "save_model",
]
