"""Folders of JPEGs, whole and spoiled, and loaders that decode some of them in a GPU's place."""

import simplejpeg
import torch

from phalanx.data.loading.gpu_decode import GpuDecoder
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import TransformSpec
from phalanx.plan.order import Order
from small_photos import encode, photo

CPU = torch.device("cpu")
SIZE = 32
COUNT = 24
CROP = TransformSpec(augment="resized-crop")


def stand_in(files):
    """Does nvJPEG's part without a GPU; it, too, refuses a whole batch for one image."""
    try:
        decoded = [simplejpeg.decode_jpeg(file.numpy()) for file in files]
    except ValueError as cause:
        raise RuntimeError(str(cause)) from None
    return [torch.from_numpy(pixels).permute(2, 0, 1) for pixels in decoded]


def claim_size(data, height, width):
    """The JPEG with other sides in its header."""
    place = data.index(b"\xff\xc0") + 5
    sides = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return data[:place] + sides + data[place + 4 :]


def end_in_scan(data):
    """A JPEG that opens, and that no decoder of the cores decodes."""
    return data[: data.index(b"\xff\xda") + 12] + b"\xff\xd9"


def lose_rows(data):
    """A JPEG without its last rows, which the cores' decoders make up; a GPU's shows anything."""
    return data[: -len(data) // 5] + b"\xff\xd9"


SPOILED = {
    3: lambda data: data[: len(data) // 2],
    4: lambda data: b"",
    8: lambda data: claim_size(data, 60_000, 60_000),
    23: lambda data: b"\xff\xd8 and then nothing \xff\xd9",
}
ODD = {
    5: lambda seed: encode(photo(seed), "PNG"),
    9: lambda seed: encode(photo(seed, mode="CMYK")),
    10: lambda seed: encode(photo(seed, mode="L")),
    # chroma in full: decoders enlarge it each in its way, and here a blotch is a pixel of it
    11: lambda seed: encode(photo(seed, size=(20, 24)), subsampling=0),
    12: lambda seed: encode(photo(seed, size=(300, 90)), progressive=True),
    13: lambda seed: encode(photo(seed, size=(90, 110)), subsampling=0),
    14: lambda seed: encode(photo(seed, size=(131, 70)), subsampling=1),
    15: lambda seed: encode(photo(seed, size=(200, 150))),
}


def write_files(root, spoiled):
    """24 images a split in two classes: most of one kind, some odd ones, some spoiled."""
    for split in ("train", "val"):
        for seed in range(COUNT):
            path = root / split / ("cat", "dog")[seed // 12] / f"{seed:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = ODD[seed](seed) if seed in ODD else encode(photo(seed))
            path.write_bytes(spoiled[seed](data) if seed in spoiled else data)
    return root


def spec_of(root, *, percent=100, data="folder", transform=CROP):
    return InputSpec(
        data=data,
        data_dir=str(root),
        image_size=SIZE,
        transform=transform,
        seed=2,
        order=Order(images=COUNT, global_batch=COUNT, seed=1),
        gpu_percent=percent,
    )


def open_loader(root, *, workers=0, decode=stand_in, percent=100, data="folder", **options):
    """A loader whose batches are put together on the CPU in a GPU's place."""

    def build(reader, open_rows):
        return GpuDecoder(reader, CPU, open_rows=open_rows, decode=decode)

    spec = spec_of(root, percent=percent, data=data)
    return Loader(spec, workers=workers, backend=build, images_per_task=5, **options)
