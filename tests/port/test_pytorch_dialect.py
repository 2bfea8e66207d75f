"""PyTorch and its Lightning form: configurations, rates, other scripts, launchers, mistakes."""

import json

import pytest
from small_ports import port

from phalanx.cli.main import main
from phalanx.config.presets import is_preset
from phalanx.dialects.pytorch import LIGHTNING, PYTORCH
from phalanx.dialects.pytorch_configs import CONFIGS, PRESETS

README = """
config seed batch-size model data imagenet-data-path pipeline-splits replicas
device-iterations precision half-partial available-memory-proportion gradient-accumulation lr
epoch norm-type norm-num-groups full-precision-norm enable-fast-groupnorm
disable-stable-batchnorm validation-mode validation-frequency disable-metrics
enable-recompute recompute-checkpoints offload-optimizer lr-schedule lr-decay lr-epoch-decay
warmup-epoch checkpoint-path optimizer momentum optimizer-eps loss-scaling
initial-loss-scaling enable-stochastic-rounding weight-decay wandb logs-per-epoch
label-smoothing lr-scheduler-freq weight-avg-strategy weight-avg-exp-decay weight-avg-N
rmsprop-decay efficientnet-expand-ratio efficientnet-group-dim profile
loss-velocity-scaling-ratio use-bbox-info eight-bit-io normalization-location
dataloader-rebatch-size iterations model-cache-path
"""  # the options that the README lists
OLD_PRESETS = [name for name in CONFIGS if not PRESETS.get(name, name).startswith("pl-")]
ARITHMETIC = {  # stages, replicas, global batch, steps of an epoch
    "resnet50_mk2_pipelined": (4, 4, 16_384, 78),
    "resnet50-16ipu-mk2-recompute": (1, 16, 1024, 1251),
    "efficientnet-b0-16ipu-mk2": (4, 4, 8192, 156),
    "efficientnet-b0-g16-gn-16ipu-mk2": (2, 8, 768, 1668),
    "resnet50_mk2_pipelined_pod64": (4, 16, 16_384, 78),
    "resnet50-pod4": (1, 4, 16_416, 78),
    "efficientnet-b0-g16-gn-pod16": (2, 8, 800, 1601),
    "efficientnet-b4-g1-gn-pod16": (4, 4, 768, 1668),
}
RATES = {  # by config and epoch
    "resnet50_mk2_pipelined": {
        1: 0.399901, 2.5: 0.998459, 5: 1.987688, 10: 1.951057, 50: 1.0, 75: 0.292893, 90: 0.048943
    },
    "efficientnet-b0-g16-gn-16ipu-mk2": {
        1: 0.0093702, 5: 0.0440821, 10: 0.0414769, 100: 0.0130356, 350: 5.1634e-4
    },
}  # fmt: skip


def refuse(capsys, line: str) -> str:
    """What is said about a command that cannot be ported."""
    assert main(["port", line]) == 2
    return str(capsys.readouterr().err)


def test_the_list_of_the_readme_is_in_the_table():
    names = {row.name for row in LIGHTNING.scripts["train_lightning.py"].options}
    assert len(README.split()) == 56
    assert set(README.split()) <= names


# --- named configurations ---


def test_all_configurations_are_known():
    assert len(CONFIGS) == 18
    assert len(OLD_PRESETS) == 10
    for name in CONFIGS:
        assert is_preset(PRESETS.get(name, name))


@pytest.mark.parametrize("name", OLD_PRESETS)
def test_a_configuration_is_its_preset_and_nothing_else(name, capsys):
    answer = port(capsys, f"python3 train_lightning.py --config {name}")
    assert answer["command"][2:] in ([name], [f"pl/{name}"])
    assert answer["problem"] is None


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_configuration_has_the_numbers_it_had(name, capsys):
    stages, replicas, batch, per_epoch = ARITHMETIC[name]
    answer = port(capsys, f"python3 train.py --config {name}")
    assert answer["dialect"] == "pytorch"
    resolved, plan = answer["resolved"], answer["plan"]
    splits = resolved["pipeline-splits"]
    assert 1 + len([s for s in (splits or "none").split(",") if s != "none"]) == stages
    assert (resolved["replicas"], plan["global_batch"]) == (replicas, batch)
    assert plan["total_steps"] == per_epoch * resolved["epochs"]


@pytest.mark.parametrize("name", RATES)
def test_a_configuration_has_the_rates_it_had(name, capsys):
    answer = port(capsys, f"python3 train_lightning.py --config {name}")
    per_epoch = ARITHMETIC[name][3]
    steps = {round(epoch * per_epoch): rate for epoch, rate in RATES[name].items()}
    line = [*answer["command"][2:], "--at", ",".join(map(str, steps)), "--json", "--no-memory"]
    assert main(["plan", *line]) == 0
    points = json.loads(capsys.readouterr().out)["at"]
    assert {p["step"]: p["lr"] for p in points} == pytest.approx(steps, rel=2e-5)


