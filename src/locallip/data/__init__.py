"""Images to train and certify on: a part of MNIST that is inside the package, so nothing is downloaded."""

from locallip.data.embedded import DamagedData, load_embedded

__all__ = ["DamagedData", "load_embedded"]
