import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of small JPEG files: 23 to train, 8 to validate, all of different sizes."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(1)
    for number in range(31):
        split, name = ("train" if number < 23 else "val"), ("cat", "dog")[number % 2]
        coarse = random.integers(0, 256, (4, 5, 3), np.uint8)
        path = root / split / name / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((60 + number, 90 - number)).save(path)
    return root
