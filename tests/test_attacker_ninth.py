"""A ninth round of attempts: rows of several machines, hidden files of other runs, numbers that no digest sees, odd maps."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locallip as ll
from locallip import cli
from locallip.certify import Certifier, RadiusFinder
from locallip.certify.prover import fingerprint
from locallip.data import ImageSet, load_images
from locallip.network import lower
from locallip.norms import CholeskyNorm, Guarantee, LanczosNorm, NormKey
from locallip.ops import Masked
from locallip.proofs import Job, Row, WrongRows, certify_images, read_rows
from locallip.proofs.rows import replace_rows
from locallip.proofs.settings import mark_of, read_about
from locallip.proofs.shared import own_file, own_files
from locallip.zoo import load_model

DOUBLE = torch.float64
COUNT = 6
USUAL = ["--data", "embedded", "--attack-steps", "0", "--guarantee", "deterministic", "--device", "cpu"]


def constant(folder: Path, winner: int) -> Path:
    """A stored network without weights: its logits are its last bias, so that `winner` wins everywhere, without rounding."""
    folder.mkdir()
    model = ll.build_model("small", (1, 28, 28), 10, "relu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model[-1].bias[winner] = 1.0  # type: ignore[index]
    about = {"architecture": "small", "activation": "relu", "input_shape": [1, 28, 28], "classes": 10}
    ll.save_model(folder / "net.safetensors", model, about)
    return folder / "net.safetensors"


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Class 0 wins everywhere in the first, class 1 in the second; both are called the same."""
    folder = tmp_path_factory.mktemp("networks")
    return constant(folder / "first", 0), constant(folder / "second", 1)


def assert_about(out: Path, model: Path) -> None:
    """Rows and settings are of this network alone, whose prediction is the same everywhere, and no row is missing."""
    rows, (settings, _) = read_rows(out), read_about(out)
    assert settings.fingerprint == fingerprint(load_model(model))
    assert [row.index for row in rows] == list(range(settings.images))
    assert {row.eps for row in rows} == {settings.radius}
    winner = int(load_model(model)[-1].bias.argmax())  # type: ignore[index]
    assert {row.prediction for row in rows} == {winner}
    assert {row.label for row in rows if row.verdict == "CERTIFIED"} == {winner}


# Several machines -------------------------------------------------------------------------------------------------------

#: How the command of the second of two machines differs from that of the first.
RUNS: dict[str, list[str]] = {"weights": [], "limit": ["--limit", "2"], "eps": ["--eps", "1/2"]}
DRIVER = """
import json, os, sys
from locallip import cli
for port, args in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = port
    cli.main(args)
os._exit(0)
"""


def free_port() -> str:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return str(place.getsockname()[1])


