"""Bytes become what the model sees, each way by its formula."""

import numpy as np
import pytest
import torch

from phalanx.data.loading.device import Normaliser, wait_for_copy

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), np.uint8)


def normalised(pixels, how) -> np.ndarray:
    normaliser = Normaliser(MEAN, STD, device=torch.device("cpu"), normalization=how)
    images = normaliser(pixels)
    assert images.shape == (len(pixels), 3, *pixels.shape[1:3])
    return images.permute(0, 2, 3, 1).double().numpy()


def test_by_mean_and_std():
    expected = (PIXELS / 255 - MEAN) / STD
    assert np.allclose(normalised(PIXELS, "mean-std"), expected, atol=1e-5)


def test_by_mean_alone_values_keep_their_size():
    expected = PIXELS - 255 * np.array(MEAN)
    assert np.allclose(normalised(PIXELS, "mean"), expected, atol=1e-4)


def test_each_image_by_itself():
    found = normalised(PIXELS, "per-image")
    for image, result in zip(PIXELS.astype(float), found, strict=True):
        assert np.allclose(result, (image - image.mean()) / image.std(), atol=1e-5)


def test_a_plain_image_does_not_blow_up():
    plain = np.full((1, 4, 4, 3), 7, np.uint8)
    assert (normalised(plain, "per-image") == 0).all()
    plain[0, 0, 0, 0] = 8
    spread = max(plain.std(), 48**-0.5)
    assert normalised(plain, "per-image").max() == pytest.approx((8 - plain.mean()) / spread)


@pytest.mark.parametrize("how", ["mean-std", "mean", "per-image", "none"])
def test_the_place_and_what_travels_change_no_value(how):
    usual = Normaliser(MEAN, STD, device=torch.device("cpu"), normalization=how)
    floats = Normaliser(MEAN, STD, device=torch.device("cpu"), normalization=how, as_bytes=False)
    host = Normaliser(MEAN, STD, device=torch.device("cpu"), normalization=how, on_host=True)
    assert (
        usual.copy_pixels(PIXELS).dtype == torch.uint8
        and floats.copy_pixels(PIXELS).dtype == torch.float32
    )
    assert torch.equal(host.copy_pixels(PIXELS).permute(0, 3, 1, 2), usual(PIXELS))
    assert torch.equal(floats(PIXELS), usual(PIXELS))
    assert torch.equal(host(PIXELS), usual(PIXELS))


def test_none_leaves_values_between_zero_and_one():
    assert np.allclose(normalised(PIXELS, "none"), PIXELS / 255, atol=1e-7)


class Stream:
    """In place of a CUDA stream: notes what it waits for."""

    def __init__(self):
        self.awaited = []

    def wait_event(self, event):
        self.awaited.append(event)


class Copied:
    """In place of a tensor that another stream copies: notes which streams read it."""

    def __init__(self):
        self.readers = []

    def record_stream(self, stream):
        self.readers.append(stream)


@pytest.mark.parametrize("index", [0, 1])
def test_a_copy_is_awaited_on_the_device_that_reads_it(index, monkeypatch):
    streams, current = [Stream(), Stream()], torch.device("cuda", 0)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: streams[(device or current).index]
    )
    tensors = [Copied(), Copied()]
    wait_for_copy(tensors, "done", torch.device("cuda", index))
    assert [stream.awaited for stream in (streams[index], streams[1 - index])] == [["done"], []]
    assert all(tensor.readers == [streams[index]] for tensor in tensors)
