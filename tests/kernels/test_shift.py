"""Images of a set on the device, shifted and mirrored."""

import os
from importlib import import_module

import numpy as np
import pytest
import torch

from phalanx.kernels.shift import shift_batch, shift_reference

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def a_set(shape):
    return np.random.default_rng(0).integers(1, 256, shape, np.uint8)


def some_crops(images, count=40):
    draws = np.random.default_rng(1)
    shifts = draws.integers(-4, 5, (2, count))
    shifts[:, :3] = [[-4, 4, 0], [4, -4, 0]]  # both corners, and no shift at all
    return np.stack([draws.integers(0, images, count), *shifts, draws.integers(0, 2, count)])


def by_hand(images, crops, mode):
    """The definition, image by image."""
    shown = np.zeros((crops.shape[1], *images.shape[1:3], 3), np.uint8)
    height, width = images.shape[1:3]
    for out, (index, top, left, mirrored) in zip(shown, crops.T, strict=True):
        image = images[index] if images.ndim == 4 else np.repeat(images[index][..., None], 3, 2)
        padded = np.pad(image[:, ::-1] if mirrored else image, ((4, 4), (4, 4), (0, 0)), mode)
        out[:] = padded[4 + top : 4 + top + height, 4 + left : 4 + left + width]
    return shown


SHAPES = {"grey": (9, 12, 12), "colour": (9, 12, 12, 3), "oblong": (9, 50, 70, 3)}


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_images_are_shifted_and_mirrored_as_told(shape, mode):
    images = a_set(shape)
    crops = some_crops(len(images))
    reflects = mode == "reflect"
    shown = shift_batch(torch.from_numpy(images), torch.from_numpy(crops), reflects=reflects)
    assert np.array_equal(shown.numpy(), by_hand(images, crops, mode))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("reflects", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_gives_the_same_bytes(shape, reflects):
    kernel = import_module("phalanx.kernels.shift_fused").shift_fused
    images = torch.from_numpy(a_set(shape))
    part = torch.from_numpy(some_crops(len(images)))[:, :9]
    found = kernel(images, part, reflects=reflects)
    assert torch.equal(found, shift_reference(images, part, reflects=reflects))


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("reflects", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_gpu_gives_the_same_bytes(shape, reflects):
    pytest.importorskip("triton")
    images = torch.from_numpy(a_set(shape))
    whole = torch.from_numpy(some_crops(len(images))).int()
    part = whole.cuda()[:, 3:33]  # of a longer table, as it comes
    found = shift_batch(images.cuda(), part, reflects=reflects).cpu()
    assert torch.equal(found, shift_reference(images, whole[:, 3:33], reflects=reflects))
