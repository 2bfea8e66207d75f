"""TensorFlow 2: named configurations, rates and batches, log points, other scripts, mistakes."""

from fractions import Fraction

import pytest
from small_ports import port

from phalanx.cli.main import main
from phalanx.config.schema import OPTIONS
from phalanx.dialects.table import OldValues
from phalanx.dialects.tf2_params import port_schedule
from phalanx.dialects.tf2_table import CONFIGS, TRAIN_TABLE
from phalanx.dialects.tf2_values import count_accumulation, count_batch
from phalanx.plan.schedule import Schedule, find_peak_lr, make_schedule, read_schedule_options
from phalanx.units import RunLength

LOGS = (
    "python3 train.py --model cifar_resnet8 --num-epochs {epochs} --precision 16.16 "
    "--micro-batch-size 8 --validation False --half-partials True --gradient-accumulation 8 "
    "--logs-per-epoch {logs}"
)
ARITHMETIC = {  # updates an epoch, global batch, the highest rate
    "resnet50_16ipus_8k_bn_pipeline": (156, 8192, 1.0),
    "resnet50_16ipus_16k_bn_pipeline": (78, 16384, 2.0),
    "resnet50_mlperf_bs16": (556, 2304, 4.588),
    "resnet50_mlperf_pod16_bs20": (667, 1920, 3.8233333),
    "resnet50_mlperf_pod16_lars": (370, 3456, 10.525092),
}


def refuse(capsys, *words: str) -> str:
    """What is said about a command that cannot be ported."""
    assert main(["port", "--dialect", "tf2", " ".join(["python3 train.py", *words])]) == 2
    return str(capsys.readouterr().err)


# --- named configurations ---


def test_all_configurations_are_known():
    assert len(CONFIGS) == 18


@pytest.mark.parametrize("name", [name for name in CONFIGS if "infer" not in name])
def test_a_configuration_is_its_preset_and_nothing_else(name, capsys):
    answer = port(capsys, "--dialect", "tf2", f"python3 train.py --config {name}")
    assert answer["command"][2:] in ([name], [f"tf2/{name}"])
    assert answer["problem"] is None


@pytest.mark.parametrize("name", [name for name in CONFIGS if "infer" in name])
def test_an_entry_for_inference_has_a_warm_up_longer_than_its_run(name, capsys):
    answer = port(capsys, "--dialect", "tf2", f"python3 train.py --config {name}")
    assert [word for word in answer["command"] if word.startswith("--")] == [
        "--lr-per-image",
        "--warmup-epoch",
    ]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_batches_and_rates_are_those_of_the_old_program(name, capsys):
    updates, batch, rate = ARITHMETIC[name]
    answer = port(capsys, "--dialect", "tf2", f"python3 train.py --config {name}")
    plan = answer["plan"]
    assert plan["global_batch"] == batch
    assert plan["total_steps"] == updates * answer["resolved"]["epochs"]
    assert answer["resolved"]["lr-per-image"] * batch == pytest.approx(rate, rel=1e-6)


def test_options_are_laid_over_a_configuration(capsys):
    words = "--config resnet50_mlperf_pod4_bs20 --num-epochs 5 --logs-per-epoch 1 --validation no"
    answer = port(capsys, f"python3 train.py {words}")
    assert answer["resolved"]["epochs"] == 5
    assert answer["resolved"]["warmup-epoch"] == "13345st"  # five epochs still, all of the run
    assert answer["plan"]["warmup_steps"] == answer["plan"]["total_steps"] == 13_345
    answer = port(capsys, "python3 train.py --config resnet50_mlperf_pod4_bs20 --num-replicas 8")
    assert answer["resolved"]["gradient-accumulation"] == 3  # 480 images, as the entry says


# --- batches and rates ---


def values_of(**given: str) -> OldValues:
    return OldValues(TRAIN_TABLE, {n.replace("_", "-"): t for n, t in given.items()}, {})


