"""TensorFlow 1: train.py, validation.py, restore.py and weight_avg.py, and their benchmarks.

Where the README and the code differ, the README is followed: a pipeline is Grouped, and images are
normalised on the host unless --no-hostside-norm or --eight-bit-io is given.
"""

from phalanx.dialects.numbers import COUNT_OR_ALL, SHARE
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
from phalanx.dialects.tf1_configs import CONFIGS, PRESETS
from phalanx.dialects.tf1_table import TRAIN_TABLE
from phalanx.dialects.tf1_values import (
    DATA_NAMES,
    build_noise,
    find_data,
    find_model,
    find_network,
    find_norm,
    is_imagenet,
    is_rmsprop,
)

_SOURCES = ("data-dir", "dataset", "generated-data", "synthetic-data")  # of images
_BASIC = ("resnet10", "resnet18", "resnet34")  # their first block projects although it need not


def _list_facts(values: OldValues) -> list[Fact]:
    """What the old program always did."""
    efficient, network = find_model(values) == "efficientnet", find_network(values)
    polynomial = values.text("lr-schedule").lower() == "polynomial_decay_lr"
    made_up = values.has("generated-data") or values.has("synthetic-data")
    facts = [
        Fact({"padding": "same"}, "TensorFlow pads strided convolutions so"),
        Fact({"half-type": "float16"}, "16 bits were float16"),
        Fact({"weight-decay": "0"}, "decay was a term of the gradient"),
        Fact({"norm-type": find_norm(values)}, "the norm of this model and dataset"),
        Fact({"norm-eps": "1e-3" if efficient else "1e-5"}, "the norm's epsilon"),
        Fact({"warmup-mode": "ramp-shift" if polynomial else "ramp"}, "how the warm-up begins"),
    ]
    if is_rmsprop(values):
        facts.append(Fact({"rmsprop-start": "1"}, "TensorFlow's RMSprop begins at 1"))
    if values.number("label-smoothing"):
        facts.append(Fact({"smoothing-over": "others"}, "smoothing left the true class out"))
    if values.text("lr-schedule").lower() != "exponential":
        facts.append(Fact({"lr-scheduler-freq": "0"}, "the rate changes with every step"))
    if not made_up:
        name = DATA_NAMES.get(find_data(values), "imagenet")
        facts.append(Fact({"data": name}, "the dataset, by the folder's name or by default"))
    if is_imagenet(values):
        crops = {"crop-scale": "0.05,1", "use-bbox-info": "true"}
        facts.append(Fact(crops, "random crops of 5% or more, which show the object"))
    if efficient:
        group_dim = values.text("group-dim") or "1"
        facts.append(Fact({"efficientnet-group-dim": group_dim}, "depthwise by default"))
        ratio = values.text("expand-ratio") or "6"
        facts.append(Fact({"efficientnet-expand-ratio": ratio}, "6 by default"))
    else:
        bottleneck = network not in _BASIC and is_imagenet(values)
        zero, projects = str(bottleneck).lower(), str(network in _BASIC).lower()
        why = "only the last norms of ImageNet's bottlenecks began at zero"
        facts.append(Fact({"zero-init-residual": zero}, why))
        why = "only in ResNet-10, 18 and 34 the first block projected, too"
        facts.append(Fact({"stage1-projection": projects}, why))
    if not (made_up or values.config or values.has("eight-bit-io")):
        why = "the README's default: on the host, unless --no-hostside-norm moves it"
        facts.append(Fact({"normalization-location": "host"}, why))
    return facts


def _choose_preset(values: OldValues) -> str:
    """The preset that is nearest to the old program's defaults for a model."""
    if not is_imagenet(values):
        return "tf1-resnet8"
    presets = {"resnext": "tf1-resnext101", "efficientnet": "tf1-efficientnet-b4-g1"}
    return presets.get(find_model(values), "tf1-resnet50-gn")


def _list_notes(values: OldValues) -> list[str]:
    """What to say about the whole command."""
    notes = []
    folder = values.text("data-dir") or values.environment.get("DATA_DIR", "")
    known = any(name in folder.lower() for name in ("imagenet", "cifar"))
    if not values.is_given("dataset") and not known:
        notes.append(
            "neither --dataset nor the name of --data-dir says which dataset; taken as imagenet"
        )
    if values.has("pipeline") and not values.is_given("pipeline-schedule"):
        notes.append(
            "--pipeline without --pipeline-schedule: Grouped, as the README says; the "
            "code had Interleaved"
        )
    b4 = find_network(values) == "efficientnet_b4"
    if b4 and values.text("group-dim") == "16" and not values.config:
        notes.append(
            "--group-dim 16: ported as it stands. The benchmark README prints the same line under "
            "the heading Group Dim 1, too; for that network give --efficientnet-group-dim 1 "
            "--efficientnet-expand-ratio 6"
        )
    return notes


