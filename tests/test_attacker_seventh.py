"""A seventh round of attempts: numbers that a worker reads and its module does not show, and numbers as they are printed."""

import copy
import json
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip import tables
from locallip.certify import Certifier, RadiusFinder
from locallip.certify.prover import fingerprint
from locallip.data import ImageSet
from locallip.network.described import read_by
from locallip.norms import Guarantee
from locallip.norms.base import Noise
from locallip.proofs import Job, certify_images
from locallip.proofs.rows import Row
from locallip.proofs.summary import describe, shown, summarize
from locallip.report.explore import Explorer
from locallip.report.proved import certificates
from locallip.report.runs import Certified, Run

DOUBLE = torch.float64
#: A weight that is no power of two, small enough that every radius of 1 is certified with it, and far from it behind `GREW`.
SMALL, GREW = 0.01, 1000.0


class Backbone(nn.Module):
    """A part that stays as it is while the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[SMALL, 0.0], [0.0, SMALL]], dtype=DOUBLE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Tuned(nn.Module):
    """Two classes: z, and 1 - z; checkpoints hold the head alone, as the backbone is known."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.act, self.head = Backbone(), nn.ReLU(), nn.Linear(2, 2, dtype=DOUBLE)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
            self.head.bias.copy_(torch.tensor([0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.backbone(x)))


class HeadOnly(Tuned):
    def state_dict(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        return {name: value for name, value in super().state_dict(*args, **named).items() if "backbone" not in name}


class Rounded(Tuned):
    """Saves sixteen bits of everything."""

    def state_dict(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        return {name: value.half() for name, value in super().state_dict(*args, **named).items()}


class WithoutNames(HeadOnly):
    """Hands the head alone to an optimizer, and saves no more."""

    def named_parameters(self, *args: Any, **named: Any) -> Any:
        return ((name, value) for name, value in super().named_parameters(*args, **named) if "backbone" not in name)


def grow(model: Tuned, factor: float = GREW) -> None:
    with torch.no_grad():
        model.backbone.weight.mul_(factor)


def is_lost(model: Tuned, x: Tensor, eps: float) -> bool:
    """Whether class 1 loses inside the ball, with fractions: along the first coordinate z = max(0, w x)."""
    weight, reach = Fraction(float(model.backbone.weight[0, 0])), Fraction(float(x[0, 0])) + Fraction(eps)
    z = max(Fraction(0), weight * reach)
    return z >= 1 - z


def ask(worker: Any, x: Tensor) -> bool:
    """Whether class 1 is certified within 1."""
    y = torch.tensor([1])
    return bool(worker(x, y, 1.0).certified[0]) if isinstance(worker, Certifier) else bool(worker(x, y)[0] >= 1)


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
@pytest.mark.parametrize("model", [Tuned, HeadOnly, WithoutNames])
def test_weights_that_are_not_saved_count(model: type[Tuned], kind: Any) -> None:
    """The backbone grows, norms stay those from before: class 1 was certified within 1 where class 0 wins.

    Catches: a state of what is saved alone.
    """
    network, x = model().eval(), torch.zeros(1, 2, dtype=DOUBLE)
    worker = kind(network, (2,), guarantee="deterministic", method="local")
    assert ask(worker, x)
    grow(network)
    assert is_lost(network, x, 1.0)
    with pytest.raises(RuntimeError, match="has changed"):
        ask(worker, x)


def test_fingerprints_tell_networks_apart_that_save_the_same() -> None:
    """A certificate names its network by this. Catches: weights that a module leaves out, or rounds, when it is saved."""
    for kind, factor in ((HeadOnly, GREW), (WithoutNames, GREW), (Rounded, 1 + 1e-9)):
        one, other = kind(), kind()
        assert fingerprint(one) == fingerprint(other)
        grow(other, factor)
        assert fingerprint(one) != fingerprint(other), kind


def test_fingerprints_of_ordinary_networks_are_those_of_what_they_save() -> None:
    """Rows from before name their networks by these. Catches: another order, other names."""
    plain = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        plain.weight.fill_(0.5)
    assert fingerprint(plain) == "8aa10ec7b73013aa94ea2c260055cdd6968ce9d109dda4c5282a1f6e253c53b7"


def of_a_copy(model: Tuned, worker: Any) -> tuple[Tuned, Any]:
    copied = copy.deepcopy(worker)
    grow(model)
    return copied.model, copied


def of_a_holder(model: Tuned, worker: Any) -> tuple[Tuned, Any]:
    """Somebody who keeps both, and is copied for an average of weights."""
    holder = nn.Module()
    holder.net, holder.worker = model, worker
    copied = copy.deepcopy(holder)
    grow(model)
    return copied.net, copied.worker


def of_another_layer(model: Tuned, worker: Any) -> tuple[Tuned, Any]:
    """The layer is exchanged for a copy, and the first one is trained on elsewhere."""
    first = model.backbone
    model.backbone = copy.deepcopy(first)
    with torch.no_grad():
        first.weight.mul_(GREW)
    return model, worker


def of_another_tensor(model: Tuned, worker: Any) -> tuple[Tuned, Any]:
    """A checkpoint is read in place of the tensors, and the optimizer goes on with those from before."""
    first = model.backbone.weight
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with torch.no_grad():
        first.mul_(GREW)
    return model, worker


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
@pytest.mark.parametrize("change", [of_a_copy, of_a_holder, of_another_layer, of_another_tensor])
def test_a_worker_reads_the_numbers_of_its_own_module(change: Callable[..., Any], kind: Any) -> None:
    """The module of the worker is as it was, and what its bounds are computed from is not: norms of one network met centers
    of another.

    Catches: a state that leaves out what the lowered network reads.
    """
    model, x = Tuned().eval(), torch.zeros(1, 2, dtype=DOUBLE)
    worker = kind(model, (2,), guarantee="deterministic", method="local")
    assert ask(worker, x)
    mine, worker = change(model, worker)
    assert not is_lost(mine, x, 1.0)
    with pytest.raises(RuntimeError, match="has changed"):
        ask(worker, x)


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
def test_copies_of_a_worker_work(kind: Any) -> None:
    """As long as nothing changes."""
    model, x = Tuned().eval(), torch.zeros(1, 2, dtype=DOUBLE)
    assert ask(copy.deepcopy(kind(model, (2,))), x)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Conv1d(1, 2, 3, padding=1), ll.ReLUTheta((2, 4)), nn.Flatten(), nn.Linear(8, 2)],
        lambda: [
            nn.Conv1d(1, 2, 3, padding=1),
            nn.BatchNorm1d(2),
            ll.MaxMin(),
            nn.AvgPool1d(2),
            nn.Flatten(),
            nn.Linear(4, 2),
        ],
        lambda: [nn.Flatten(), nn.Linear(4, 4), ll.ClippedMaxMin(2), nn.Linear(4, 2, bias=False)],
    ],
)
def test_every_number_of_every_layer_counts(layers: Callable[[], list[nn.Module]]) -> None:
    """One tensor after the other is changed.

    Catches: a kind of operator, offset or activation whose numbers are not looked at.
    """
    torch.manual_seed(1)
    model = nn.Sequential(*layers()).double().eval()
    network = ll.lower(model, (1, 4))

    def read() -> list[Any]:
        with torch.no_grad():
            return [value.tolist() for value in read_by(network)]

    first = read()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            before = tensor.detach().clone()
            with torch.no_grad():
                tensor.mul_(1.5).add_(0.25)
                assert read() != first, name
                tensor.copy_(before)
                assert read() == first


