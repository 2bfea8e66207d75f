import numpy as np
import pytest

from phalanx.data.formats.arrays import GeneratedSpec
from phalanx.data.formats.sources import open_source
from phalanx.errors import ConfigError


def generated(**values):
    spec = GeneratedSpec(**{"images": 2000, "image_size": 32, **values})
    return open_source("generated", None, "train", generated=spec)


def test_generated_images_are_noise_that_differs():
    source = generated()
    images = np.stack([source.read(index) for index in range(50)])
    assert images.shape == (50, 32, 32, 3) and images.dtype == np.uint8
    assert abs(images.mean() - 127.5) < 2 and abs(images.std() - 73.9) < 2
    assert len({image.tobytes() for image in images}) == 50


def test_generated_images_follow_seed_and_index_alone():
    assert (generated().read(7) == generated().read(7)).all()
    assert (generated().block != generated(seed=1).block).any()
    assert (generated().read(7) != generated().read(8)).any()
    assert generated().fingerprint() == generated().fingerprint()
    assert generated().fingerprint() != generated(seed=1).fingerprint()


def test_generated_labels_go_round_a_thousand_classes():
    source = generated()
    assert source.labels[[0, 999, 1000]].tolist() == [0, 999, 0]
    assert len(source.classes) == 1000 and source.name(3) == "generated[3]"


def test_no_generated_images_are_refused():
    with pytest.raises(ConfigError, match="above zero"):
        generated(images=0)
