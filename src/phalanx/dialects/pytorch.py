"""PyTorch: train.py, validate.py, restore.py and weight_avg.py; and its Lightning form.

Both forms have the same options. Where README and code differ, the README is followed.
"""

from dataclasses import replace

from phalanx.dialects import pytorch_values as pt
from phalanx.dialects.numbers import COUNT_OR_ALL, POSITIVE, SHARE
from phalanx.dialects.pytorch_configs import CONFIGS, PRESETS
from phalanx.dialects.pytorch_table import TRAIN_TABLE
from phalanx.dialects.table import (
    TARGET,
    Dialect,
    Fact,
    OldOption,
    OldValues,
    Outcome,
    Script,
    computed,
    kept,
    nothing,
    number_row,
    renamed,
    replace_rows,
    whole_row,
)

_EPOCHS = "as the README says; the Lightning code trained 2 epochs whatever it was given"
_SMOOTHING = "as the README says; the Lightning code took 1 minus the factor"
_ENGINE = (
    "our own loop takes the same steps; --engine lightning lets PyTorch Lightning's Trainer drive "
    "it, to the same weights"
)


def _list_facts(values: OldValues) -> list[Fact]:
    """What the old program always did."""
    facts = [
        Fact({"epoch-tail": "drop"}, "an epoch's last images that fill no step were left out"),
        Fact({"smoothing-over": "all"}, "smoothing spread over all classes"),
        Fact({"warmup-mode": "ramp"}, "the warm-up multiplied the running schedule"),
    ]
    if values.text("precision") != "32.32":
        facts.append(Fact({"half-type": "float16"}, "16 bits were float16"))
    if not pt.is_efficientnet(values):
        why = "residual blocks began as their shortcuts"
        facts.append(Fact({"zero-init-residual": "true"}, why))
    if values.text("data") == "cifar10":
        size = str(pt.find_image_size(values))
        facts.append(Fact({"image-size": size}, "small images were scaled to the network's size"))
    if values.has("wandb"):
        facts.append(Fact({"wandb-project": "pytorch-cnn"}, "its project there"))
    return facts


def _choose_preset(values: OldValues) -> str:
    """The entry that other ones add to: nearest to the program's defaults."""
    return "pl/efficientnet-b0" if pt.is_efficientnet(values) else "pl/resnet50"


def _list_notes(values: OldValues) -> list[str]:
    """What to say about the whole command."""
    notes = []
    if values.text("data") == "cifar10":
        notes.append(
            "cifar10: images are shifted and mirrored at random, then scaled; there they were "
            "cropped at random, as photographs are"
        )
    stages = len(values.many("pipeline-splits")) + 1
    if stages > 1 and stages > values.whole("gradient-accumulation", 1):
        notes.append(
            f"a pipeline of {stages} stages needs at least as many micro-batches in a step; add "
            f"--gradient-accumulation {2 * stages}"
        )
    return notes


_STRATEGY = OldOption("weight-avg-strategy", kept(), choices=("mean", "exponential"))
_FOLDER: Outcome = renamed(TARGET, why="its checkpoints are averaged")
_AVERAGE = (
    OldOption("checkpoint-path", _FOLDER, aliases=("checkpoint-input-path",)),
    OldOption("checkpoint-output-path", nothing("the average is RUN/checkpoints/average")),
    replace(_STRATEGY, default="mean"),
    number_row("weight-avg-exp-decay", kept(), default="0.99", number=SHARE),
    whole_row("weight-avg-N", renamed("weight-avg-n"), default="-1", number=COUNT_OR_ALL),
)
_TRAIN = Script(
    kind="train",
    options=TRAIN_TABLE,
    facts=_list_facts,
    preset=_choose_preset,
    notes=_list_notes,
)
_LIGHTNING_TABLE = replace_rows(
    TRAIN_TABLE,
    number_row("epoch", renamed("epochs", why=_EPOCHS), default="10", number=POSITIVE),
    number_row("label-smoothing", kept(_SMOOTHING), default="0"),
)

PYTORCH = Dialect(
    name="pytorch",
    title="PyTorch",
    scripts={
        "train.py": _TRAIN,
        "validate.py": Script(
            kind="validate",
            options=(
                OldOption("checkpoint-path", computed(pt.port_score, "what is scored, with --all")),
            ),
        ),
        "restore.py": Script(
            kind="resume",
            options=(OldOption("checkpoint-path", computed(pt.port_resume, "--resume")),),
        ),
        "weight_avg.py": Script(kind="average", options=_AVERAGE),
    },
    configs=CONFIGS,
    presets=PRESETS,
    folders=("pytorch/cnns", "cnns/pytorch"),
)
LIGHTNING = Dialect(
    name="lightning",
    title="PyTorch Lightning",
    scripts={"train_lightning.py": replace(_TRAIN, options=_LIGHTNING_TABLE, about=_ENGINE)},
    configs=CONFIGS,
    presets=PRESETS,
    folders=("pytorch-lightning",),
    main_script="train_lightning.py",
    conflicts=(
        "`--epoch` is the number of epochs; the code of the Lightning form trained 2.",
        "`--label-smoothing` is the share that is spread; that code took 1 minus that.",
        "`--validation-frequency` is the epochs between validations; the code also took every log "
        "point of such an epoch.",
        "`--model-cache-path` is used; the code misspelt its test of it.",
        "`efficientnet-b0-16ipu-mk2` has the 4 replicas of the README's table; its entry has none.",
        "`resnet50-16ipu-mk2-recompute` recomputes, as its name says; its entry did not.",
    ),
)