@pytest.fixture(scope="module")
def machines(networks: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of RUNS, with the variables that `torchrun --nnodes 2` sets; net.safetensors is each machine's own file.

    In "weights" the second machine has other weights under that name: a copy that was not renewed.
    """
    out = tmp_path_factory.mktemp("machines")
    ports = {name: free_port() for name in RUNS}
    started = []
    for rank in (0, 1):
        asked = []
        for name, other in RUNS.items():
            model = networks[rank if name == "weights" else 0]
            args = ["certify", str(model), *USUAL, "--limit", "6", "--chunk", "1", "--eps", "1", *(other if rank else [])]
            asked.append((ports[name], [*args, "--out", str(out / f"{name}.jsonl")]))
        where = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        where |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", DRIVER, json.dumps(asked)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env={**os.environ, **where}, **quiet))  # type: ignore[call-overload]
    for process in started:
        try:
            process.wait(120)
        finally:
            process.kill()
    return out


@pytest.mark.parametrize("name", RUNS)
def test_machines_certify_the_same_network(networks: tuple[Path, Path], machines: Path, name: str) -> None:
    """Rows of the second machine stand under the settings of the first, and nobody asks whether they are about the same.

    Deterministic rows said CERTIFIED for class 1 under the fingerprint of a network in which class 0 wins everywhere.
    Refusing to run is as good. Catches: weights of one process alone in the settings; another --limit, which leaves gaps;
    a smaller --eps, whose rows count as certified at the larger one.
    """
    if (machines / f"{name}.jsonl").exists():
        assert_about(machines / f"{name}.jsonl", networks[0])


# Hidden files of other runs ---------------------------------------------------------------------------------------------


def certify(model: Path, out: Path, *more: str) -> int:
    asked = ["--limit", str(COUNT), "--chunk", "2", "--eps", "1", "--out", str(out)]
    return cli.main(["certify", str(model), *USUAL, *asked, *more])


@pytest.fixture(scope="module")
def rows_of_first(networks: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("first") / "whole.jsonl"
    assert certify(networks[0], out) == 0
    return out


#: The rows that processes of the first network's run were to write, those of the second's, and those it goes on with.
NAMES = {
    "another ending": ("rows.jsonl", "rows.csv", "rows.jsonl"),
    "a pattern": ("rows1.jsonl", "rows[1].jsonl", "rows[1].jsonl"),
    "a longer name": ("rows.process-old.jsonl", "rows.jsonl", "rows.jsonl"),
}


@pytest.mark.parametrize("name", NAMES)
def test_hidden_rows_of_another_network_stay_out(
    networks: tuple[Path, Path], rows_of_first: Path, tmp_path: Path, name: str
) -> None:
    """Two processes were stopped at the first network and have left a hidden file. Another run, of the second network,
    was stopped before its first rows were in --out, which with several processes is until the end, and goes on.

    It took the rows of the first network for its own: class 0 was CERTIFIED where class 1 wins everywhere.
    Catches: hidden files that are known by a pattern of their names alone, and settings of two files in one .json.
    """
    theirs, ours, again = (tmp_path / name for name in NAMES[name])
    if ours != again:  # the visible files of the first run were removed
        shutil.copy(rows_of_first, own_file(theirs, 1, mark_of(read_about(rows_of_first)[0])))
    assert certify(networks[1], ours) == 0
    ours.unlink()
    if ours == again:
        shutil.copy(rows_of_first, own_file(theirs, 1, mark_of(read_about(rows_of_first)[0])))
    if certify(networks[1], again, "--resume") == 0:
        assert_about(again, networks[1])


def test_rows_whose_settings_were_removed_get_no_others(networks: tuple[Path, Path], tmp_path: Path) -> None:
    """rows.json of the first network is removed, rows.csv of the second made, and rows.jsonl gone on with: all its rows are
    about the first network, and its settings about the second. Catches: a new run beside rows of the other ending.
    """
    assert certify(networks[0], tmp_path / "rows.jsonl") == 0
    (tmp_path / "rows.json").unlink()
    if certify(networks[1], tmp_path / "rows.csv") == 0 and certify(networks[1], tmp_path / "rows.jsonl", "--resume") == 0:
        assert_about(tmp_path / "rows.jsonl", networks[1])


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return load_images("embedded", "test")


def settled(rows: list[Row]) -> list[Row]:
    return [dataclasses.replace(row, seconds=0.0) for row in rows]


def test_no_gap_and_no_double_where_chunks_change(networks: tuple[Path, Path], images: ImageSet, tmp_path: Path) -> None:
    """Stopped anywhere with any chunks, rows in --out and in hidden files that overlap, gone on with other chunks.

    Catches: chunks of one size that are matched with those of another, rows that are there twice or not at all.
    """
    model = load_model(networks[0])
    usual = Job("net", "1", Guarantee.DETERMINISTIC, limit=COUNT, batch_size=2, seed=1, attack_steps=0)
    whole, _, _ = certify_images(dataclasses.replace(usual, chunk=3), model, images)
    draw = random.Random(0)
    for number in range(3):
        out = tmp_path / f"{number}.jsonl"
        job = dataclasses.replace(usual, out=out, chunk=draw.randint(1, 7))
        certify_images(job, model, images)
        replace_rows(out, whole[: draw.randint(0, COUNT)])
        for rank in range(3):
            replace_rows(own_file(out, rank, mark_of(read_about(out)[0])), draw.sample(whole, draw.randint(0, COUNT)))
        rows, _, summary = certify_images(dataclasses.replace(job, chunk=draw.randint(1, 13), resume=True), model, images)
        assert settled(rows) == settled(read_rows(out)) == settled(whole)
        assert summary["images"] == COUNT
        assert not own_files(out)


OTHER: dict[str, Any] = {
    "eps": "2",
    "guarantee": Guarantee.HIGH_PROBABILITY,
    "limit": 1,
    "seed": 2,
    "method": "local",
    "deployed_dtype": "float32",
    "radii": True,
    "attack_steps": 1,
    "model_name": "other",
}


def test_hidden_rows_do_not_outlive_a_change_of_settings(
    networks: tuple[Path, Path], images: ImageSet, tmp_path: Path
) -> None:
    """Nothing but settings and hidden rows are there, as when several processes were stopped: one setting after the other is
    changed, then the weights; each is refused, and the hidden rows are left for the run that they are of.

    Catches: settings that are compared only where there are rows in --out.
    """
    model, out = load_model(networks[0]), tmp_path / "rows.jsonl"
    job = Job("net", "1", Guarantee.DETERMINISTIC, limit=2, batch_size=2, seed=1, attack_steps=0, out=out, chunk=2)
    rows, settings, _ = certify_images(job, model, images)
    out.unlink()
    hidden = own_file(out, 1, mark_of(settings))
    replace_rows(hidden, rows)
    for name, value in OTHER.items():
        with pytest.raises(WrongRows, match="another run"):
            certify_images(dataclasses.replace(job, resume=True, **{name: value}), model, images)
    with pytest.raises(WrongRows, match="fingerprint"):
        certify_images(dataclasses.replace(job, resume=True), load_model(networks[1]), images)
    assert read_rows(hidden) == rows
    again, _, _ = certify_images(dataclasses.replace(job, resume=True), model, images)
    assert again == rows


# Numbers that no digest sees --------------------------------------------------------------------------------------------


class Cancelling(nn.Module):
    """Two layers that read the same memory, one of them through torch's negative bit, as -Im(c) is read from conj(c)."""

    def __init__(self, c: Tensor):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.one.weight, self.two.weight = (nn.Parameter(w, requires_grad=False) for w in (c.imag, c.conj().imag))
        self.head.weight = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        self.head.bias = nn.Parameter(torch.tensor([0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.one(x) + self.two(x)))


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
def test_a_negative_view_is_another_tensor(kind: Any) -> None:
    """One layer is -1 times the other, and later the same: its memory, shape and strides are those from before.

    Norms of 0, where the layers cancel, met the sum 2 x: 10 was certified as class 0 within 11, and 0 is class 1.
    Catches: digests that are kept by place, shape and strides alone.
    """
    c = torch.eye(2) * 1j
    model, x, label = Cancelling(c).eval(), torch.tensor([[10.0, 0.0]]), torch.tensor([0])
    worker = kind(model, (2,))
    model.two.weight = nn.Parameter(c.imag, requires_grad=False)
    assert int(model(0 * x).argmax()) == 1  # 0 against 1, without rounding
    try:
        found = worker(x, label, 11.0).certified if kind is Certifier else worker(x, label) >= 10
    except RuntimeError:
        return
    assert not found.any()


def test_one_number_with_the_negative_bit() -> None:
    """No proof is wrong, but "view is not supported for tensors with negative bit set" comes from inside torch."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False))
    model[0].weight = nn.Parameter(torch.tensor([[2j], [1j]]).conj().imag[:1].expand(2, 1)[:1], requires_grad=False)
    fingerprint(model)


def behind(activation: nn.Module) -> nn.Sequential:
    """Class 1 has the logit 2, class 0 has -activation(x)."""
    first, last = nn.Linear(1, 1, bias=False, dtype=DOUBLE), nn.Linear(1, 2, dtype=DOUBLE)
    with torch.no_grad():
        first.weight.fill_(1.0)
        last.weight.copy_(torch.tensor([[-1.0], [0.0]]))
        last.bias.copy_(torch.tensor([0.0, 2.0]))
    return nn.Sequential(first, activation, last).eval()


NUMPY: dict[str, tuple[nn.Module, str, Any]] = {
    "slope": (nn.LeakyReLU(np.float32(0.125)), "negative_slope", np.float32(16)),  # type: ignore[arg-type]
    "whole slope": (nn.LeakyReLU(np.int64(0)), "negative_slope", np.int64(16)),  # type: ignore[arg-type]
    "alpha": (nn.ELU(np.float32(0.125)), "alpha", np.float32(16)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", [Certifier, RadiusFinder])
@pytest.mark.parametrize("name", NUMPY)
def test_settings_that_are_numbers_of_numpy_count(kind: Any, name: str) -> None:
    """A slope of 1/8 becomes 16, as a number of numpy: the worker goes on with 1/8, and -1 is inside its deterministic
    radius, where class 0 has 16 against 2 (and 10.1 behind an ELU).

    Catches: `described` and `_settings_of`, which read the settings of layers where they are Python's numbers.
    """
    activation, setting, other = NUMPY[name]
    before = getattr(activation, setting)
    model, zero, label = behind(activation), torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1])
    try:
        worker = kind(model, (1,), guarantee="deterministic")
        setattr(activation, setting, other)
        assert float(model(zero - 1)[0, 0].detach()) > 10
        try:
            found = worker(zero, label, 1.0).certified if kind is Certifier else worker(zero, label) >= 1
        except RuntimeError:
            return
        assert not found.any()
    finally:
        setattr(activation, setting, before)


@pytest.mark.parametrize("eps", [torch.tensor([2**53 + 1]), np.int64(2**53 + 1), np.array([2**53 + 1])], ids=repr)
def test_a_whole_radius_is_not_rounded_down(eps: Any) -> None:
    """2^53 + 1 is no float64. The proof has room for that rounding; the certificate names a radius below that asked for."""
    found = ll.certify(behind(nn.ReLU()), torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([1]), eps)
    assert int(found.eps) >= 2**53 + 1


# Odd maps ---------------------------------------------------------------------------------------------------------------


def odd_map(draw: random.Random) -> tuple[nn.Sequential, list[int]]:
    """A convolution in 1, 2 or 3 dimensions, perhaps with another behind it: one pixel, strides beyond the kernel, padding
    beyond it, dilation, groups."""
    dims, groups = draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 3])
    kind = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]

    def each(*values: int) -> Any:
        return [draw.choice(values) for _ in range(dims)]

    channels, out = groups * draw.choice([1, 2]), groups * draw.choice([1, 2, 3])
    layers: list[nn.Module] = [kind(channels, out, each(1, 2, 3), each(1, 1, 2, 4), each(0, 0, 1, 4), each(1, 1, 3), groups)]
    layers += [kind(out, draw.choice([1, 2]), 1)] if draw.random() < 0.3 else []
    return nn.Sequential(*layers).to(DOUBLE).requires_grad_(False), [channels, *each(1, 2, 3, 5)]


def test_norms_of_odd_maps_in_all_dimensions() -> None:
    """Against singular values, whole and in blocks, with masks that leave nothing, something or everything, and weights.

    Catches: blocks over the wrong dimension, rows that are taken for disjoint, masks without any unit.
    """
    draw, tried, like = random.Random(3), 0, torch.ones(1, dtype=DOUBLE)
    torch.manual_seed(3)
    while tried < 30:
        model, shape = odd_map(draw)
        for layer in model:
            layer.bias.zero_()  # type: ignore[union-attr, operator]
            layer.weight.mul_(10.0 ** draw.choice([-20, 0, 0, 20]))  # type: ignore[union-attr, operator]
        try:
            op = lower(model, shape).stages[-1].terms[0]
        except ValueError:  # the image is smaller than the kernel
            continue
        if op.in_shape.numel() * op.out_shape.numel() > 20_000:
            continue
        unit = torch.eye(op.in_shape.numel(), dtype=DOUBLE).reshape(-1, *op.in_shape)
        matrix = model(unit).flatten(1).T
        rows, cols = (torch.rand(3, *side) < draw.choice([0.0, 0.2, 1.0]) for side in (op.out_shape, op.in_shape))
        weights = rows * torch.rand_like(rows, dtype=DOUBLE)
        weights[0] = 0
        masked = Masked(op, weights, cols)
        true = torch.linalg.matrix_norm(weights.flatten(1)[:, :, None] * matrix * cols.flatten(1)[:, None], 2)
        for rule in (CholeskyNorm(), CholeskyNorm(whole=0), LanczosNorm(1e-9, seed=tried)):
            assert (rule(masked, NormKey(0, 0, "odd"), like) >= true * (1 - 1e-13)).all(), (model, shape)
        tried += 1


@pytest.mark.parametrize(
    "activation", [nn.LeakyReLU(1e39), nn.ELU(1e39), nn.Softplus(1e39), nn.Hardtanh(-1e39, 1e39)], ids=repr
)
def test_settings_that_float32_cannot_hold(activation: nn.Module) -> None:
    """A slope of 1e39 times -1e-38 is -10, and infinite in float32: nothing is certified for a program without a value.

    Catches: `deployed_error` that looks for overflow in weights and values alone, should torch ever take such settings.
    """
    x = torch.full((1, 1), -1e-38)
    with pytest.raises(ValueError, match="cannot be converted"):
        ll.certify(behind(activation).float(), x, torch.tensor([1]), 1e-40, deployed_dtype="float32")
