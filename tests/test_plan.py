"""Plans of memory: what bounds take is known beforehand, kept to, and said where it is too much."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import locallip as ll
from locallip import room
from locallip.activations import MaxMin
from locallip.bounds import relaxation
from locallip.bounds.plan import WORKING, MemoryPlan, TooLittleMemory, plan_of
from locallip.certify.prover import Prover
from locallip.models import convolutional_network

CPU = torch.device("cpu")


class Peak(TorchDispatchMode):
    """Bytes of all tensors that are there at a time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self.known:
                storage = value.untyped_storage()
                self.known[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.known.pop, storage._cdata, 0)
        self.peak = max(self.peak, sum(self.known.values()))
        return found


def convolutional(width: int = 8, side: int = 12, classes: int = 6, pairs: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = convolutional_network([(width, 3, 1, 1)] * 2 + [(width, 4, 2, 1)], (32,), (3, side, side), classes)
    layers = [MaxMin() if pairs and isinstance(layer, ll.ReLUTheta) else layer for layer in model]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def proved(model: nn.Module, side: int, count: int, plan: MemoryPlan | None = None) -> tuple[Prover, Callable[[], Any]]:
    prover = Prover(model, (3, side, side), "estimate", power_steps=3, seed=0)
    x = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0)).double()
    y, eps = model(x.float()).argmax(1), torch.full((count,), 0.03).double()
    if plan is not None:
        prover.plan = plan
    return prover, lambda: prover.margin(x, y, eps, local="none", relax="boxes", slopes=True)


@pytest.mark.parametrize("shape", [{}, {"width": 16}, {"side": 20}, {"classes": 60}, {"pairs": True}], ids=str)
def test_lines_take_what_the_plan_says(shape: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than was said, and not far less: else an image would be refused that fits."""
    together = 2**16
    monkeypatch.setitem(relaxation.TOGETHER, "cpu", together)
    prover, run = proved(convolutional(**shape), shape.get("side", 12), 3)  # type: ignore[arg-type]
    prover.slope_steps = 0
    run()  # what is made once
    with Peak() as found:
        run()
    said = 3 * prover.plan.image(True) + 8 * WORKING * together
    assert found.peak <= said <= 4 * found.peak


def test_parts_follow_the_memory() -> None:
    """With little memory the parts are smaller, the peak keeps to it, and the bounds stay what they are."""
    prover, run = proved(convolutional(), 12, 2)
    whole = run()
    least = 2 * prover.plan.image(True) + 40 * prover.plan.row
    tight, again = proved(convolutional(), 12, 2, replace(prover.plan, given=least / 0.8))
    with Peak() as found:
        part = again()
    assert found.peak <= least / 0.8
    assert torch.allclose(part.worst, whole.worst, rtol=1e-2, atol=1e-2)
    assert tight.plan.numbers(2**27, 2) < 2**27


def test_what_does_not_fit_is_said_beforehand_and_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a crash nor a certificate: lines are left out of "auto", and "lines" alone decides nothing."""
    model, x = convolutional(), torch.rand(2, 3, 12, 12)
    need = plan_of(ll.lower(model, (3, 12, 12)), CPU).image(True)
    y = model(x).argmax(1)
    local = ll.certify(model, x, y, 0.02, method="local", attack_steps=0, seed=0)
    monkeypatch.setattr("locallip.bounds.plan.free_bytes", lambda device: 0.9 * need)
    for method, same in (("lines", False), ("auto", True)):
        with pytest.warns(TooLittleMemory, match=r"linear relaxation takes .* MB for one image .* more memory"):
            found = ll.certify(model, x, y, 0.02, method=method, attack_steps=0, seed=0)  # type: ignore[arg-type]
        if same:
            assert found.verdicts == local.verdicts
        assert same or set(found.decided_by) <= {"global bound", "nothing"}


def test_batches_are_as_large_as_fits() -> None:
    plan = MemoryPlan(CPU, units=1000, largest=400, given=1e9)
    assert plan.images(64, lines=True) == 64
    few = replace(plan, given=20 * plan.image(True) / 0.8)
    assert few.images(64, lines=True) == 10
    assert replace(plan, given=plan.image(True)).images(64, lines=True) == 0
    assert plan.numbers(2**20, 4) == 2**20
    assert few.numbers(2**20, 4) * 8 * WORKING <= 16 * plan.image(True)


def test_free_memory_heeds_the_groups_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest limit on the way up counts, of version 2 or version 1."""
    for number, name in (("0", ""), ("7", "memory")):
        own, base = tmp_path / f"own{number}", tmp_path / number / name
        inner = base / "a" / "b"
        inner.mkdir(parents=True)
        own.write_text(f"{number}:{name}:/a/b\n")
        files = ("memory.max", "memory.current") if number == "0" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for folder, most, used in ((inner, "max", "10"), (base / "a", "5000", "1000")):
            (folder / files[0]).write_text(f"{most}\n")
            (folder / files[1]).write_text(f"{used}\n")
        monkeypatch.setattr(room, "_OWN", own)
        monkeypatch.setattr(room, "_GROUPS", tmp_path / number)
        assert room.free_bytes(CPU) == 4000
    monkeypatch.setattr(room, "_OWN", tmp_path / "missing")
    assert room.free_bytes(CPU) > 1e6