@pytest.mark.parametrize(
    ("given", "accumulation", "batch"),
    [
        ({"gradient_accumulation_count": "2", "num_replicas": "4"}, 2, 24),
        ({"global_batch_size": "12", "num_replicas": "2"}, 2, 12),
        ({"global_batch_size": "10", "num_replicas": "2"}, 2, 12),  # rounded
        ({}, 1, 3),
    ],
)
def test_the_accumulation_makes_the_global_batch(given, accumulation, batch):
    values = values_of(micro_batch_size="3", **given)
    assert count_accumulation(values) == accumulation
    assert count_batch(values) == batch


def test_a_rounded_global_batch_is_told(capsys):
    words = "--micro-batch-size 3 --num-replicas 2 --global-batch-size 10"
    answer = port(capsys, "--dialect", "tf2", f"python3 train.py {words}")
    assert "rounded to 12" in answer["warnings"][0]
    assert answer["plan"]["global_batch"] == 12


def schedule_of(capsys, options: str, *, epochs: int = 6) -> Schedule:
    """The schedule of a ported command with steps of 500 images of CIFAR-10: 100 an epoch."""
    line = f"python3 train.py --micro-batch-size 500 --num-epochs {epochs} {options}"
    answer = port(capsys, "--dialect", "tf2", line)
    assert answer["problem"] is None
    from phalanx.config.train_options import ScheduleConfig

    section = ScheduleConfig.model_validate(
        {n: v for n, v in answer["resolved"].items() if OPTIONS[n].section == "schedule"}
    )
    run = RunLength(answer["plan"]["total_steps"], Fraction(100))
    return make_schedule(
        read_schedule_options(section), find_peak_lr(section, global_batch=500), run
    )


COSINE = "--lr-schedule cosine --lr-schedule-params '{initial_learning_rate: 0.002, "
WARMUP = "--lr-warmup-params '{warmup_mode: %s, warmup_epochs: %s}'"


def test_a_warm_up_that_shifts_counts_from_its_end(capsys):
    options = f"{COSINE}epochs_to_total_decay: 5}}' {WARMUP % ('shift', 0.09)}"
    plain = schedule_of(capsys, f"{COSINE}epochs_to_total_decay: 5}}'")
    shifted = schedule_of(capsys, options)
    assert [shifted.lr(step) for step in (0, 1, 4, 9, 10)] == pytest.approx(
        [1 / 10, 2 / 10, 1 / 2, plain.lr(0), plain.lr(1)]
    )


def test_a_warm_up_that_masks_runs_along(capsys):
    plain = schedule_of(capsys, f"{COSINE}epochs_to_total_decay: 5}}'")
    masked = schedule_of(capsys, f"{COSINE}epochs_to_total_decay: 5}}' {WARMUP % ('mask', 0.09)}")
    assert masked.lr(4) == pytest.approx(plain.lr(4) / 2)
    assert masked.lr(9) == plain.lr(9)


def test_a_cosine_falls_for_as_long_as_it_is_told(capsys):
    falling = schedule_of(capsys, f"{COSINE}epochs_to_total_decay: 5}}'")
    assert [falling.lr(step) for step in (0, 250, 500, 599)] == pytest.approx([1, 0.5, 0, 0])
    steps = schedule_of(capsys, f"{COSINE}epochs_to_total_decay: 5}}' --lr-staircase")
    assert steps.lr(199) == falling.lr(100)


def test_rates_in_steps_fall_after_their_boundaries_and_ignore_the_batch(capsys):
    options = "--lr-schedule stepped --lr-schedule-params "
    stepped = schedule_of(capsys, options + "'{boundaries: [2, 4.5], values: [0.5, 0.1, 0.02]}'")
    rates = [stepped.lr(step) for step in (0, 200, 201, 450, 451)]
    assert rates == pytest.approx([0.5, 0.5, 0.1, 0.1, 0.02])


def test_a_polynomial_ends_at_its_share(capsys):
    options = "--lr-schedule polynomial --lr-schedule-params "
    falling = schedule_of(
        capsys,
        options + "'{initial_learning_rate: 0.002, epochs_to_total_decay: 4, "
        "end_learning_rate_ratio: 0.01, power: 2}'",
    )
    assert falling.lr(200) == pytest.approx(0.99 * 0.25 + 0.01)
    assert falling.lr(400) == pytest.approx(0.01)


