"""Images to train and certify on: a part of MNIST inside the package, and readers of MNIST, CIFAR-10 and Tiny-ImageNet."""

from locallip.data.embedded import load_embedded
from locallip.data.errors import DamagedData, MissingData
from locallip.data.image_set import pixels
from locallip.data.images import READERS, DataName, ImageSet, Split, hold_out, load_images

__all__ = [
    "READERS",
    "DamagedData",
    "DataName",
    "ImageSet",
    "MissingData",
    "Split",
    "hold_out",
    "load_embedded",
    "load_images",
    "pixels",
]
