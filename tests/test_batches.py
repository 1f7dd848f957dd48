"""Batches: which samples come when, how they are cropped and mirrored, and that all of it follows from seed and epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locallip.training.batches import Epoch, Images, margin_of, steps_per_epoch
from locallip.training.recipe import Recipe, WrongRecipe

CPU = torch.device("cpu")
AUGMENTS = ("none", "crop", "crop_flip")


def recipe(**fields):
    base = {"name": "t", "data": "embedded", "architecture": "small", "method": "local-b", "eps": "0.5", "eps_train": 0.6}
    return Recipe(**{**base, "epochs": 1.0, "batch": 16, **fields})


def some_images(count=50, channels=3, height=16, width=24, seed=0):
    """No pixel is 0, so that a margin can be told from an image; labels are the samples' numbers modulo 7."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(1, 256, (count, channels, height, width), dtype=torch.uint8, generator=draw)
    return images, torch.arange(count) % 7


def a_whole_epoch(r, images, labels, epoch=0, *, resident=True):
    margin = margin_of(r, images.shape[2])
    held = Images(images, labels, margin, CPU, resident=resident)
    return list(Epoch(len(labels), r, margin, epoch).batches(held))


def cropped(image, margin, top, left, mirrored):
    """The slow oracle: pad with zeros, cut out, mirror."""
    _, height, width = image.shape
    wide = np.pad(image, ((0, 0), (margin, margin), (margin, margin)))
    window = wide[:, top : top + height, left : left + width]
    return (window[:, :, ::-1] if mirrored else window).astype(np.float32) / np.float32(255)


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_every_sample_once_an_epoch_and_a_last_batch_filled_without_doubles(count, batch, seed, epoch):
    r = recipe(batch=batch, seed=seed, augment="crop_flip")
    order = Epoch(count, r, 1, epoch)
    batches = order.order.split(order.batch)
    assert len(batches) == len(order) == steps_per_epoch(count, batch)
    assert sorted(order.order[:count].tolist()) == list(range(count))
    assert all(len(b) == min(batch, count) == len(set(b.tolist())) for b in batches)
    assert len(order.shifts) == len(order.order)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_the_same_seed_and_epoch_give_the_same_batches(augment):
    images, labels = some_images()
    r = recipe(augment=augment, seed=3)
    first, second = (a_whole_epoch(r, images, labels, 5) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.index, b.index)


def test_draws_do_not_depend_on_the_state_of_torch():
    torch.manual_seed(1)
    one = Epoch(50, recipe(augment="crop_flip"), 2, 0)
    torch.manual_seed(2)
    other = Epoch(50, recipe(augment="crop_flip"), 2, 0)
    assert torch.equal(one.order, other.order)
    assert torch.equal(one.shifts, other.shifts)


def test_another_epoch_and_another_seed_give_another_order_and_other_crops():
    base = Epoch(200, recipe(augment="crop_flip"), 2, 0)
    for other in (Epoch(200, recipe(augment="crop_flip"), 2, 1), Epoch(200, recipe(augment="crop_flip", seed=1), 2, 0)):
        assert not torch.equal(base.order, other.order)
        assert not torch.equal(base.shifts, other.shifts)


def test_seeds_next_to_each_other_share_no_epoch_of_a_long_run():
    """Epoch 1 of seed 0 must not be epoch 0 of seed 1."""
    epochs = {seed: [Epoch(40, recipe(seed=seed), 0, e).order for e in range(12)] for seed in (0, 1)}
    assert not any(torch.equal(a, b) for a in epochs[0] for b in epochs[1])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", AUGMENTS)
def test_pixels_are_those_of_a_slow_crop_and_mirror(augment, channels):
    images, labels = some_images(channels=channels)
    r = recipe(augment=augment)
    margin = margin_of(r, 16)
    order = Epoch(len(labels), r, margin, 2)
    shifts = order.shifts.split(order.batch)
    for batch, shift in zip(a_whole_epoch(r, images, labels, 2), shifts, strict=True):
        for x, number, (top, left, mirrored) in zip(batch.x, batch.index.tolist(), shift.tolist(), strict=True):
            expected = cropped(images[number].numpy(), margin, top, left, mirrored)
            np.testing.assert_array_equal(x.numpy(), expected)