def test_a_warm_up_that_outlasts_the_run_reaches_its_share(capsys):
    options = f"{COSINE}epochs_to_total_decay: 5}}' {WARMUP % ('shift', 3)}"
    cut = schedule_of(capsys, options, epochs=2)
    assert cut.lr(0) == pytest.approx(1 / 301)
    assert cut.lr(199) == pytest.approx(200 / 301)


def test_a_rate_is_one_of_the_image():
    effect = port_schedule("", values_of(micro_batch_size="20"))
    assert effect.flags["lr-per-image"] == "0.0001"
    assert effect.why == "0.0001 x 20 images = 0.002"


# --- log points ---


@pytest.mark.parametrize(
    ("logs", "points", "reads", "note"),
    [
        ("1", 6, 781, ""),
        ("2", 6, 781, "log once an epoch"),
        ("10", 66, 512, "log 11 times an epoch"),
        ("1/2", 3, 1562, ""),
        ("1/3", 2, 2343, ""),
        ("0", 0, 4686, "without a log point"),
    ],
)
def test_log_points_are_those_of_the_readme(logs, points, reads, note, capsys):
    answer = port(capsys, LOGS.format(epochs=6, logs=logs))
    assert answer["plan"]["log_points"] == points
    assert answer["resolved"]["device-iterations"] == reads
    said = [text for text in answer["notes"] if "--logs-per-epoch" in text]
    assert [note in text for text in said] == [True] * bool(note)


def test_log_points_that_do_not_fill_the_run_are_refused(capsys):
    line = LOGS.format(epochs=5, logs="1/2")
    answer = port(capsys, line)
    assert "cannot log 2 epochs at a time over 5 epochs" in answer["problem"]
    refused = "It is not possible to log 2.0 epochs a time for 5 epochs"
    assert any(refused in warning for warning in answer["warnings"])
    assert main(["port", line]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"it would not start: {answer['problem']}" in printed
    assert main(["port", "--run", line]) == 2
    printed = capsys.readouterr().err
    assert answer["problem"] in printed
    assert refused in printed


# --- scripts ---


def test_only_scoring_is_another_command(capsys):
    words = "--training False --checkpoint-input-dir old --validation-micro-batch-size 8"
    answer = port(capsys, f"python3 train.py {words}")
    assert answer["line"] == "phalanx validate old --all --valid-batch-size 8"
    assert answer["warnings"] == ["old: there is no such run here"]


def test_requests_are_sent_as_there(capsys):
    line = "python3 send_request.py --config resnet50_infer_bs16 --batch-size 16 --num-threads 32"
    answer = port(capsys, f"{line} --port 8502 --use-async --verbose False")
    assert answer["line"] == (
        "phalanx request --serve resnet50_infer_bs16 --batch-size 16 --num-threads 32 --use-async "
        "--num-images 1000"
    )
    assert "random weights" in answer["warnings"][0]


def test_an_export_is_a_checked_file(capsys):
    line = "python3 scripts/export_for_serving.py --config resnet50_infer_bs16 --export-dir out/"
    answer = port(capsys, line)
    assert answer["line"] == (
        "phalanx export resnet50_infer_bs16 --out out/resnet50_infer_bs16.onnx --format onnx "
        "--max-batch 16 --dtype float16 --with-preprocessing"
    )
    answer = port(capsys, f"{line} --checkpoint-input-path epoch_2.0.h5")
    assert answer["command"][2] == "resnet50_infer_bs16"
    assert "--init-weights weights.safetensors" in answer["line"]
    assert answer["warnings"] == [
        "--checkpoint-input-path epoch_2.0.h5: `phalanx port weights epoch_2.0.h5` turns it into "
        "weights.safetensors first"
    ]
    assert port(capsys, f"{line} --checkpoint-input-path runs/a")["command"][2] == "runs/a"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (
            "export_for_serving.py --export-dir e --dataset imagenet",
            "export imagenet_config --model resnet18 --out e/resnet18.onnx --format onnx",
        ),
        (
            "send_request.py --dataset cifar100 --num-images 9",
            "request --serve cifar10_config --data cifar100 --num-images 9 --model resnet18 "
            "--batch-size 1 --num-threads 2",
        ),
    ],
)
def test_the_network_that_is_served_is_the_one_that_was_named(line, command, capsys):
    answer = port(capsys, f"python3 {line} --model-name resnet18")
    assert sorted(answer["line"].split()) == sorted(f"phalanx {command}".split())


