"""TensorFlow 2: train.py, which trains, scores or both; send_request.py, export_for_serving.py."""

from dataclasses import replace

from phalanx.dialects import tf2_values as tf2
from phalanx.dialects.table import (
    TARGET,
    Dialect,
    Effect,
    Fact,
    OldOption,
    OldValues,
    Script,
    computed,
    count_row,
    elsewhere,
    kept,
    nothing,
    number_row,
    renamed,
    replace_rows,
    whole_row,
)
from phalanx.dialects.tf1_configs import SHARED_NAMES
from phalanx.dialects.tf2_table import CONFIGS, TRAIN_TABLE, bool_row

_SCORE = "train.py --training False"  # what it is called here; there it was the same script
_OWN_PORT = "the server that --serve starts takes a free port of this machine"
_SAID_OF_NETWORK = ("model-name", "dataset")
_TESTS = "only tests of the old program used it"


def _list_facts(values: OldValues) -> list[Fact]:
    """What the old program always did."""
    model, small = tf2.find_model(values), tf2.has_small_network(values)
    photographs = tf2.find_data(values) == "imagenet"
    facts = [
        Fact({"epoch-tail": "drop"}, "an epoch's last images that fill no step were left out"),
        Fact({"norm-eps": "1e-5" if small else "1.001e-5"}, "the norm's epsilon"),
        Fact({"zero-init-residual": str(model == "resnet50").lower()}, "only bottlenecks did so"),
    ]
    if values.text("precision") != "32.32":
        facts.append(Fact({"half-type": "float16"}, "16 bits were float16"))
    if model in ("resnet18", "resnet34"):
        facts.append(Fact({"stage1-projection": "true"}, "the first block projected, too"))
    if photographs:
        crops = {"crop-scale": "0.05,1", "use-bbox-info": "true", "normalization": "mean-std"}
        facts.append(Fact(crops, "random crops of 5% or more, which show the object"))
    elif tf2.find_data(values) == "mnist":
        facts.append(Fact({"normalization-location": "none"}, "pixels were divided by 255 only"))
    else:
        facts.append(Fact({"normalization": "per-image"}, "images by their own statistics"))
    if photographs and small:
        facts.append(Fact({"image-size": "224"}, "ImageNet's size, whatever the network"))
    if values.has("wandb"):
        facts.append(Fact({"wandb-project": "tf2-resnet50"}, "its project there"))
    return facts


def _choose_preset(values: OldValues) -> str:
    """The old program's defaults with a dataset."""
    return "imagenet_config" if tf2.find_data(values) == "imagenet" else "cifar10_config"


def _list_notes(values: OldValues) -> list[str]:
    """What to say about the whole command."""
    notes = []
    if tf2.is_toy(values) and "model-name" not in values.given:
        notes.append(
            "no --model-name is given, and the default there, toy_model, does not exist here; "
            "ResNet-8 stands in for its two convolutions"
        )
    stages = len(values.many("pipeline-splits")) + 1
    grouped = values.text("pipeline-schedule") != "Sequential"
    if stages > tf2.count_accumulation(values) and grouped and not values.many("device-mapping"):
        notes.append(
            f"a pipeline of {stages} stages needs at least as many micro-batches in a step, there, "
            f"too; add --gradient-accumulation {2 * stages}"
        )
    return notes


def _find_scoring(values: OldValues) -> tuple[str, str] | None:
    """train.py that only scores the checkpoints of a folder."""
    trains = values.text("training") == "true"
    return None if trains or not values.is_given("checkpoint-input-dir") else (_SCORE, "")


# --- scoring ---


def _port_score(text: str, values: OldValues) -> Effect:
    return Effect(flags={TARGET: text, "all": "true"}, why="all checkpoints in it")


def _port_made_up(text: str, values: OldValues) -> Effect:
    kind = "synthetic" if text == "ipu" else "generated"
    return Effect(flags={f"{kind}-data": "true"}, kind="renamed")


_DONE = nothing("`phalanx validate` does nothing else")
_VALIDATE = replace_rows(
    TRAIN_TABLE,
    OldOption("checkpoint-input-dir", computed(_port_score, "what is scored, with --all")),
    OldOption(
        "synthetic-data", computed(_port_made_up, "--generated-data or --synthetic-data"),
        choices=("host", "cpu", "ipu"),
    ),
    bool_row("training", _DONE),
    bool_row("validation", _DONE),
    count_row("num-replicas", elsewhere("all devices there are share the images")),
    count_row("micro-batch-size", renamed("valid-batch-size")),
)  # fmt: skip


# --- serving ---


def _serve_instead(how: str, *own: OldOption) -> tuple[OldOption, ...]:
    """All options of training, which only describe the model that is served, and those of its own.

    Defaults of training have no part in it.
    """
    names = {row.name for row in own}
    described = elsewhere(how)
    rows = [replace(row, outcome=described, default=None) for row in TRAIN_TABLE]
    return (*(row for row in rows if row.name not in names), *own)


def _switch_row(name: str) -> OldOption:
    """A switch that is a flag of ours; off, there is nothing to do."""

    def apply(text: str, values: OldValues) -> Effect:
        if text != "true":
            return Effect(why="it is off by default", kind="nothing")
        return Effect(flags={name: text}, kind="kept")

    return bool_row(name, computed(apply, f"--{name}"))