def test_without_augmentation_a_batch_is_the_image_divided_by_255():
    images, labels = some_images()
    for batch in a_whole_epoch(recipe(), images, labels):
        assert batch.x.dtype == torch.float32
        assert torch.equal(batch.x, images[batch.index].float() / 255)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_what_is_drawn_covers_all_places_and_both_mirror_images_and_no_more(augment):
    r = recipe(augment=augment)
    margin = margin_of(r, 16)
    shifts = Epoch(4000, r, margin, 0).shifts
    places = set(range(2 * margin + 1))
    assert set(shifts[:, 0].tolist()) == places
    assert set(shifts[:, 1].tolist()) == places
    assert set(shifts[:, 2].tolist()) == ({0, 1} if augment == "crop_flip" else {0})


@pytest.mark.parametrize(("height", "margin"), [(32, 4), (28, 3), (64, 8), (7, 0)])
def test_the_margin_is_an_eighth_of_the_height(height, margin):
    assert margin_of(recipe(augment="crop"), height) == margin_of(recipe(augment="crop_flip"), height) == margin
    assert margin_of(recipe(), height) == 0


def test_a_recipe_may_name_the_margin():
    images, labels = some_images()
    r = recipe(augment="crop", crop_margin=1)
    assert margin_of(r, 32) == 1
    with pytest.raises(WrongRecipe, match="crop_margin = 16: the images are 16 pixels high"):
        margin_of(recipe(augment="crop", crop_margin=16), 16)
    empty_rows = {
        tuple((batch.x[i] == 0).all(2).all(0).nonzero().flatten().tolist())
        for batch in a_whole_epoch(r, images, labels)
        for i in range(len(batch.x))
    }
    assert empty_rows == {(), (0,), (15,)}  # none, the first or the last of 16


@pytest.mark.parametrize("augment", AUGMENTS)
def test_index_and_label_are_those_of_the_sample(augment):
    images, labels = some_images()
    # A mark that no crop moves by more than 2 pixels.
    images[:, :, 8, 12] = torch.arange(50, dtype=torch.uint8)[:, None] + 100
    for batch in a_whole_epoch(recipe(augment=augment), images, labels):
        assert torch.equal(batch.y, labels[batch.index])
        marks = (batch.index + 100).float() / 255
        near = batch.x[:, 0, 6:11, 9:15].flatten(1)
        assert (near == marks[:, None]).any(1).all()


@pytest.mark.parametrize("augment", AUGMENTS)
def test_streamed_batches_equal_resident_ones(augment):
    images, labels = some_images()
    r = recipe(augment=augment)
    for a, b in zip(a_whole_epoch(r, images, labels), a_whole_epoch(r, images, labels, resident=False), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.index, b.index)


def test_fewer_images_than_a_batch_make_one_batch_of_all():
    images, labels = some_images(5)
    (batch,) = a_whole_epoch(recipe(batch=16), images, labels)
    assert sorted(batch.index.tolist()) == [0, 1, 2, 3, 4]
    assert steps_per_epoch(5, 16) == 1


@pytest.mark.parametrize("first", [0, 1, 3, 4])
def test_an_epoch_can_be_entered_in_the_middle(first):
    images, labels = some_images()
    r = recipe(augment="crop_flip")
    margin = margin_of(r, 16)
    rest = list(Epoch(50, r, margin, 0).batches(Images(images, labels, margin, CPU), first))
    whole = a_whole_epoch(r, images, labels)
    assert len(rest) == 4 - first
    for a, b in zip(whole[first:], rest, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.index, b.index)


def test_the_images_given_are_left_alone():
    images, labels = some_images()
    kept = images.clone()
    for batch in a_whole_epoch(recipe(augment="crop_flip"), images, labels):
        batch.x.zero_()
        batch.y.zero_()
    assert torch.equal(images, kept)
    assert torch.equal(labels, torch.arange(50) % 7)
