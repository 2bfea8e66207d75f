"""How to use an export: programs that run as they are, without Phalanx."""

import json
from collections.abc import Callable

from phalanx.catalog.variant import METADATA_KEY
from phalanx.export.metadata import ACTIVATION_MAP, LOGITS, ModelMetadata

_RESIZE = """\
def shares(old, new):  # of each old pixel in each new one, where there are fewer
    edges, begin = np.linspace(0, old, new + 1), np.arange(old)
    ends = np.minimum(edges[1:, None], begin + 1)
    return (ends - np.maximum(edges[:-1, None], begin)).clip(0) * new / old


def resize(image, width, height):
    pixels = np.asarray(image).astype(np.float32)
    high, wide = min(height, image.height), min(width, image.width)
    rows = shares(image.height, high) @ pixels.reshape(image.height, -1)
    pixels = shares(image.width, wide) @ rows.reshape(high, image.width, 3)
    image = Image.fromarray(np.rint(pixels).astype(np.uint8))
    return image.resize((width, height), Image.Resampling.BILINEAR)
"""
_EIGHT_BITS = """\
    if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
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
_ANSWER = """\
for path in sys.argv[1:]:
    probabilities = classify(path)
    for number in probabilities.argsort()[::-1][:5]:
        print(f"{path}: {classes[number]} {probabilities[number]:.1%}")
"""
_ONNX = f"""\
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(@FILE@)
classes = json.loads(session.get_modelmeta().custom_metadata_map["{METADATA_KEY}"])["classes"]


@PREPARE@

def classify(path):
    (logits,) = session.run(["{LOGITS}"], {{"@INPUT@": prepare(path)[None]}})
    shares = np.exp(logits[0] - logits[0].max())
    return shares / shares.sum()


{_ANSWER}"""
_PT2 = f"""\
import json
import sys

import numpy as np
import torch
from PIL import Image, ImageOps

about = {{"{METADATA_KEY}.json": ""}}
program = torch.export.load(@FILE@, extra_files=about).module()
classes = json.loads(about["{METADATA_KEY}.json"])["classes"]


@PREPARE@

def classify(path):
    with torch.no_grad():
        logits = program(torch.from_numpy(prepare(path)[None].copy()))[0]
    return logits[0].softmax(0).numpy()


{_ANSWER}"""
_TRITON = f"""\
import sys

import numpy as np
import tritonclient.http
from PIL import Image, ImageOps

client = tritonclient.http.InferenceServerClient("localhost:8000")
with open("labels.txt", encoding="utf-8") as file:
    classes = file.read().splitlines()


@PREPARE@

def classify(path):
    batch = np.ascontiguousarray(prepare(path)[None])
    given = tritonclient.http.InferInput("@INPUT@", batch.shape, "@KIND@")
    given.set_data_from_numpy(batch)
    logits = client.infer("@NAME@", [given]).as_numpy("{LOGITS}")
    shares = np.exp(logits[0] - logits[0].max())
    return shares / shares.sum()


{_ANSWER}"""
_TIMM = """\
import sys

import numpy as np
import timm
import torch
from PIL import Image, ImageOps

model = timm.create_model("local-dir:.", pretrained=True).eval()
prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
classes = model.pretrained_cfg["label_names"]


def classify(path):
@OPEN@    with torch.no_grad():
        logits = model(prepare(image)[None])
    return logits[0].softmax(0).numpy()


"""


def describe_usage(metadata: ModelMetadata, form: str, file: str) -> str:
    """The inputs and outputs of an export, and a program that classifies the user's images."""
    return "\n\n".join(_USAGES[form](metadata, file))


def _describe_onnx(metadata: ModelMetadata, file: str) -> list[str]:
    return [
        f"With `pip install onnxruntime Pillow`, in the folder of `{file}`:",
        _format_program(_ONNX, metadata, file),
        _describe_tensors(metadata),
        f"`phalanx serve {file}` answers over HTTP.",
    ]


def _describe_pt2(metadata: ModelMetadata, file: str) -> list[str]:
    return [
        f"With torch and Pillow, in the folder of `{file}`:",
        _format_program(_PT2, metadata, file),
        _describe_tensors(metadata),
    ]


