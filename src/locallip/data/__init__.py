"""Images to train and certify on: a part of MNIST inside the package, readers of three data sets, and of own files."""

from locallip.data.embedded import load_embedded
from locallip.data.errors import DamagedData, MissingData
from locallip.data.image_set import pixels
from locallip.data.images import READERS, DataName, ImageSet, Split, hold_out, load_images
from locallip.data.own import OwnImages, load_own
from locallip.data.own_set import Like

__all__ = [
    "READERS",
    "DamagedData",
    "DataName",
    "ImageSet",
    "Like",
    "MissingData",
    "OwnImages",
    "Split",
    "hold_out",
    "load_embedded",
    "load_images",
    "load_own",
    "pixels",
]
