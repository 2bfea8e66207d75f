"""Presets in runs shorter than they were made for, and how often those of TensorFlow 2 log."""

import pytest

from phalanx.assemble.dataset_summary import adapt_settings, plan_settings
from phalanx.catalog.datasets import DATASETS
from phalanx.config.presets import builtin_preset_folder, iterate_old_presets
from phalanx.config.read import Settings, read_settings
from phalanx.errors import ConfigError
from phalanx.plan.plan import DatasetCounts, Plan

pytestmark = pytest.mark.usefixtures("empty_folder")

PRESETS = sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))
NOT_TRAINED = "tf1/mk2_efficientnet_b4_16ipus_base"  # it has no splits
OLD = sorted({preset.full_name for preset in iterate_old_presets()} - {NOT_TRAINED})


def fitted(preset: str, images: int | None = None, **flags: object) -> tuple[Settings, Plan]:
    """The settings and the plan of a preset with the published counts, or with so many images."""
    texts = {name.replace("_", "-"): str(value) for name, value in flags.items()}
    settings = read_settings(preset, {"device": "cpu", **texts})
    published = DATASETS[settings.config.data.data].train_images
    counts = DatasetCounts(
        train_images=images or published or 1_281_167, valid_images=1000, classes=10
    )
    settings = adapt_settings(settings, counts)
    return settings, plan_settings(settings, counts)


@pytest.mark.parametrize("length", [{"epochs": 1}, {"steps": 2}], ids=str)
@pytest.mark.parametrize("name", [*PRESETS, *OLD])
def test_every_preset_trains_for_an_epoch_and_for_two_steps(name, length):
    _, plan = fitted(name, **length)
    assert plan.schedule.warmup < plan.total_steps
    assert max(plan.lr(step) for step in {0, plan.schedule.warmup}) > 0, "it learns"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_of_photographs_trains_on_a_few(name):
    if DATASETS[read_settings(name).config.data.data].any_size:
        _, plan = fitted(name, images=40_000, data="folder")
        assert plan.schedule.warmup < plan.total_steps


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_that_fits_is_left_as_it_is(name):
    settings, _ = fitted(name)
    assert settings.config == read_settings(name, {"device": "cpu"}).config
    assert settings.notes == ()


def test_a_warm_up_keeps_its_share_and_the_run_says_so():
    settings, plan = fitted("cifar10-resnet20", epochs=5)
    assert (plan.total_steps, plan.schedule.warmup) == (488, 488 * 5 // 120)
    assert settings.config.schedule.warmup_epoch == "20st", "the run stores what it became"
    assert settings.origins["warmup-epoch"] == "preset cifar10-resnet20, shortened"
    assert plan.warnings[0] == (
        "the preset's --warmup-epoch 5ep does not fit a run of 488 steps; it is shortened to "
        "20 steps, its share of the run"
    )
    assert fitted("cifar10-resnet20", epochs=6)[1].schedule.warmup == 489, "it fits, barely"


def test_a_warm_up_in_steps_keeps_its_share_of_the_presets_epochs():
    _, plan = fitted("tf1-efficientnet-b4-lars-gn", epochs=1)  # 14,596 of 72,983 steps
    assert plan.total_steps == 208
    assert plan.schedule.warmup == 208 * 14_596 // 72_983 == 41


def test_a_warm_up_whose_share_is_not_known_takes_a_tenth():
    settings, plan = fitted("tf1-resnet50-gn", images=20_480)  # 6,255 of 65 x 20 steps
    assert (plan.total_steps, plan.schedule.warmup) == (1300, 130)
    assert settings.notes[0].endswith("it is shortened to 130 steps, a tenth of the run")


def test_a_fall_is_shortened_with_its_warm_up():
    _, plan = fitted("tf2-resnet50-16k-bn", epochs=1)  # 5 and 95 of 100 epochs of 78 steps
    assert (plan.schedule.warmup, plan.schedule.length) == (78 * 5 // 100, 78 * 95 // 100)
    assert fitted("tf2-resnet50-16k-bn", epochs=50)[1].schedule.length == 95 * 78, "it fits"


def test_a_step_has_no_warm_up():
    settings, plan = fitted("demo", steps=1)
    assert plan.lr(0) == 0.15
    assert settings.notes == (
        "the preset's --warmup-epoch 1% does not fit a run of 1 step; there is no warm-up",
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"warmup-epoch": "5ep", "epochs": 5}, r"--warmup-epoch: 5ep is 489 steps, longer than "),
        ({"warmup-epoch": "500st", "epochs": 5}, r"--warmup-epoch: 500st is 500 steps, longer"),
        (
            {"lr-schedule": "step", "lr-drop-after": "0.5,0.75", "steps": 2},
            r"--lr-drop-after: 0.5 and 0.75 are both step 2 of a run of 2; train longer, or write",
        ),
    ],
)
def test_what_was_typed_is_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        fitted("cifar10-resnet20", **flags)


