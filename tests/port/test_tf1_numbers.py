"""The arithmetic of TensorFlow 1: batches, lengths and rates against published figures."""

import json

import pytest
from small_ports import find_last_row, port

from phalanx.cli.main import main
from phalanx.config.presets import builtin_preset_folder
from phalanx.config.text import read_option_file
from phalanx.dialects.tf1_configs import CONFIGS
from phalanx.port.dialect_choice import DIALECTS
from phalanx.port.match import match_words

ORACLES = {  # config: global batch, whole steps of an epoch, all steps, peak rate, warm-up
    "mk2_resnet50_gn_16ipus": (1024, 1251, 81_324, 0.5, 6255),
    "mk2_resnet50_gn_64ipus": (1024, 1251, 81_324, 0.5, 6255),
    "mk2_resnet50_bn_16ipus": (16_384, 78, 7819, 2.0, 390),
    "mk2_resnet50_bn_64ipus": (16_384, 78, 7819, 2.0, 390),
    "mk2_resnet50_bn_128ipus": (16_384, 78, 7819, 2.0, 390),
    "mk2_resnext101_16ipus": (768, 1668, 200_182, 0.375, 8340),
    "mk2_efficientnet_b4_g16_16ipus": (800, 1601, 560_510, 0.048828125, 8007),
    "mk2_resnet50_mlperf_pod16_bs20": (1920, 667, 29_360, 3.824, 3336),
    "mk1_resnet50_16ipus": (1024, 1251, 81_324, 0.5, 6255),
}
RATES = {  # config: rates at some steps
    "mk2_resnet50_gn_16ipus": {1251: 0.0999416, 6255: 0.4927371, 40_662: 0.25},
    "mk2_resnet50_mlperf_pod16_bs20": {1668: 1.912, 14_680: 1.216876},
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_config_has_the_numbers_it_had(name, capsys):
    batch, per_epoch, total, peak, warmup = ORACLES[name]
    answer = port(capsys, f"python3 train.py --config {name}")
    plan = answer["plan"]
    assert (plan["global_batch"], plan["total_steps"]) == (batch, total)
    assert int(float(plan["steps_per_epoch"])) == per_epoch
    assert plan["lr_peak"] == pytest.approx(peak, rel=1e-9)
    assert plan["warmup_steps"] == warmup


@pytest.mark.parametrize("name", RATES)
def test_a_config_has_the_rates_it_had(name, capsys):
    answer = port(capsys, f"python3 train.py --config {name}")
    steps = ",".join(map(str, RATES[name]))
    line = [*answer["command"][2:], "--at", steps, "--json", "--no-memory"]
    assert main(["plan", *line]) == 0
    points = json.loads(capsys.readouterr().out)["at"]
    assert {p["step"]: p["lr"] for p in points} == pytest.approx(RATES[name], rel=1e-5)


def test_a_warm_up_that_outlasts_the_run_gives_the_old_rate_at_every_step(capsys):
    """5 epochs of warm-up in a run of one: the old rate was peak x step / warm-up."""
    text = "python train.py --model resnet --dataset cifar-10 --epochs 1 --batch-size 100"
    answer = port(capsys, text)
    peak, total, warmup = 2**-6 * 100, 500, 2500
    assert answer["plan"]["total_steps"] == total
    assert main(["plan", *answer["command"][2:], "--at", "0,100,499", "--json", "--no-memory"]) == 0
    points = json.loads(capsys.readouterr().out)["at"]
    drops = {0: 1.0, 100: 1.0, 499: 0.01}
    for point in points:
        step = point["step"]
        assert point["lr"] == pytest.approx(peak * step / warmup * drops[step], rel=1e-8)


def test_all_configs_are_understood_and_plan(capsys):
    assert len(CONFIGS) == 22
    table = DIALECTS["tf1"].scripts["train.py"].options
    for name, text in CONFIGS.items():
        matched = match_words(text.split(), table)
        assert not matched.problems, name
        answer = port(capsys, "--dialect", "tf1", f"python3 train.py --config {name}")
        assert answer["problem"] is None, name
        assert answer["command"][2] in (name, f"tf1/{name}")
        added = {word for word in answer["command"][3:] if word.startswith("--")}
        assert added <= {"--validation", "--lr-scheduler-freq", "--pipeline-splits"}, name


def test_what_a_preset_sets_is_set_by_the_port_as_well(capsys):
    """Else a command that begins with the preset would keep what the old program did not do."""
    presets = sorted(builtin_preset_folder().glob("tf1-*.yaml"))
    assert len(presets) >= 12
    texts = [
        "python train.py --model resnet --model-size 50 --dataset imagenet",
        "python train.py --model resnet --dataset cifar-10",
        "python train.py --model resnext --dataset imagenet --batch-norm",
        "python train.py --model efficientnet --dataset imagenet --optimiser RMSprop",
    ]
    left = {  # without effect unless another option is set, which the port sets
        "lr-decay", "lr-drop-after", "lr-power", "lr-end-ratio", "rmsprop-decay", "rmsprop-start",
        "optimizer-eps", "trust-coefficient", "trust-decay", "smoothing-over", "norm-num-groups",
        "batchnorm-momentum", "shards", "lr", "extends",
    }  # fmt: skip
    for text in texts:
        answer = port(capsys, text)
        base = answer["command"][2]
        for path in presets:
            if path.stem != base:
                continue
            values = read_option_file(path, origin="").values
            resolved = set(values) - left
            assert resolved
            said = set(answer["decided"])
            assert resolved <= said, f"{base}: {resolved - said}"


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("--epochs 3 --epochs-per-ckpt 2 --weight-avg-N 2", "2"),  # after epoch 2 and at the end
        ("--epochs 5 --epochs-per-ckpt 2 --weight-avg-N 1", "2"),  # after epoch 4 and at the end
        ("--epochs 10 --weight-avg-N 2", "3"),
        ("--epochs 5 --epochs-per-ckpt 4 --ckpt-epochs-offset 1 --weight-avg-N 5", "2"),
        ("--epochs 2 --epochs-per-ckpt 2 --weight-avg-N 2", None),  # only the one at the end
        ("--epochs 4 --ckpts-per-epoch 0 --epochs-per-ckpt 0 --weight-avg-N 2", None),
    ],
)
def test_an_average_takes_the_last_checkpoint_as_well(options, count, capsys):
    answer = port(capsys, f"python train.py --dataset cifar-10 {options}")
    assert answer["decided"].get("weight-avg-n") == count


@pytest.mark.parametrize(("data", "is_told"), [("cifar-10", True), ("imagenet", False)])
def test_that_norms_do_not_decay_is_told_where_they_did(data, is_told, capsys):
    answer = port(capsys, f"python train.py --dataset {data} --weight-decay 1e-4")
    row = find_last_row(answer)
    assert row["new"] == "--l2-regularization 1e-4"
    assert ("norms and biases, which it decayed too, are left out" in row["why"]) is is_told
