"""A small network after a few ordinary training steps, stored as users store theirs."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

import locallip as ll
from locallip.data import load_images


def stored_network(folder: Path, steps: int) -> Path:
    """Of the first test images some are right, some certified at 0.3, some attacked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ll.build_model("small", (1, 28, 28), 10, "relu")
    images = load_images("embedded", "train")
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        part = slice(64 * step, 64 * (step + 1))
        loss = F.cross_entropy(model(images.images[part].float() / 255), images.labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path = folder / "mine.safetensors"
    about = {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10}
    ll.save_model(path, model.eval(), about)
    return path
