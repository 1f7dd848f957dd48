"""VNN-LIB files: boxes of inputs and the classes that must stay behind, read with suspicion and decided by certificates."""

from locallip.vnnlib.deciding import Answer, Decider
from locallip.vnnlib.expressions import WrongSpec
from locallip.vnnlib.spec import Spec, read_spec

__all__ = ["Answer", "Decider", "Spec", "WrongSpec", "read_spec"]