def _build_network_rows() -> tuple[OldOption, ...]:
    """Rows of training that count where the command itself says them: a config is a preset here."""

    def only_said(row: OldOption) -> OldOption:
        def apply(text: str, values: OldValues) -> Effect:
            if row.name not in values.given:
                return Effect(why="the preset has it", kind="elsewhere")
            return row.outcome.apply(text, values)

        return replace(row, outcome=replace(row.outcome, apply=apply))

    return tuple(only_said(row) for row in TRAIN_TABLE if row.name in _SAID_OF_NETWORK)


def _list_serving_notes(values: OldValues) -> list[str]:
    """That nothing was trained."""
    if values.is_given("checkpoint-input-path"):
        return []
    return [
        "the model has random weights, as it had there; name a run that you trained in its place"
    ]


def _port_requests(text: str, values: OldValues) -> Effect:
    return Effect(flags={"num-images": text}, kind="kept", why="by each thread")


def _port_data(text: str, values: OldValues) -> Effect:
    if tf2.is_made_up(values):
        return Effect(why="noise is sent, which needs no files", kind="nothing")
    return Effect(flags={"data-dir": text}, why="its validation images are sent", kind="renamed")


_REQUEST = _serve_instead(
    "part of the model that is served: --serve names it",
    OldOption("config", elsewhere("the model that --serve names")),
    OldOption("dataset-path", computed(_port_data, "--data-dir")),
    *_build_network_rows(),
    OldOption("host", nothing(_OWN_PORT)),
    whole_row("port", nothing(_OWN_PORT)),
    count_row("batch-size", kept("images in a request; the server makes batches of its own"),
              default="1"),
    count_row("num-threads", kept(), default="2"),
    count_row("num-images", computed(_port_requests, "--num-images"), default="1000"),
    _switch_row("use-async"),
    _switch_row("verbose"),
    OldOption("serving-bin-path", nothing("the server is `phalanx serve`")),
    bool_row("pytest", nothing(_TESTS)),
)  # fmt: skip


def _port_export_file(text: str, values: OldValues) -> Effect:
    """The file in the folder that was asked for."""
    name = values.text("config") or tf2.find_model(values) or "model"
    why = "a checked ONNX file, which `phalanx serve` takes; there is no SavedModel"
    return Effect(flags={"out": f"{text.rstrip('/')}/{name}.onnx", "format": "onnx"}, why=why)


def _port_max_batch(text: str, values: OldValues) -> Effect:
    return Effect(flags={"max-batch": text}, why="any batch up to this one, not only it")


def _port_type(text: str, values: OldValues) -> Effect:
    name = "float32" if text == "32.32" else "float16"
    return Effect(flags={"dtype": name}, why="of the weights", kind="renamed")


def _port_checkpoint(text: str, values: OldValues) -> Effect:
    if not text.endswith((".h5", ".hdf5")):
        return Effect(flags={TARGET: text}, why="what is exported")
    warning = f"`phalanx port weights {text}` turns it into weights.safetensors first"
    weights = {"init-weights": "weights.safetensors"}
    return Effect(flags=weights, why="what is exported", warnings=(warning,))


_EXPORT = _serve_instead(
    "part of the model that is exported",
    OldOption("config", elsewhere("the model that is exported")),
    *_build_network_rows(),
    OldOption("dataset-path", renamed("data-dir", why="the answers are compared on its images")),
    OldOption("export-dir", computed(_port_export_file, "--out")),
    count_row("micro-batch-size", computed(_port_max_batch, "--max-batch")),
    OldOption("precision", computed(_port_type, "--dtype"), choices=("16.16", "16.32", "32.32")),
    bool_row("accelerator-side-preprocess", renamed("with-preprocessing")),
    OldOption("checkpoint-input-path", computed(_port_checkpoint, "what is exported")),
    number_row("iterations", nothing("a server takes requests one after the other")),
    bool_row("pipeline-serving-model", nothing("a model is served whole, on one device")),
    bool_row("use-serving-api", nothing("there is one way to export")),
    bool_row("pytest", nothing(_TESTS)),
)  # fmt: skip

TF2 = Dialect(
    name="tf2",
    title="TensorFlow 2",
    scripts={
        "train.py": Script(
            kind="train",
            options=TRAIN_TABLE,
            facts=_list_facts,
            preset=_choose_preset,
            instead=_find_scoring,
            exclusive=(("gradient-accumulation-count", "global-batch-size"),),
            notes=_list_notes,
        ),
        _SCORE: Script(kind="validate", options=_VALIDATE, preset=_choose_preset),
        "send_request.py": Script(
            kind="request", options=_REQUEST, preset=_choose_preset, notes=_list_serving_notes
        ),
        "export_for_serving.py": Script(
            kind="export", options=_EXPORT, preset=_choose_preset, notes=_list_serving_notes
        ),
    },
    configs=CONFIGS,
    presets={name: f"tf2/{name}" if name in SHARED_NAMES else name for name in CONFIGS},
    folders=("cnns/tensorflow2", "tensorflow2"),
    conflicts=(
        "all checkpoints of a run are scored after training, not only its last weights",
        "`--synthetic-data` takes cpu, as well as host",
        "CIFAR-100 is a dataset",
        "log points may be epochs apart, whatever `--ckpts-per-epoch` is",
    ),
)