@pytest.mark.parametrize(
    ("line", "dialect"),
    [
        ("python3 train.py", "tf2"),  # the other one never started without data
        ("DATA_DIR=/mnt python3 train.py", "tf1"),
        ("python3 train.py --model resnet --dataset imagenet", "tf1"),
        ("python3 train.py --model cifar_resnet8", "tf2"),
        ("python3 train.py --micro-batch-size 8 --dataset cifar10", "tf2"),
        ("python3 examples/vision/cnns/tensorflow2/train.py --seed 3", "tf2"),
        ("python3 train.py --config resnet50_16ipus_8k_bn_pipeline", "tf2"),
    ],
)
def test_the_program_is_told_by_its_options(line, dialect, capsys):
    assert port(capsys, line)["dialect"] == dialect


# --- mistakes ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--micro-batchsize 8", "--micro-batchsize: the old program has no such option; did you"),
        ("--lr-s const", "may stand for --lr-schedule, --lr-schedule-params, --lr-staircase"),
        ("--validation perhaps", "perhaps: is not an option"),
        ("--validation=perhaps", "expected true or false"),
        ("--global-batch-size 8 --gradient-acc 2", "only one of them may be given"),
        ("--precision 32.16", "--precision 32.16: the old program has no such choice"),
        ("--model resnet51", "did you mean resnet50?"),
        ("--optimizer-params momentum=0.9", "expected parameters in braces"),
        ("--optimizer-params '{momentum: a}'", "momentum: expected a number, got 'a'"),
        ("--optimizer-params '{momentum: 0, nesterov: 1}'", "has no parameter nesterov"),
        ("--optimizer lars", "--optimizer lars needs weight_decay, eeta, epsilon, too"),
        ("--lr-schedule cosine", "--lr-schedule cosine needs epochs_to_total_decay, too"),
        ("--lr-schedule-params '{initial_lr: 1}'", "needs initial_learning_rate"),
        ("--lr-warmup-params '{warmup_mode: up, warmup_epochs: 1}'", "shift or mask, not up"),
        ("--norm-layer '{name: layer_norm}'", "name 'layer_norm'"),
        ("--norm-layer '{name: group_norm}'", "num_groups or channels_per_group"),
        ("--logs-per-epoch=-1", "cannot be negative"),
        ("--logs-per-epoch often", "expected times per epoch"),
        ("--num-epochs", "--num-epochs: expected a value after it"),
        ("--num-epochs $EPOCHS_NOT_SET", "set the variable, or write the value itself"),
        ("--validation $ALSO_NOT_SET", "set the variable, or write the value itself"),
        ("--model-name=<model>", "set the variable, or write the value itself"),
    ],
)
def test_a_mistake_is_told(options, message, capsys):
    assert message in refuse(capsys, options)


def test_a_number_may_be_a_variable_that_is_set(capsys, monkeypatch):
    monkeypatch.setenv("EPOCHS_HERE", "4")
    assert port(capsys, "python3 train.py --num-epochs $EPOCHS_HERE")["resolved"]["epochs"] == 4


@pytest.mark.parametrize("word", ["false", "F", "0", "no", "n", "OFF"])
def test_words_for_no(word, capsys):
    answer = port(capsys, f"python3 train.py --validation {word} --num-epochs 1")
    assert answer["resolved"]["validation-mode"] == "none"


@pytest.mark.slow
@pytest.mark.parametrize("logs", ["1", "2", "10", "1/2", "1/3", "0"])
def test_the_lines_about_log_points_run(logs, tmp_path):
    shrunk = "--data generated --iterations 8 --precision 32.32 --device cpu --threads 1"
    words = ["port", "--run", *shrunk.split(), "--run-dir", str(tmp_path / "run")]
    assert main([*words, LOGS.format(epochs=6, logs=logs)]) == 0