def _describe_triton(metadata: ModelMetadata, file: str) -> list[str]:
    return [
        "This folder is one model of a repository, which is the folder around it:",
        "```sh\ntritonserver --model-repository=..\n```",
        "With `pip install tritonclient[http] Pillow`, in this folder:",
        _format_program(_TRITON, metadata, file),
        _describe_tensors(metadata),
    ]


def _describe_timm(metadata: ModelMetadata, file: str) -> list[str]:
    return [
        "With timm 1.0.20 or later, in this folder; on the Hugging Face hub, "
        '`"hf-hub:USER/NAME"` replaces `"local-dir:."`:',
        _format_program(_TIMM + _ANSWER, metadata, file),
        "timm interpolates a little differently when it resizes images, which may change an answer "
        "that was close.",
    ]


def _describe_safetensors(metadata: ModelMetadata, file: str) -> list[str]:
    load = f"weights = load_file({json.dumps(file, ensure_ascii=False)})"
    return [
        "The weights have timm's names, so that whatever builds the same network can take them:",
        f"```python\nfrom safetensors.torch import load_file\n\n{load}\n```",
        "Phalanx continues with them, with the options below:",
        f"```sh\nphalanx train --model {metadata.model} --init-weights {file}\n```",
        "Images are prepared like this:",
        f"```python\nimport numpy as np\nfrom PIL import Image, ImageOps\n\n\n"
        f"{_format_preparation(metadata)}```",
    ]


_USAGES: dict[str, Callable[[ModelMetadata, str], list[str]]] = {
    "onnx": _describe_onnx,
    "pt2": _describe_pt2,
    "safetensors": _describe_safetensors,
    "timm": _describe_timm,
    "triton": _describe_triton,
}


def _describe_tensors(metadata: ModelMetadata) -> str:
    """A table of inputs and outputs."""
    shape = ", ".join(map(str, metadata.input_shape))
    what = "bytes, RGB" if metadata.input == "image" else "normalised, RGB"
    kind = "uint8" if metadata.input == "image" else "float32"
    rows = [
        "| tensor | type | shape | |",
        "|---|---|---|---|",
        f"| `{metadata.input_name}`, the input | {kind} | [N, {shape}] | {what} |",
        f"| `{LOGITS}` | float32 | [N, {len(metadata.classes)}] | softmax gives probabilities |",
    ]
    if metadata.has_activation_map:
        rows.append(
            f"| `{ACTIVATION_MAP}` | float32 | [N, rows, columns] | where in the image the "
            "most likely class was seen |"
        )
    return "\n".join(rows)


def _format_program(template: str, metadata: ModelMetadata, file: str) -> str:
    """A program as a block of Markdown."""
    values = {
        "@PREPARE@": _format_preparation(metadata),
        "@OPEN@": _write_opening(metadata),
        "@INPUT@": metadata.input_name,
        "@KIND@": "UINT8" if metadata.input == "image" else "FP32",
        "@NAME@": metadata.name,
        "@FILE@": json.dumps(file, ensure_ascii=False),
    }
    for place, value in values.items():
        template = template.replace(place, value)
    return f"```python\n{template}```"


def _format_preparation(metadata: ModelMetadata) -> str:
    """Functions that make the model's input from a file, with only Pillow and numpy."""
    how = metadata.preprocessing
    size, values = how.image_size, {"mean": list(how.mean), "std": list(how.std)}
    crops = how.augment == "resized-crop"
    fit = (_CENTRE if crops else _WHOLE).format(size=size, short=round(size / how.eval_crop))
    if metadata.input == "image":
        end = "    return np.asarray(image)\n"
    else:
        normalise = _NORMALISE[how.normalization].format(**values)
        end = (
            f"    pixels = np.asarray(image, np.float32)\n{normalise}"
            "    return pixels.astype(np.float32).transpose(2, 0, 1)\n"
        )
    return f"{_RESIZE}\n\ndef prepare(path):\n{_write_opening(metadata)}{fit}{end}"


def _write_opening(metadata: ModelMetadata) -> str:
    """Lines that open an image file as `read_rgb` does: upright if the run had it so, and RGB."""
    turn = "    image = ImageOps.exif_transpose(image)\n"
    upright = turn if metadata.preprocessing.exif_orientation else ""
    return f'    image = Image.open(path)\n{upright}{_EIGHT_BITS}    image = image.convert("RGB")\n'
