"""What the reading processes hold in memory does not grow with the epochs."""

import os
from pathlib import Path

import pytest

from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order
from small_photos import write_photos

EPOCHS, BATCH, IMAGES = 10, 64, 960
MOST_SHARE, MOST_MIB = 0.03, 8


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    counts = {"train": IMAGES // 3, "val": 20}
    return write_photos(tmp_path_factory.mktemp("photos"), counts, size=(400, 300))


def resident_mib():
    """What this process and its workers hold."""
    own = os.getpid()
    pids = [own, *map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().split("\n")]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "tar", "packed"])
def test_ten_epochs_of_batches_hold_what_two_hold(photos, tmp_path, form):
    root = photos
    if form != "folder":
        root = tmp_path / form
        build_dataset(photos, root, BuildOptions(to=form), workers=1)
    spec = InputSpec(
        data=form,
        data_dir=str(root),
        image_size=96,
        transform=TransformSpec(augment="resized-crop"),
        seed=0,
        order=Order(images=IMAGES, global_batch=BATCH, seed=0),
    )
    steps, sizes = IMAGES // BATCH, []
    with Loader(spec, workers=2) as loader:
        for epoch in range(EPOCHS):
            first = epoch * steps
            seen = sum(1 for _ in loader.steps_from(first, first + steps, micro_batch=BATCH))
            seen += sum(1 for _ in loader.evaluation_batches(BATCH))
            assert seen == steps + 1
            sizes.append(resident_mib())
    early, late = sizes[1], sizes[-1]
    print(f"{form}: {early:.1f} MiB after epoch 2, {late:.1f} MiB after epoch {EPOCHS}")
    assert late - early < max(MOST_SHARE * early, MOST_MIB), sizes
