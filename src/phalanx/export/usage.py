"""How an export is used, as code that runs."""

from phalanx.export.metadata import ModelMetadata

_RESIZE = """\
def resize(image, width, height):
    shrunk = min(width, image.width), min(height, image.height)
    image = image.resize(shrunk, Image.Resampling.BOX)
    return image.resize((width, height), Image.Resampling.BILINEAR)
"""
_WHOLE = "    image = resize(image, {size}, {size})\n"
_CENTRE = """\
    scale = {short} / min(image.size)
    width, height = (max({size}, round(side * scale)) for side in image.size)
    image = resize(image, width, height)
    left, top = (width - {size}) // 2, (height - {size}) // 2
    image = image.crop((left, top, left + {size}, top + {size}))
"""
_NORMALISE = {
    "mean-std": "    pixels = (pixels / 255 - {mean}) / {std}\n",
    "mean": "    pixels = pixels - 255 * np.array({mean})\n",
    "none": "    pixels = pixels / 255\n",
    "per-image": "    pixels = (pixels - pixels.mean()) / max(pixels.std(), pixels.size**-0.5)\n",
}


def describe_usage(metadata: ModelMetadata, file: str) -> str:
    """A program that answers for images of one's own."""
    return f"```python\n{_write_program(metadata, file)}```"


def _write_program(metadata: ModelMetadata, file: str) -> str:
    preparation = _write_preparation(metadata)
    return f'''\
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession("{file}")
classes = json.loads(session.get_modelmeta().custom_metadata_map["phalanx"])["classes"]


{preparation}

def classify(path):
    (logits,) = session.run(["logits"], {{"{metadata.input_name}": prepare(path)[None]}})
    shares = np.exp(logits[0] - logits[0].max())
    return shares / shares.sum()


for path in sys.argv[1:]:
    probabilities = classify(path)
    for number in probabilities.argsort()[::-1][:5]:
        print(f"{{path}}: {{classes[number]}} {{probabilities[number]:.1%}}")
'''


def _write_preparation(metadata: ModelMetadata) -> str:
    """Functions that make the model's input from a file, with Pillow and numpy alone."""
    how = metadata.preprocessing
    size, values = how.image_size, {"mean": list(how.mean), "std": list(how.std)}
    crops = how.augment == "resized-crop"
    fit = (_CENTRE if crops else _WHOLE).format(size=size, short=round(size / how.eval_crop))
    upright = "    image = ImageOps.exif_transpose(image)\n" if how.exif_orientation else ""
    if metadata.input == "image":
        end = "    return np.asarray(image)\n"
    else:
        normalise = _NORMALISE[how.normalization].format(**values)
        end = (
            f"    pixels = np.asarray(image, np.float32)\n{normalise}"
            "    return pixels.astype(np.float32).transpose(2, 0, 1)\n"
        )
    return (
        f"{_RESIZE}\n\ndef prepare(path):\n    image = Image.open(path)\n{upright}"
        f'    image = image.convert("RGB")\n{fit}{end}'
    )