def _find_slip(values: OldValues) -> tuple[str, str] | None:
    """A validation that calls train.py: poprun could only train with --no-validation."""
    is_launched = values.launch.name == "poprun"
    if values.is_given("restore-path") and is_launched and not values.has("no-validation"):
        return "validation.py", (
            "train.py with --restore-path and without --no-validation under poprun: taken as "
            "validation.py, as the README means it there"
        )
    return None


def _port_resume(text: str, values: OldValues) -> Effect:
    """A run that goes on: as it was, or with other options, which makes another one of it."""
    others = [name for name in values.given if name not in ("restore-path", "data-dir", "config")]
    if others:
        return Effect(flags={"fork": text}, why="a new run, from the old one's last checkpoint")
    return Effect(flags={"resume": text}, why="the run continues where it stopped")


def _port_score(text: str, values: OldValues) -> Effect:
    return Effect(flags={TARGET: text, "all": "true"}, why="all checkpoints of a run")


def _port_all_devices(text: str, values: OldValues) -> Effect:
    return Effect(
        why="all devices there are share the images, with the same score", kind="elsewhere"
    )


_TRAIN = replace_rows(
    TRAIN_TABLE,
    OldOption("restore-path", computed(_port_resume, "--resume, or --fork with other options")),
)
_VALIDATE = replace_rows(
    TRAIN_TABLE,
    OldOption("restore-path", computed(_port_score, "the run that is scored, with --all")),
    count_row("repeat", kept("passes; the first one is not counted")),
    OldOption("inference", elsewhere("scores are added up only to be printed"), takes="optional"),
    count_row("replicas", computed(_port_all_devices, "all devices")),
    whole_row("total-batch-size", nothing("a checkpoint knows its epoch")),
    OldOption("no-validation", nothing("validate does nothing else"), takes="flag"),
    OldOption(
        "generated-data", computed(build_noise("generated", scores=True), "--generated-data"),
        takes="flag",
    ),
    OldOption(
        "synthetic-data", computed(build_noise("synthetic", scores=True), "--synthetic-data"),
        takes="flag",
    ),
)  # fmt: skip
_RESTORE = (
    OldOption("restore-path", renamed("resume")),
    OldOption("wandb-id", elsewhere("a resumed run keeps its own")),
)
_AVERAGE = (
    OldOption("restore-path", renamed(TARGET)),
    OldOption("filename", nothing("the average is RUN/checkpoints/average")),
    OldOption("mode", renamed("weight-avg-strategy"), choices=("mean", "exponential")),
    whole_row("N", renamed("weight-avg-n"), number=COUNT_OR_ALL),
    number_row("decay", renamed("weight-avg-exp-decay"), default="0.99", number=SHARE),
    whole_row(
        "discard-last",
        nothing("the last checkpoint is not written twice here: nothing to discard"),
    ),
)

_CONFLICTS = (
    "A pipeline without `--pipeline-schedule` is Grouped, as the README says; the code had "
    "Interleaved.",
    "Images are normalised on the host, as the README says, unless `--no-hostside-norm` or "
    "`--eight-bit-io` is given; later code did so only with `--hostside-norm`. Named "
    "configurations belong to that code, and normalise on the device.",
    "`--select-ipus` takes a second device for validation, as the README says; the code took one.",
    "`--valid-batch-size` is in the README alone, and has an effect here.",
    "`--iterations 10` is ten updates; the code rounded them up to a whole log interval.",
    "`train.py --restore-path` under poprun without `--no-validation` is a slip for "
    "`validation.py`.",
)

TF1 = Dialect(
    name="tf1",
    title="TensorFlow 1",
    scripts={
        "train.py": Script(
            kind="train",
            options=_TRAIN,
            facts=_list_facts,
            preset=_choose_preset,
            instead=_find_slip,
            exclusive=(("epochs", "iterations"), ("abs-learning-rate", "base-learning-rate")),
            notes=_list_notes,
            needs=(*_SOURCES, "config", "DATA_DIR", "TF_CONFIG"),
        ),
        "validation.py": Script(
            kind="validate",
            options=_VALIDATE,
            facts=_list_facts,
            preset=_choose_preset,
            notes=_list_notes,
        ),
        "restore.py": Script(kind="resume", options=_RESTORE),
        "weight_avg.py": Script(kind="average", options=_AVERAGE),
    },
    configs=CONFIGS,
    presets=PRESETS,
    folders=("tensorflow/cnns", "tensorflow1"),
    conflicts=_CONFLICTS,
    key_note="the old program ignored a key that was not written in full",
)
