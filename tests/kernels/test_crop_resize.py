"""Images cropped and resized by the kernel, against the reference.

That it resizes as Pillow does is tested with the GPU's decoder (tests/data/loading).
"""

import os
from importlib import import_module

import numpy as np
import pytest
import torch

from phalanx.kernels.crop_resize import crop_and_resize

SIZE = 24
BOXES = {  # of images of height x width: top, left, height, width
    (60, 80): (0, 0, 60, 80),
    (75, 50): (0.4, 11.7, 63.3, 30.25),
    (32, 32): (10, 20, 9, 7),  # is enlarged
    (20, 90): (3.5, 2.25, 16, 85),  # only its width shrinks
    (1, 1): (0, 0, 1, 1),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, where a GPU says nothing
def test_the_kernel_cuts_as_the_reference_does():
    draws = np.random.default_rng(0)
    images = [torch.from_numpy(draws.integers(0, 256, (3, *sides), np.uint8)) for sides in BOXES]
    images[1] = images[1].permute(1, 2, 0).contiguous().permute(2, 0, 1)  # as the decoder gives it
    boxes, flips = list(BOXES.values()), [row % 2 == 0 for row in range(len(BOXES))]
    wanted = crop_and_resize(images, boxes, flips, size=SIZE)
    kernel = import_module("phalanx.kernels.crop_resize_fused").crop_and_resize_fused
    starts, lengths = np.split(np.array(boxes), 2, axis=1)
    table = np.concatenate([starts, lengths / SIZE, np.array(flips)[:, None]], 1, dtype=np.float32)
    found = kernel(images, table, SIZE)
    assert found.shape == wanted.shape and found.dtype == torch.uint8
    assert (found.int() - wanted.int()).abs().max() <= 1
