"""Synthetic reports for the tests of the page: the sizes of the paper's 6C2F on CIFAR-10, without a network behind them."""

import base64
from typing import Any

import numpy as np

from locallip.report.page import Card, Figure, Page, Section

HOSTILE = "</script><img src=x onerror=\"console.error('broke out')\"><!-- & 'name'"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
EPS = 36 / 255
GRID = [k * EPS / 6 for k in range(13)]
VERDICTS = ["CERTIFIED", "UNKNOWN", "ATTACKED", "MISCLASSIFIED"]
LAYERS = [
    ("conv 1", 32 * 32 * 32, (32, 32)),
    ("conv 2", 32 * 32 * 32, (32, 32)),
    ("conv 3", 64 * 16 * 16, (16, 16)),
    ("conv 4", 64 * 16 * 16, (16, 16)),
    ("conv 5", 64 * 8 * 8, (8, 8)),
    ("conv 6", 64 * 8 * 8, (8, 8)),
    ("linear 1", 512, (16, 32)),
]


def encoded(values: np.ndarray) -> str:
    """Return the bytes of values in C order as base64 text."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def picture(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Return an image (C, H, W) of bytes: a bright blob before a gradient."""
    channels, height, width = shape
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    blob = np.exp(-(((x - rng.uniform(0.3, 0.7)) / 0.2) ** 2 + ((y - rng.uniform(0.3, 0.7)) / rng.uniform(0.1, 0.3)) ** 2))
    colours = rng.uniform(20, 235, (channels, 2))
    values = [low + (high - low) * blob + 25 * (y - 0.5) + rng.normal(0, 6, y.shape) for low, high in colours]
    return np.clip(np.stack(values), 0, 255).astype(np.uint8)


