"""`phalanx export`: a model for other programs, checked against the model itself."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import (
    JSON_FLAG,
    LAYOUT_OPTIONS,
    LIMIT_OPTIONS,
    Argument,
    ParsedArgs,
    command,
)
from phalanx.cli.validate import CHECKPOINT_FLAG, FRESH_MODEL_OPTIONS, refuse_model_options
from phalanx.errors import DataError
from phalanx.report.terminal import escape_name
from phalanx.units import format_bytes

if TYPE_CHECKING:
    from phalanx.export.run import ExportedModel

_SOURCE_OPTIONS = (  # of the data and of how its images are prepared
    "data", "data-dir", "val-split", *LAYOUT_OPTIONS, "seed",
    "eval-crop", "normalization", "exif-orientation",
)  # fmt: skip


@command(
    "export",
    "Write a model for other programs. It is kept only if its outputs match the checkpoint's on "
    "real images, in batches of one, two and the largest size; a model card is written next to it.",
    Argument(
        "target",
        "A run (its best checkpoint), a checkpoint, or a preset or model by name, which has random "
        "weights or those of --init-weights.",
        metavar="RUN|...",
        required=True,
    ),
    CHECKPOINT_FLAG,
    Argument(
        "--format",
        "onnx: a file for onnxruntime and many others. pt2: a program of torch.export. "
        "safetensors: weights alone. timm: a folder that timm.create_model and the Hugging Face "
        "hub read. triton: a model in a repository for NVIDIA's Triton.  [onnx]",
        default="onnx",
    ),
    Argument(
        "--out",
        "The file, timm's folder, or Triton's repository, in which the model is OUT/NAME.  "
        "[RUN/export/NAME.onnx; other formats in RUN/export/FORMAT; of a preset or model, export "
        "in this folder]",
    ),
    Argument("--name", "Name of the model in server URLs.  [the run's name]"),
    Argument(
        "--with-preprocessing",
        "Take uint8 images [N, size, size, 3] and normalise them in the model; else it takes "
        "float32 [N, 3, size, size], normalised.",
        switch=True,
    ),
    Argument(
        "--dtype",
        "Type of the weights: float32, float16 or bfloat16 (not in ONNX). Inputs and outputs stay "
        "float32.  [float32]",
        default="float32",
    ),
    Argument("--averaged", "Export the moving average of the weights (--ema-decay).", switch=True),
    Argument(
        "--max-batch",
        "Largest batch to check, and for Triton to build.  [32]",
        default="32",
    ),
    Argument(
        "--images",
        "Images, or folders of them, for the check.  [the validation images of its data, else "
        "those that come with Phalanx]",
        many=True,
    ),
    Argument("--check-images", "How many images to check.  [64]", default="64"),
    JSON_FLAG,
    usage="RUN|CHECKPOINT|PRESET|MODEL [--format onnx|pt2|safetensors|timm|triton] [--out PATH] "
    "[--with-preprocessing] [--dtype float16] [--json]",
    options=(*_SOURCE_OPTIONS, "threads", "plugin", *LIMIT_OPTIONS, *FRESH_MODEL_OPTIONS),
    examples={
        "phalanx export runs/demo": "runs/demo/export/demo.onnx, with a model card",
        "phalanx export runs/demo --with-preprocessing --out shoes.onnx": (
            "takes pixels from 0 to 255"
        ),
        "phalanx export runs/demo --checkpoint last --averaged": "the newest one's average",
        "phalanx export runs/demo --format pt2 --dtype bfloat16": "for torch, in 16 bits",
        "phalanx export runs/cats --format timm --out cats": (
            "for timm.create_model('local-dir:cats', pretrained=True)"
        ),
        "phalanx export runs/cats --format triton --max-batch 64": "for tritonserver",
        "phalanx export runs/cats --images photos --check-images 500": (
            "if the data of the run is not on this machine"
        ),
        "phalanx export resnet50 --data imagenet --init-weights resnet50.safetensors": (
            "weights from elsewhere"
        ),
        "phalanx export resnet50_infer_bs16": "random weights, to try out or measure a server",
    },
)
def _run(args: ParsedArgs) -> None:
    """Export, and say where it is and how it compares."""
    args.refuse_problems()
    from phalanx.export.destination import refuse_existing
    from phalanx.export.options import ExportOptions, read_export_source

    options = ExportOptions(
        format=args["--format"],
        out=Path(args["--out"]) if args["--out"] else None,
        name=args["--name"],
        with_preprocessing=args["--with-preprocessing"],
        dtype=args["--dtype"],
        averaged=args["--averaged"],
        max_batch=args.read_int("--max-batch", 1, 4_096),
        check_images=args.read_int("--check-images", 1, 1_000_000),
    )
    options.refuse_missing_packages()
    images = None
    if args["--images"]:
        from phalanx.data.loading.image_inputs import collect_images

        try:
            images = collect_images(args["--images"])
        except DataError as error:
            raise DataError(escape_name(str(error))) from None
    args.load_plugins()
    target = args["target"]
    source = read_export_source(
        target, args.flags, selection=args["--checkpoint"], averaged=options.averaged
    )
    if source.checkpoint is not None:
        refuse_model_options(target, args)
    if source.note:
        print(f"{target}: {source.note}", file=sys.stderr)
    # what is wrong is told before torch is imported
    options.refuse_unsupported(source)
    refuse_existing(options.choose_path(source), options.kind.files)
    from phalanx.export.run import export_model

    exported = export_model(source, options, images=images, needs_data="data-dir" in args.flags)
    args.print_result(exported.to_dict(), lambda: _print_export(exported))


def _print_export(exported: "ExportedModel") -> None:
    """What was written, and how it was checked."""
    checked, about = exported.checked, exported.metadata
    for note in exported.notes:
        print(f"note: {note}", file=sys.stderr)
    print(
        f"agrees with the {about.reference} on {checked.source}, in {checked.describe_batches()}: "
        f"logits within {checked.logits_differ_by:.1e} ({checked.allowed:.1e} allowed), same top-1 "
        f"for {checked.describe_top1()}"
    )
    weights = "random weights, " * (about.weights == "random")
    size = format_bytes(exported.bytes)
    print(f"{exported.path}: {about.model}, {weights}{about.dtype}, {size}")
    if exported.computes:
        outputs = "logits and activation_map" if about.has_activation_map else "logits"
        shape = ", ".join(map(str, about.input_shape))
        kind = "uint8" if about.input == "image" else "float32"
        print(f"  takes {about.input_name}: {kind} [N, {shape}]; gives {outputs}")
    print(f"  model card: {exported.card}")