# --- launchers, spellings, other scripts ---


def test_options_and_a_launcher_are_laid_over_a_configuration(capsys):
    line = (
        "poprun --num-instances=8 --num-replicas=16 python3 train_lightning.py --config resnet50 "
        "--imagenet-data-path $DATASETS_DIR/imagenet-raw-dataset --epoch 2 --validation-mode none "
        "--dataloader-worker 14 --dataloader-rebatch-size 256"
    )
    answer = port(capsys, line)
    resolved = answer["resolved"]
    expected = {"replicas": 16, "epochs": 2, "workers": 14, "dataloader-rebatch-size": 256}
    assert {name: resolved[name] for name in expected} == expected
    assert answer["command"][2] == "pl/resnet50"
    replicas = port(capsys, f"{line} --replicas 2")["resolved"]["replicas"]
    assert replicas == 16  # of the launcher, as it was there


def test_prefixes_are_understood(capsys):
    answer = port(capsys, "python3 train_lightning.py --replica 2 --device-iteration 4")
    assert (answer["resolved"]["replicas"], answer["resolved"]["device-iterations"]) == (2, 4)


@pytest.mark.parametrize(
    ("line", "dialect"),
    [
        ("python3 train.py --data imagenet --lr 0.1", "pytorch"),
        ("python3 train.py --model resnet50 --imagenet-data-path D", "pytorch"),
        ("python3 train.py --model resnet --dataset imagenet", "tf1"),
        ("python3 train.py --dataset imagenet --micro-batch-size 4 --num-replicas 2", "tf2"),
        ("python3 applications/pytorch/cnns/train/train.py --replicas 2", "pytorch"),
        ("python3 restore.py --checkpoint-path run/resnet50_imagenet_3.pt", "pytorch"),
        ("python3 restore.py --restore-path logs/RN20", "tf1"),
        ("python3 weight_avg.py --checkpoint-path run", "pytorch"),
        ("python3 train_lightning.py --epoch 2", "lightning"),
    ],
)
def test_a_program_is_told_by_its_script_and_options(line, dialect, capsys):
    assert port(capsys, line)["dialect"] == dialect


def test_the_lightning_form_says_what_drives_it(capsys):
    first = port(capsys, "python3 train_lightning.py --epoch 2")["options"][0]
    assert first["old"] == "train_lightning.py"
    assert "--engine lightning" in first["why"]


def test_the_readme_counts_where_the_lightning_code_differs(capsys):
    answer = port(capsys, "python3 train_lightning.py --epoch 7 --label-smoothing 0.1")
    whys = {row["old"]: row["why"] for row in answer["options"]}
    assert "README" in whys["--epoch 7"] and "README" in whys["--label-smoothing 0.1"]
    answer = port(capsys, "python3 train.py --epoch 7 --data imagenet")
    assert all("README" not in row["why"] for row in answer["options"])


def test_other_scripts(capsys):
    def words(line: str) -> list[str]:
        return list(port(capsys, line)["command"][1:])

    assert words("python3 validate.py --checkpoint-path run") == ["validate", "run", "--all"]
    scored = port(capsys, "python3 validate.py --checkpoint-path run/resnet50_imagenet_3.pt")
    assert any("phalanx port weights" in text for text in scored["warnings"])
    resumed = ["train", "--resume", "run"]
    assert words("python3 restore.py --checkpoint-path run") == resumed
    assert words("python3 restore.py --checkpoint-path run/resnet50_imagenet_3.pt") == resumed
    averaged = "python3 weight_avg.py --checkpoint-path run --weight-avg-strategy exponential"
    assert words(f"{averaged} --weight-avg-exp-decay 0.9 --weight-avg-N 4") == [
        "average", "run", "--weight-avg-strategy", "exponential", "--weight-avg-exp-decay", "0.9",
        "--weight-avg-n", "4",
    ]  # fmt: skip
    assert len(PYTORCH.scripts) == 4


def test_too_short_a_pipeline_is_told(capsys):
    answer = port(capsys, "python3 train_lightning.py --data imagenet --pipeline-splits layer2/0")
    assert any("--gradient-accumulation 4" in text for text in answer["warnings"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--learning-rate 0.1", "no such option"),
        ("--lr-s cosine", "--lr-schedule"),
        ("--lr", "expected a value"),
        ("--lr high", "expected a number"),
        ("--data imagnet", "did you mean imagenet?"),
        ("--optimizer lars", "no such choice"),
        ("--model mobilenet", "no MobileNet"),
    ],
)
def test_mistakes_are_told(options, said, capsys):
    assert said in refuse(capsys, f"python3 train_lightning.py {options}")