def image(rng: np.random.Generator, index: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return one image of the explorer; verdicts go round, and each has the radius and adversary that fit it."""
    verdict = VERDICTS[index % 4]
    label, other = (int(k) for k in rng.choice(len(CLASSES), 2, replace=False))
    logits = rng.normal(0, 2, len(CLASSES))
    order = [other, label] if verdict == "MISCLASSIFIED" else [label, other]
    lead = float(rng.uniform(0.6, 2.5)) if verdict == "CERTIFIED" else float(rng.uniform(0.1, 0.5))
    logits[order[1]] = logits.max() + 0.2
    logits[order[0]] = logits[order[1]] + lead
    slope = 3.0
    reach = slope * np.array(GRID)[:, None] * rng.uniform(0.9, 1.4, len(CLASSES))
    signed = lead if verdict != "MISCLASSIFIED" else -lead
    certified = {"CERTIFIED": lead / slope, "UNKNOWN": lead / slope, "ATTACKED": None, "MISCLASSIFIED": None}[verdict]
    attacked = {"CERTIFIED": lead / slope * 1.9, "UNKNOWN": None, "ATTACKED": 0.8 * EPS, "MISCLASSIFIED": None}[verdict]
    difference = np.clip(rng.normal(0, 40, shape), -127, 127).astype(np.int8)
    adversary = {"class": other, "distance": attacked, "difference": encoded(difference), "scale": 0.03}
    share = np.array(GRID) / GRID[-1]
    fields = [np.clip(share[:, None, None] * rng.beta(1.2, 3, size)[None] * 1.6, 0, 1) for _, _, size in LAYERS]
    maps = [np.round(255 * field).astype(np.uint8) for field in fields]
    return {
        "index": index * 7,
        "label": label,
        "prediction": order[0],
        "verdict": verdict,
        "decided_by": "local bound",
        "radius": certified,
        "attacked": attacked,
        "adversary": None if attacked is None else adversary,
        "pixels": encoded(picture(rng, shape)),
        "logits": logits.tolist(),
        "lower": (logits - reach).tolist(),
        "upper": (logits + reach).tolist(),
        "margin": (signed - slope * np.array(GRID)).tolist(),
        "lipschitz": [[0.8 * 1.35**k * (0.4 + 0.6 * s) for k in range(len(LAYERS) + 1)] for s in share],
        "varying": [
            [round(float(field[e].mean()) * units) for field, (_, units, _) in zip(fields, LAYERS, strict=True)]
            for e in range(len(GRID))
        ],
        "maps": encoded(np.concatenate([one.reshape(-1) for one in maps])),
    }


def network(name: str = "cifar10-6c2f", images: int = 48, shape: tuple[int, int, int] = (3, 32, 32)) -> dict[str, Any]:
    """Return one network of the explorer with so many images."""
    rng = np.random.default_rng(5)
    return {
        "name": name,
        "classes": list(CLASSES),
        "shape": list(shape),
        "eps": EPS,
        "eps_text": "36/255",
        "guarantee": "high_probability",
        "grid": GRID,
        "layers": [{"title": title, "units": units, "map": list(size)} for title, units, size in LAYERS],
        "global_lipschitz": [1.2 * 2.3**k for k in range(len(LAYERS) + 1)],
        "images": [image(rng, index, shape) for index in range(images)],
    }


def figure(name: str, title: str, alt: str = "Two curves that fall") -> Figure:
    """Return a figure with curves, an area, bars and a reference line, with the classes that charts use."""
    grid = "".join(
        f'<line class="gridline" x1="50" x2="500" y1="{y}" y2="{y}"/><text class="tick" x="42" y="{y + 4}" '
        f'text-anchor="end">{(250 - y) / 240:.2f}</text>'
        for y in range(10, 251, 60)
    )
    curves = "".join(
        f'<polyline class="s{k}" points="'
        + " ".join(f"{50 + 9 * i},{250 - (220 - 14 * k) * np.exp(-i / (18 + 6 * k)):.1f}" for i in range(51))
        + f'"/><text class="s{k}" x="440" y="{24 + 16 * k}">series {k}</text>'
        for k in range(4)
    )
    bars = "".join(
        f'<rect class="s{4 + k}" x="{90 + 30 * k}" y="{200 - 6 * k}" width="18" height="{50 + 6 * k}"/>' for k in range(4)
    )
    svg = (
        f'<svg viewBox="0 0 520 290">{grid}<path class="area s0" d="M50 250 L50 40 Q200 240 500 240 L500 250 Z"/>'
        f'<g class="fill">{bars}</g>{curves}<line class="paper" x1="50" x2="500" y1="120" y2="120"/>'
        '<text class="paper label" x="60" y="114">paper, 54.3 %</text>'
        '<line class="axis" x1="50" x2="500" y1="250" y2="250"/>'
        '<text class="label" x="275" y="284" text-anchor="middle">epoch</text></svg>'
    )
    csv = 'epoch,value,note\r\n0,0.5,"a, b"\r\n1,0.25,50 % & <more> # é\r\n'
    return Figure(name, title, "The local bound falls below the global one within twenty epochs.", svg, csv, alt)


def page(explorer: dict[str, Any] | None, title: str = "CIFAR-10 6C2F, two runs") -> Page:
    """Return a page with two cards, two sections of figures, and the explorer's data as given."""
    figures = [
        ("clean", "71.6 %", ""),
        ("PGD-100", "66.1 %", "an upper bound"),
        ("certified", "58.5 %", "high probability, 1e-9 an image"),
        ("local / global", "0.31", "mean over test images"),
    ]
    cards = [
        Card("fast-cifar10-6c2f-local-b", "CIFAR-10, eps 36/255, 250 epochs, NVIDIA H200", figures),
        Card("fast-cifar10-6c2f-gloro", "CIFAR-10, eps 36/255, 250 epochs, NVIDIA H200", figures),
    ]
    about = "Both runs were trained by the same schedule; the dashed line is what the paper reports."
    sections = [
        Section("training", "Training", about, [figure("lips", "Lipschitz bounds"), figure("loss", "Loss")]),
        Section("certificates", "Certificates", "", [figure("curve", "Certified accuracy over eps")]),
    ]
    return Page(title, "Made on 1 May 2025 by locallip 0.5.0", cards, sections, explorer)
