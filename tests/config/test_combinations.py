"""Options that cannot run together are told with the way out."""

import pytest

from phalanx.config.read import read_settings
from phalanx.errors import ConfigError

PHOTOS = {"data": "folder", "data-dir": "photos"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"eight-bit-io": "true", "normalization-location": "host"},
            "--eight-bit-io: images normalised on the host are floats",
        ),
        (
            {"cutmix-lambda-low": "0.9", "cutmix-lambda-high": "0.5"},
            "--cutmix-lambda-low: 0.9 is above --cutmix-lambda-high 0.5",
        ),
        (
            {"cutmix-lambda": "0.85", "cutmix-lambda-high": "0.5"},
            "--cutmix-lambda: --cutmix-lambda-high draws the boxes differently",
        ),
        (
            {"cutmix-lambda": "0.85", "mixup-alpha": "0.2", "batch-size": "2"},
            "--batch-size: mixup and cutmix .* need 3 images",
        ),
        (
            {"mixup-alpha": "0.2", "batch-size": "1"},
            "--batch-size: mixup takes .* needs 2 images",
        ),
        ({"cutmix-lambda": "0.5", "batch-size": "2"}, "--batch-size: cutmix .* needs 3 images"),
        (
            {"cutmix-lambda-high": "0.5", "mixup-alpha": "0.2", "batch-size": "3"},
            "--batch-size: mixup and cutmix .* need 4 images",
        ),
        ({**PHOTOS, "gpu-decode": "true", "color-jitter": "0.4"}, "--gpu-decode: --color-jitter"),
        (
            {**PHOTOS, "gpu-decode": "true", "auto-augment": "rand-augment"},
            "--gpu-decode: --auto-augment is done on the host",
        ),
        ({"gpu-decode": "true"}, "--gpu-decode: embedded holds no JPEG photographs"),
    ],
)
def test_what_cannot_be_is_refused(flags, told):
    with pytest.raises(ConfigError, match=told):
        read_settings(None, flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"normalization-location": "host"},  # bytes are the default where they can be
        {"eight-bit-io": "false", "normalization-location": "host"},
        {"cutmix-lambda-low": "0.5", "cutmix-lambda-high": "0.5", "batch-size": "3"},
        {"mixup-alpha": "0.2", "batch-size": "2"},
        {"mixup-alpha": "0.2", "cutmix-lambda": "0.85", "batch-size": "3"},  # as TensorFlow 1
    ],
)
def test_what_can_be_is_not(flags):
    read_settings(None, flags)
