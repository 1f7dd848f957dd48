"""The networks that come with the package: each loads by its name and certifies what its card says, again and on the CPU."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import locallip as ll
from locallip.data import ImageSet, load_images
from locallip.results import read_results
from locallip.training.recipe import find
from locallip.zoo import ModelCard, load_model, model_cards

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
COUNT = 100


@pytest.fixture(scope="session")
def test_images(tmp_path_factory: pytest.TempPathFactory):
    """The test images of a data set; MNIST's come with the package."""

    def load(data: str) -> ImageSet:
        if data == "mnist":
            return load_images("embedded", "test")
        if not (SHARED / "unpack.py").is_file():
            pytest.skip("the published files are not here")
        folder = tmp_path_factory.mktemp(data)
        if data == "tiny-imagenet":
            with tarfile.open(SHARED / data / "val.tar.xz") as packed_images:
                packed_images.extractall(folder, filter="data")
            return load_images(data, "test", folder)
        packed = folder / "packed"
        packed.mkdir()
        shutil.copy(SHARED / "cifar10" / "test_batch.medxz", packed)
        command = [sys.executable, SHARED / "unpack.py", folder, "cifar10", "--src", packed]
        subprocess.run(command, check=True, capture_output=True)
        return load_images("cifar10", "test", folder)

    return load


@pytest.mark.parametrize("card", model_cards(), ids=lambda card: card.name)
def test_a_network_has_the_figures_of_a_result_file(card: ModelCard) -> None:
    """Its card is the result of just these weights, if the folder of results is here."""
    if not (ROOT / "results" / "runs").is_dir():
        pytest.skip("the results are not here")
    (result,) = [found for found in read_results(ROOT / "results") if found.model["sha256"] == card.sha256]
    assert result.name == card.recipe
    assert result.evaluation == card.evaluation
    assert card.recipe in (card.name, f"fast-{card.name}")
    assert card.evaluation["images"] == 10_000


def data_of(card: ModelCard) -> str:
    return find(card.recipe).data


#: Networks of which a CPU certifies a hundred images in less than a minute; LOCALLIP_THOROUGH=1 has more of them.
QUICK = ["mnist-4c3f-local-g", "cifar10-4c3f-local-b"]
if os.environ.get("LOCALLIP_THOROUGH"):
    QUICK += ["cifar10-6c2f-local-b", "cifar10-6c2f-local-g", "cifar10-6c2f-maxmin-local-b", "mnist-4c3f-local-b"]
SMALL = [card for card in model_cards() if card.name in QUICK]


@pytest.mark.parametrize("card", [card for card in model_cards() if card not in SMALL], ids=lambda card: card.name)
def test_other_networks_are_right_where_their_cards_say(card: ModelCard, test_images) -> None:
    images = test_images(data_of(card))
    right = load_model(card.name)(images.images[:COUNT].float() / 255).argmax(1) == images.labels[:COUNT]
    assert abs(int(right.sum()) - card.evaluation["first"]["clean"]) <= 1


@pytest.mark.parametrize("card", SMALL, ids=lambda card: card.name)
def test_a_network_certifies_what_its_card_says(card: ModelCard, test_images) -> None:
    """100 images: as many as the card counts among them, or where it does not, its share of all within chance."""
    images = test_images(data_of(card))
    x, y = images.images[:COUNT].float() / 255, images.labels[:COUNT]
    model = load_model(card.name)
    # The figures of the cards are by the paper's bound.
    certificate = ll.certify(model, x, y, card.evaluation["eps"], attack_steps=20, seed=0, method="local")
    assert certificate.guarantee is ll.Guarantee.HIGH_PROBABILITY
    found = {"clean": int((model(x).argmax(1) == y).sum()), "certified": int(certificate.certified.sum())}
    for name, count in found.items():
        stated = card.evaluation.get("first", {}).get(name)
        if stated is not None:
            # Starts are others here and sums are rounded in another order: a margin near 0 may fall to the other side.
            assert abs(count - stated) <= 1, name
        else:
            share = card.evaluation[name] / 100
            assert abs(count - share * COUNT) <= 4 * math.sqrt(share * (1 - share) * COUNT), name


def test_a_network_is_certified_without_any_chance(test_images) -> None:
    """The deterministic proof of a network with four convolutions: the same verdicts as with high probability."""
    images = test_images("mnist")
    x, y = images.images[:12].float() / 255, images.labels[:12]
    model = load_model("mnist-4c3f-local-g")
    proved, likely = (
        ll.certify(model, x, y, "1.58", guarantee=guarantee, seed=0) for guarantee in ("deterministic", "high_probability")
    )
    assert proved.verdicts == likely.verdicts
    assert int(proved.certified.sum()) > 4