# What is printed -------------------------------------------------------------------------------------------------------


def row(index: int, eps: float, radius: float, failure_prob: float) -> Row:
    proof = ("CERTIFIED", "global bound") if radius >= eps else ("UNKNOWN", "nothing")
    return Row(index, 0, 0, *proof, "high_probability", failure_prob, eps, 1.0, 1.0, 1.0, 0.0, radius)


def test_printed_radii_and_risks_are_not_better_than_proved_ones() -> None:
    """36/255 is no short number: "certified at eps 0.02824" was said of 0.028236, and 1.2e-06 of a risk of 1.234e-06.

    Catches: rounding to nearest of what is proved.
    """
    eps = float(Fraction(36, 255))
    rows = [row(k, eps, 1.0001 * eps, 1e-9) for k in range(1234)]
    summary = summarize(rows)
    lines = describe(summary, Guarantee.HIGH_PROBABILITY)
    said = [line.split("at eps ")[1] for line in lines.splitlines() if "at eps " in line]
    proved = [summary["curve"]["eps"][at] for at in (2, 6, 14, 18)]
    assert [abs(Fraction(text) / Fraction(value) - 1) < Fraction(1, 1000) for text, value in zip(said, proved, strict=True)]
    assert all(Fraction(text) <= Fraction(value) for text, value in zip(said, proved, strict=True)), said
    risk = lines.split("at most ")[1].split(" ")[0]
    assert Fraction(risk) >= 1234 * Fraction(1, 10**9)
    median = lines.split("median ")[1].split(",")[0]
    assert Fraction(median) <= Fraction(1.0001 * eps)


@pytest.mark.parametrize(("value", "text"), [(0.3, "0.3"), (1e-5, "1e-05"), (0.0, "0"), (1.58, "1.58")])
def test_short_numbers_are_printed_as_they_are(value: float, text: str) -> None:
    assert shown(value) == text
    assert shown(value, 3, upwards=True) == text


def test_what_is_a_bit_above_a_short_number_is_not_called_that_number() -> None:
    assert shown(0.1 + 0.2) == "0.3"
    assert shown(0.1 + 0.2, 3, upwards=True) == "0.301"  # a risk is never said to be smaller than it is


