"""The plan of what lives where: as many bits as fit, the device before the host, and a word on what would help."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from locallip.costs import IMAGENET, size_of
from locallip.data import ImageSet, load_images
from locallip.models import build_model
from locallip.norms import WarmStarts
from locallip.norms.rows import Rows
from locallip.training import memory
from locallip.training.engine import Engine
from locallip.training.memory import DTYPES, STEP_BYTES_PER_UNIT, Need, Plan, fitting, needed, plan_memory
from locallip.training.recipe import Recipe, WrongRecipe, find

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GB = 10**9
NEED = Need({"float32": 40 * GB, "bfloat16": 20 * GB, "int8": 10 * GB, "int4": 5 * GB}, 2 * GB, GB)
RECIPE = dataclasses.replace(find("demo"), name="plan")


@pytest.mark.parametrize(
    ("free", "host", "vectors", "home", "numbers", "resident"),
    [
        (30, 0, "auto", "cuda", "bfloat16", True),
        (20, 0, "auto", "cuda", "int8", True),
        (10, 0, "auto", "cuda", "int4", True),
        (6, 30, "auto", "cpu", "int8", True),
        (6, 9, "auto", "cpu", "int4", True),
        (2.5, 30, "auto", "cpu", "int8", False),
        (30, 0, "int4", "cuda", "int4", True),
        (6, 30, "bfloat16", "cpu", "bfloat16", True),
    ],
)
def test_first_that_fits(free, host, vectors, home, numbers, resident) -> None:
    plan = fitting(dataclasses.replace(RECIPE, vectors=vectors), NEED, CUDA, free * GB, host * GB)
    assert (plan.home.type, plan.numbers, plan.resident) == (home, numbers, resident)
    assert f"{NEED.starts[numbers] / GB:.2f} GB of saved vectors ({numbers})" in str(plan)
    assert ("on the device, about" in str(plan)) == (home == "cuda")
    assert ("pinned host memory" in str(plan)) == (home == "cpu")
    assert ("streamed" in str(plan)) != resident


@pytest.mark.parametrize(
    ("free", "host", "home", "numbers", "pieces"),
    [
        (1, 99, "cpu", "int8", 4),  # a half would be a little too large
        (7.2, 0, "cuda", "int4", 4),
        (24, 0, "cuda", "int8", 1),  # fewer bits before pieces
        (6, 9, "cpu", "int4", 1),  # host memory before pieces
        (0.05, 99, "cpu", "int8", 64),
    ],
)
def test_a_batch_is_cut_into_pieces_that_fit(free, host, home, numbers, pieces) -> None:
    plan = fitting(RECIPE, NEED, CUDA, free * GB, host * GB)
    assert (plan.home.type, plan.numbers, plan.pieces) == (home, numbers, pieces)
    assert (f"{NEED.step / pieces / GB:.2f} GB for a step in {pieces} pieces" in str(plan)) == (pieces > 1)
    assert RECIPE.batch % plan.pieces == 0


def test_images_of_a_usual_size_fit_a_usual_gpu() -> None:
    """The bound of 8C2F for 224 x 224 pixels keeps hundreds of megabytes an image: a whole batch would need 49 gigabytes."""
    recipe = dataclasses.replace(find("tiny-imagenet-8c2f-local-b"), starts="random", power_steps=5)
    size = size_of("8c2f", IMAGENET[1])
    step = size.numbers * STEP_BYTES_PER_UNIT["bfloat16"] * recipe.batch
    assert step > 4e10
    plan = fitting(recipe, Need(dict.fromkeys(DTYPES, 0), step, 2 * GB), CUDA, 24e9, 64e9)
    assert (plan.home, plan.pieces) == (CUDA, 4)


@pytest.mark.parametrize(
    ("free", "host", "vectors", "words"),
    [
        (6, 4, "auto", ["5.00 GB", "starts = 'random'", "local_layers = 'dense'"]),
        (9, 4, "bfloat16", ["20.00 GB", "vectors = 'int4' fits"]),
        (0.01, 99, "auto", ["one image needs about 0.02 GB", "the network is too large"]),
    ],
)
def test_nothing_fits_and_what_would(free, host, vectors, words) -> None:
    with pytest.raises(WrongRecipe) as error:
        fitting(dataclasses.replace(RECIPE, vectors=vectors), NEED, CUDA, free * GB, host * GB)
    for word in words:
        assert word in str(error.value)


RUNS = sorted((Path(__file__).parent.parent / "results" / "runs").glob("*.json"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_what_runs_needed_is_at_most_what_was_planned_and_not_far_below(path: Path) -> None:
    """By the peak of the GPU's memory in every run whose result is kept."""
    run = json.loads(path.read_text())
    sizes = {
        "mnist": (60_000, (1, 28, 28), 10),
        "cifar10": (50_000, (3, 32, 32), 10),
        "tiny-imagenet": (100_000, (3, 64, 64), 200),
    }
    count, shape, classes = sizes[run["recipe"]["data"]]
    recipe = find(path.stem)
    need = needed(recipe, build_model(recipe.architecture, shape, classes, recipe.activation), of_size(count, shape))
    step = (run["training"]["peak_memory_gb"] - run["training"]["starts_gb"]) * 1e9 - need.images
    assert step < need.step < 5 * step


