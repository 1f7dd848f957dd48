"""The figures that the paper prints, as data; each row carries the name of the recipe that stands for it, if there is one.

Accuracies are in per cent. The certified accuracy of the Lipschitz methods rests on power iteration, which approaches a norm
from below: it is an estimate. Labels such as tbl:robust are those of the paper's source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Recipe's word for the data -> the paper's word, and the radius to certify.
DATA = {"mnist": ("MNIST", "1.58"), "cifar10": ("CIFAR-10", "36/255"), "tiny-imagenet": ("Tiny-ImageNet", "36/255")}

#: Images in the test set of each (for Tiny-ImageNet the validation images, whose labels are public).
TEST_IMAGES = {"mnist": 10_000, "cifar10": 10_000, "tiny-imagenet": 10_000}


@dataclass(frozen=True)
class Row:
    """One trained network: what the paper calls it and its accuracies.

    `fast` is our own schedule for it, where that is not the recipe's name behind "fast-".
    """

    data: str
    network: str
    method: str
    clean: float
    pgd: float
    certified: float
    recipe: str | None = None
    fast: str | None = None


def _rows(data: str, network: str, *rows: tuple[str, float, float, float, str | None]) -> tuple[Row, ...]:
    return tuple(Row(data, network, *row) for row in rows)


def _weighted(row: Row) -> Row:
    """The row of a sparsity loss: our schedules for these are of one length, whatever that of Table 2 has."""
    weight = row.method.removeprefix("Sparsity ")
    return replace(row, fast=f"fast-tiny-imagenet-8c2f-local-b-sparsity-{weight}")


#: Table 2 (tbl:robust). The 7C1F of two Tiny-ImageNet rows is not described; their recipes use the 8C2F of the others.
ROBUST: tuple[Row, ...] = (
    *_rows(
        "mnist",
        "4C3F",
        ("Standard", 99.0, 45.4, 0.0, "mnist-4c3f-standard"),
        ("LMT", 86.5, 53.6, 40.5, "mnist-4c3f-lmt"),
        ("CAP", 88.1, 67.9, 44.5, None),
        ("CROWN-IBP", 82.3, 80.4, 41.3, None),
        ("GloRo", 92.9, 68.9, 50.1, "mnist-4c3f-gloro"),
        ("Local-Lip-G", 96.3, 78.2, 55.8, "mnist-4c3f-local-g"),
        ("BCP", 92.4, 65.8, 47.9, "mnist-4c3f-bcp"),
        ("Local-Lip-B", 93.0, 66.7, 48.7, "mnist-4c3f-local-b"),
    ),
    *_rows(
        "cifar10",
        "4C3F",
        ("Standard", 85.3, 41.2, 0.0, "cifar10-4c3f-standard"),
        ("IBP", 34.5, 31.8, 24.4, "cifar10-4c3f-ibp"),
        ("LMT", 56.5, 49.8, 37.2, "cifar10-4c3f-lmt"),
        ("CAP", 60.1, 55.7, 50.3, None),
        ("CROWN-IBP", 54.2, 52.7, 41.9, None),
        ("ReLU-Stability", 57.4, 52.4, 51.1, None),
        ("GloRo", 73.2, 66.3, 49.0, "cifar10-4c3f-gloro"),
        ("Local-Lip-G", 75.7, 68.6, 49.7, "cifar10-4c3f-local-g"),
        ("BCP", 64.4, 59.4, 50.0, "cifar10-4c3f-bcp"),
        ("Local-Lip-B", 70.1, 64.2, 53.5, "cifar10-4c3f-local-b"),
    ),
    *_rows(
        "cifar10",
        "6C2F",
        ("Standard", 87.5, 32.5, 0.0, "cifar10-6c2f-standard"),
        ("IBP", 33.0, 31.1, 23.4, "cifar10-6c2f-ibp"),
        ("LMT", 63.1, 58.3, 38.1, "cifar10-6c2f-lmt"),
        ("CAP", 60.1, 56.2, 50.9, None),
        ("CROWN-IBP", 53.7, 52.2, 41.9, None),
        ("GloRo", 70.7, 63.8, 49.3, "cifar10-6c2f-gloro"),
        ("Local-Lip-G", 76.4, 69.2, 51.3, "cifar10-6c2f-local-g"),
        ("BCP", 65.7, 60.8, 51.3, "cifar10-6c2f-bcp"),
        ("Local-Lip-B", 70.7, 64.8, 54.3, "cifar10-6c2f-local-b"),
        ("GloRo + MaxMin", 77.0, 69.2, 58.4, "cifar10-6c2f-maxmin-gloro"),
        ("Cayley + MaxMin", 75.3, 67.7, 59.2, None),
        ("Local-Lip-B + MaxMin", 77.4, 70.4, 60.7, "cifar10-6c2f-maxmin-local-b"),
    ),
    *_rows(
        "tiny-imagenet",
        "7C1F",
        ("Standard", 35.9, 19.4, 0.0, "tiny-imagenet-8c2f-standard"),
        ("GloRo", 31.3, 28.2, 13.2, "tiny-imagenet-8c2f-gloro"),
    ),
    *_rows(
        "tiny-imagenet",
        "8C2F",
        ("Local-Lip-G", 37.4, 34.2, 13.2, "tiny-imagenet-8c2f-local-g"),
        ("BCP", 28.7, 26.6, 20.0, "tiny-imagenet-8c2f-bcp"),
        ("Local-Lip-B", 30.8, 28.4, 20.7, "tiny-imagenet-8c2f-local-b"),
        ("GloRo + MaxMin", 35.5, 32.3, 22.4, "tiny-imagenet-8c2f-maxmin-gloro"),
        ("Local-Lip-B + MaxMin", 36.9, 33.3, 23.4, "tiny-imagenet-8c2f-maxmin-local-b"),
    ),
)

#: Where power iteration starts during training (tab:power_initialization).
INITIALISATION: tuple[Row, ...] = _rows(
    "cifar10",
    "6C2F",
    ("Random start, 2 steps", 76.7, 69.0, 0.5, "cifar10-6c2f-local-b-random-2"),
    ("Random start, 5 steps", 73.7, 66.8, 46.0, "cifar10-6c2f-local-b-random-5"),
    ("Random start, 10 steps", 72.0, 65.8, 51.6, "cifar10-6c2f-local-b-random-10"),
    ("Saved u, 2 steps", 70.7, 64.8, 54.3, "cifar10-6c2f-local-b"),
)

#: Weight of the sparsity loss (tbl:sparse).
SPARSITY: tuple[Row, ...] = tuple(
    _weighted(row)
    for row in _rows(
        "tiny-imagenet",
        "8C2F",
        ("Sparsity 0", 30.6, 28.3, 19.9, "tiny-imagenet-8c2f-local-b-sparsity-0"),
        ("Sparsity 0.01", 30.8, 28.4, 20.7, "tiny-imagenet-8c2f-local-b"),
        ("Sparsity 0.03", 29.7, 27.3, 20.2, "tiny-imagenet-8c2f-local-b-sparsity-0.03"),
        ("Sparsity 0.1", 28.9, 26.7, 19.8, "tiny-imagenet-8c2f-local-b-sparsity-0.1"),
    )
)

#: Comparison with adversarial training (tbl:AT); its Standard is another run than that of Table 2.
ADVERSARIAL: tuple[Row, ...] = _rows(
    "cifar10",
    "6C2F",
    ("Standard", 87.7, 35.9, 0.0, "cifar10-6c2f-standard"),
    ("AT", 80.7, 70.76, 0.0, "cifar10-6c2f-at"),
    ("TRADES", 80.0, 72.3, 0.0, "cifar10-6c2f-trades"),
    ("BCP", 65.7, 60.8, 51.3, "cifar10-6c2f-bcp"),
    ("Local-Lip-B", 70.7, 64.8, 54.3, "cifar10-6c2f-local-b"),
)

#: Global and mean local Lipschitz bound beside each row of ADVERSARIAL, by method.
LIPSCHITZ: dict[str, tuple[float, float]] = {
    "Standard": (1.52e9, 4.81e8),
    "AT": (2.27e4, 1.85e4),
    "TRADES": (1.82e4, 1.32e4),
    "BCP": (11.35, 11.08),
    "Local-Lip-B": (7.89, 6.68),
}


@dataclass(frozen=True)
class Time:
    """Training time in seconds an epoch (tbl:time); None where the paper prints none."""

    data: str
    network: str
    method: str
    seconds: float | None
    recipe: str | None = None


#: One V100, four of them for Tiny-ImageNet. Which loss "Ours" had is not said; both cost the same.
TIMES: tuple[Time, ...] = (
    Time("mnist", "4C3F", "CAP", 689),
    Time("mnist", "4C3F", "GloRo", 9.0, "mnist-4c3f-gloro"),
    Time("mnist", "4C3F", "BCP", 17.3, "mnist-4c3f-bcp"),
    Time("mnist", "4C3F", "Local-Lip", 45.5, "mnist-4c3f-local-g"),
    Time("cifar10", "4C3F", "CAP", 645),
    Time("cifar10", "4C3F", "GloRo", None, "cifar10-4c3f-gloro"),
    Time("cifar10", "4C3F", "BCP", 23.5, "cifar10-4c3f-bcp"),
    Time("cifar10", "4C3F", "Local-Lip", 38.2, "cifar10-4c3f-local-b"),
    Time("cifar10", "6C2F", "CAP", 1369),
    Time("cifar10", "6C2F", "GloRo", 6.5, "cifar10-6c2f-gloro"),
    Time("cifar10", "6C2F", "BCP", 26.0, "cifar10-6c2f-bcp"),
    Time("cifar10", "6C2F", "Local-Lip", 69.8, "cifar10-6c2f-local-b"),
    Time("tiny-imagenet", "8C2F", "CAP", None),
    Time("tiny-imagenet", "8C2F", "GloRo", None, "tiny-imagenet-8c2f-gloro"),
    Time("tiny-imagenet", "8C2F", "BCP", 343.5, "tiny-imagenet-8c2f-bcp"),
    Time("tiny-imagenet", "8C2F", "Local-Lip", 398.8, "tiny-imagenet-8c2f-local-b"),
)

_HYPER_NAMES = (
    *("learning_rate", "end_learning_rate", "batch", "eps_train", "sparsity", "theta_weight"),
    *("warmup_epochs", "epochs", "decay_epoch", "ramp_epochs", "power_steps"),
)

#: Hyper-parameters of certifiable training (tbl:hyper), under the names of a recipe's fields.
HYPER: dict[str, dict[str, float]] = {
    column: dict(zip(_HYPER_NAMES, values, strict=True))
    for column, values in {
        "mnist": (1e-3, 5e-6, 256, 1.58, 0.0, 0.0, 0, 300, 150, 150, 5),
        "cifar10": (1e-3, 1e-6, 256, 0.1551, 0.0, 0.0, 20, 800, 400, 400, 2),
        "tiny-imagenet": (2.5e-4, 5e-7, 128, 0.16, 0.01, 0.1, 0, 250, 150, 125, 1),
        "tiny-imagenet-maxmin": (1e-4, 5e-7, 128, 0.16, 0.01, 0.1, 0, 250, 150, 125, 3),
    }.items()
}


def hyper(data: str, *, maxmin: bool) -> dict[str, float]:
    """The column of tbl:hyper for these networks; MNIST and CIFAR-10 have one for both activations."""
    return HYPER.get(f"{data}-maxmin", HYPER[data]) if maxmin else HYPER[data]


@dataclass(frozen=True)
class Later:
    """A network that others have published since, with the figures and the place that prints them."""

    data: str
    network: str
    clean: float
    certified: float
    source: str


#: Beyond the paper: larger networks with global bounds built into their layers.
LATER: tuple[Later, ...] = (
    Later(
        "cifar10",
        "LiResNet, with generated training images",
        87.0,
        78.1,
        "Hu, Leino, Wang and Fredrikson, *A Recipe for Improved Certifiable Robustness*, 2023, figures from its repository",
    ),
)