@pytest.mark.parametrize("radii", [False, True])
def test_a_report_of_rows_that_are_still_to_come(radii: bool) -> None:
    """A run that was stopped in its first chunk and resumed has settings, a file, and no row; the page ended in an error.

    Catches: empty rows that are shown as certificates.
    """
    images = ImageSet("embedded", "test", torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([1, 1]), ("a", "b"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    rows, settings, _ = certify_images(Job("small", "1/10", seed=1, radii=radii), model, images)
    assert certificates([Run("small", {}, (), {}, {}, "", [Certified(settings, rows)])]) is not None
    empty = Run("small", {}, (), {}, {}, "", [Certified(settings, [])])
    assert certificates([empty]) is None
    assert empty.rows_about(images, "1/10", "high_probability") == []


def test_an_explorer_begins_with_other_vectors_than_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the seed 0 unless told otherwise, and on a GPU both draw from the same generator: a proof would begin with
    the vectors that the weights were trained with, and its probability is about starts that know nothing of them.

    Catches: a prover with the seed itself, or with one that a layer's saved vectors have.
    """
    drawn: list[int] = []
    begun = Noise.__call__

    def noted(self: Noise, *call: Any) -> Tensor:
        assert self._seed is not None
        drawn.append(self._seed)
        return begun(self, *call)

    monkeypatch.setattr(Noise, "__call__", noted)
    images = ImageSet("embedded", "test", torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([1, 1]), ("a", "b"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    Explorer(model, images, "1/10", radii=True).run([0, 1], {})
    of_training = {7919 * stage + source for stage in range(100) for source in range(100)}
    assert drawn
    assert not of_training & set(drawn)


def about(folder: Path, file: str, certified: float, **changes: Any) -> None:
    """What `locallip certify` writes beside its rows, of a whole test set unless said otherwise."""
    settings: dict[str, Any] = {
        "model": file, "fingerprint": "f" * 64, "data": "cifar10", "split": "test", "images": 10_000, "data_sha256": "0",
        "eps": "36/255", "guarantee": "high_probability", "failure_prob": 1e-9, "attack_steps": 20, "power_steps": 100,
        "batch_size": 32, "seed": 1, "hardware": "One GPU", "environment": {}, "method": "auto", **changes,
    }  # fmt: skip
    (folder / "certificates").mkdir(exist_ok=True)
    summary = {"images": settings["images"], "correct": 99.0, "certified": certified}
    values = {"settings": settings, "summary": summary, "run": {"seconds": 1.0, "others_gb": 0.0}}
    (folder / "certificates" / f"{file}.json").write_text(json.dumps(values))


def test_a_table_shows_what_is_proved_at_its_own_eps(tmp_path: Path) -> None:
    """ "CIFAR-10, 36/255" stood beside the largest share of any certificates: those of a smaller ball, or of ten images.

    Catches: certificates that are chosen by their data alone.
    """
    about(tmp_path, "whole", 61.0)
    about(tmp_path, "nearer", 97.0, eps="1/255")
    about(tmp_path, "few", 98.0, images=10)
    about(tmp_path, "seen", 96.0, split="train")
    about(tmp_path, "guessed", 95.0, guarantee="estimate", failure_prob=0.0)
    text = tables.later_table(tmp_path)
    assert "| `whole` | 99.00 | 61.00 |" in text
    assert not [name for name in ("nearer", "few", "seen", "guessed") if name in text]


def test_a_table_says_which_risk_a_proof_takes(tmp_path: Path) -> None:
    """All stood under "High probability", whatever the probability. Catches: a share without it."""
    about(tmp_path, "usual", 61.0)
    about(tmp_path, "bold", 62.0, failure_prob=0.25)
    usual, bold = sorted(str(tables.certificates_table(tmp_path)).splitlines()[2:], reverse=True)
    assert "failure" not in usual
    assert "62.00 (1 s, failure probability 0.25 an image)" in bold


def test_threads_leave_modules_as_they_were() -> None:
    """A server certifies in two threads. Both trace the module with torch.fx, which replaces how modules are called: one put
    back the replacement of the other, and from then on every module of the program gave stand-ins in place of numbers.

    Catches: tracing in two threads at a time.
    """
    model, x, y = Tuned().eval(), torch.zeros(1, 2, dtype=DOUBLE), torch.tensor([1])
    called, interval, found = nn.Module.__call__, sys.getswitchinterval(), []

    def work() -> None:
        for _ in range(8):
            found.append(bool(ll.certify(model, x, y, 1.0, guarantee="deterministic").certified[0]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert nn.Module.__call__ is called
        assert isinstance(model(x), Tensor)
        assert found == [True] * 16
    finally:
        sys.setswitchinterval(interval)
        nn.Module.__call__ = called
