"""ONNX files as torch modules: read with suspicion, every operator understood or refused by name, nothing executed."""

from locallip.onnx_model.loading import MissingOnnx, load_onnx
from locallip.onnx_model.network import OnnxNetwork

__all__ = ["MissingOnnx", "OnnxNetwork", "load_onnx"]