def of_size(count: int, shape: tuple[int, ...]) -> ImageSet:
    one = load_images("embedded", "test")
    return dataclasses.replace(
        one,
        images=torch.zeros(1, *shape, dtype=torch.uint8).expand(count, *shape),
        labels=torch.zeros(count, dtype=torch.long),
    )


def test_the_paper_s_network_on_tiny_imagenet_fits_one_gpu_in_eight_bits() -> None:
    """928,576 numbers an image beside those of the pixels: 186 GB in 16 bits, which no GPU has."""
    recipe = find("tiny-imagenet-8c2f-local-b")
    model = build_model(recipe.architecture, (3, 64, 64), 200, recipe.activation)
    need = needed(recipe, model, of_size(100_000, (3, 64, 64)))
    assert need.starts["bfloat16"] == pytest.approx(186e9, rel=0.01)
    assert fitting(recipe, need, CUDA, 140e9, 100e9).numbers == "int8"
    assert fitting(recipe, need, CUDA, 80e9, 100e9).numbers == "int4"
    far = fitting(recipe, need, CUDA, 40e9, 120e9)
    assert (far.home, far.numbers) == (CPU, "int8")


@pytest.mark.parametrize("vectors", ["auto", "bfloat16", "int8", "int4"])
def test_the_plan_counts_what_the_engine_keeps(vectors) -> None:
    recipe = Recipe(
        name="plan",
        data="embedded",
        architecture="small",
        activation="relu_theta",
        method="local-b",
        eps="0.5",
        eps_train=0.5,
        epochs=1,
        batch=4,
        vectors=vectors,
    )
    train = of_size(12, (1, 28, 28))
    model = build_model("small", (1, 28, 28), 10, "relu_theta")
    plan = plan_memory(recipe, model, train, CPU)
    assert plan == Plan(CPU, CPU, "float32" if vectors == "auto" else vectors, True, plan.need)
    engine = Engine(model, recipe, (1, 28, 28), 12, CPU, starts_on=plan.home, starts_in=plan.dtype)
    assert engine.starts is not None
    assert engine.starts.nbytes() == plan.need.starts[plan.numbers]


def test_methods_that_save_nothing_say_so() -> None:
    recipe = dataclasses.replace(RECIPE, starts="random", power_steps=5)
    plan = plan_memory(recipe, build_model("small", (1, 28, 28), 10, "relu_theta"), of_size(12, (1, 28, 28)), CPU)
    assert "no saved vectors, about" in str(plan)
    with pytest.raises(WrongRecipe, match="nothing is saved"):
        dataclasses.replace(recipe, vectors="int8")


@pytest.mark.parametrize("before", DTYPES.values())
@pytest.mark.parametrize("now", DTYPES.values())
def test_saved_vectors_are_read_whatever_they_were_kept_as(before, now) -> None:
    """A run may go on with another plan than it began with."""
    place, shape = (0, 0), torch.Size((3, 4, 5))
    u = torch.nn.functional.normalize(torch.randn(300, 60, generator=torch.Generator().manual_seed(0)), dim=1)
    layout = Rows(before, channels_last=True)
    starts = WarmStarts(300, now, channels_last=True)
    starts.prepare({place: shape})
    starts.load(place, layout.lay(u.view(300, *shape)))
    read = starts.layout.vectors(starts.rows[place], shape).float()
    far = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.int8: 0.015, torch.uint8: 0.25}
    assert (read - u.view(300, *shape)).flatten(1).norm(dim=1).max() < far[before] + far[now]


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("last", [True, False])
def test_saved_vectors_are_read_on_a_device_that_lays_them_out_otherwise(before, last) -> None:
    """A run on a GPU goes on on a CPU, and the other way round."""
    place, shape = (0, 0), torch.Size((3, 4, 5))
    u = torch.nn.functional.normalize(torch.randn(30, 60, generator=torch.Generator().manual_seed(0)), dim=1)
    starts = WarmStarts(30, torch.float32, channels_last=not last)
    starts.prepare({place: shape})
    starts.load(place, Rows(before, channels_last=last).lay(u.view(30, *shape)), last)
    read = starts.layout.vectors(starts.rows[place], shape)
    assert (read - u.view(30, *shape)).flatten(1).norm(dim=1).max() < 0.25


@pytest.mark.parametrize(("room", "advice"), [(5e6, "vectors = 'int8' fits"), (3.2e6, "vectors = 'int4' fits"), (1e6, "")])
def test_a_cpu_without_room_for_the_vectors_is_refused_and_told_what_fits(room, advice, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: room)
    recipe = Recipe("t", "embedded", "small", "local-b", "0.5", 0.6, 1.0)
    train = ImageSet(
        "embedded", "train", torch.zeros(600, 1, 28, 28, dtype=torch.uint8), torch.zeros(600).long(), ("a", "b")
    )
    model = build_model("small", (1, 28, 28), 2, "relu_theta")
    with pytest.raises(WrongRecipe, match=rf"saved vectors need .* of memory: {advice}"):
        plan_memory(recipe, model, train, CPU)
    assert plan_memory(dataclasses.replace(recipe, starts="random", power_steps=5), model, train, CPU).numbers == "float32"