def test_a_file_of_ones_own_is_typed_and_what_it_extends_is_not(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: cifar10-resnet20\nepochs: 5\n")
    settings, plan = fitted("mine.yaml")
    assert (plan.schedule.warmup, len(settings.notes)) == (48, 1), "of its own length: a tenth"
    (tmp_path / "mine.yaml").write_text("data: cifar10\nwarmup-epoch: 7ep\nepochs: 5\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:2: warmup-epoch: 7ep is 5469 steps, longer"):
        fitted("mine.yaml")


def test_milestones_of_a_preset_keep_their_shares(tmp_path):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "mine.yaml").write_text(
        "data: cifar10\nlr-schedule: step\nlr-epoch-decay: 30,60,90\nepochs: 100\n"
    )
    settings, plan = fitted("mine", epochs=10)
    assert settings.config.schedule.lr_epoch_decay == "30%,60%,90%"
    assert plan.warnings[0] == (
        "the preset's --lr-epoch-decay 30,60,90 does not fit a run of 7,812 steps; it becomes "
        "30%,60%,90%, the same shares of this run"
    )
    assert plan.lr(7811) == pytest.approx(1e-4) and plan.lr(2300) == 0.1
    kept, _ = fitted("mine", epochs=91)
    assert kept.config.schedule.lr_epoch_decay == "30,60,90" and kept.notes == ()
    typed, _ = fitted("mine", epochs=10, lr_epoch_decay="30")
    assert typed.config.schedule.lr_epoch_decay == "30"


def test_the_fall_of_a_preset_shrinks_with_its_warm_up_and_a_note():
    settings, plan = fitted("tf2-resnet50-8k-bn", epochs=3)
    assert settings.config.schedule.lr_decay_length == f"{plan.total_steps}st"
    assert f"the preset's --lr-decay-length 100ep becomes {plan.total_steps}st" in plan.warnings[1]


SHAPES = ["cifar10-fast", "tf1-resnet8", "tf1-efficientnet-b4-g1", "tf2-resnet50-8k-bn"]


@pytest.mark.parametrize("name", [*SHAPES, "pl-resnet50-gn"])
@pytest.mark.parametrize("length", [{}, {"steps": 50}, {"epochs": 3}], ids=str)
def test_the_highest_rate_is_that_of_the_best_step(name, length):
    _, plan = fitted(name, images=3_000_000 if not length else None, **length)
    steps = min(plan.total_steps, 20_000)
    assert plan.schedule.find_highest() >= max(plan.lr(step) for step in range(0, steps, 7))
    if steps < 3000:
        assert plan.schedule.find_highest() == max(plan.lr(step) for step in range(steps))


# --- TensorFlow 2, "Periodic host events": CIFAR-10, micro-batch 8, accumulation 8 ---


def seed_001(logs: str, epochs: int = 6, **flags: object) -> Plan:
    options = {"epochs": epochs, "gradient-accumulation": 8, "logs-per-epoch": logs, **flags}
    return fitted("tf2-resnet8-sgd", **options)[1]


TF2 = [name for name in PRESETS if name.startswith("tf2-")]


@pytest.mark.parametrize("name", TF2)
def test_every_preset_of_seed_001_drops_the_tail(name):
    assert read_settings(name).config.data.epoch_tail == "drop"
    assert len(TF2) >= 9


@pytest.mark.parametrize(
    ("asked", "points", "becomes"),
    [("1", 6, ""), ("2", 6, "once"), ("10", 66, "11 times"), ("1/2", 3, ""), ("1/3", 2, "")],
)
def test_logs_of_seed_001(asked, points, becomes):
    plan = seed_001(asked)
    assert (plan.steps_per_epoch, plan.total_steps, plan.log.count()) == (781, 4686, points)
    told = [note for note in plan.warnings if note.startswith("--logs-per-epoch")]
    assert told == [
        f"--logs-per-epoch {asked}: 781 steps an epoch do not divide into {asked} equal parts; "
        f"the run will log {becomes} an epoch"
    ] * bool(becomes)


def test_no_logs_of_seed_001():
    plan = seed_001("0")
    assert plan.log.count() == 0
    assert plan.warnings[0].startswith("--logs-per-epoch 0: the whole run passes without a log")


def test_the_error_of_seed_001():
    with pytest.raises(ConfigError) as caught:
        seed_001("1/2", 5)
    assert str(caught.value) == (
        "--logs-per-epoch 1/2: cannot log 2 epochs at a time over 5 epochs; 1/5 would work, or 4 "
        "or 6 epochs"
    )


@pytest.mark.parametrize(
    ("option", "verb"), [("logs-per-epoch", "log"), ("ckpts-per-epoch", "save")]
)
def test_with_a_carried_tail_a_note_says_why_nothing_is_rounded(option, verb):
    carried = {"epochs": 6, "gradient-accumulation": 8, "epoch-tail": "carry", option: "2"}
    _, plan = fitted("tf2-resnet8-sgd", **carried)
    told = [note for note in plan.warnings if "-per-epoch" in note]
    assert told == [
        f"--{option} 2: an epoch has 781.25 steps, so the run does not {verb} at equal intervals; "
        "--epoch-tail drop gives epochs of whole steps and rounds the rate to one that divides them"
    ]


def test_a_rate_that_nobody_typed_is_not_told_of():
    _, plan = fitted("cifar10-resnet20")
    assert plan.warnings == ()


def test_an_average_that_a_preset_asks_for_is_left_out_of_a_run_with_one_checkpoint():
    name = "mk2_efficientnet_b4_g16_16ipus"
    settings, _ = fitted(name, epochs=1)
    run = settings.config.run
    assert (run.weight_avg_strategy, run.weight_avg_n) == ("none", None)
    assert settings.origins["weight-avg-strategy"] == "default"
    assert settings.notes[-1] == (
        "the preset's --weight-avg-strategy exponential is left out: the run makes only 1 "
        "checkpoint"
    )
    settings, _ = fitted(name, epochs=2)
    assert settings.config.run.weight_avg_strategy == "exponential"
    with pytest.raises(ConfigError, match="2 checkpoints are needed and the run makes 1"):
        fitted(name, epochs=1, weight_avg_strategy="mean")
