"""All batch arithmetic, against the numbers one would work out by hand."""

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import product

import pytest

from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from phalanx.plan.machine import count_cores, resolve_device
from phalanx.plan.machine_choice import MachineChoice, choose_machine
from phalanx.plan.plan import DatasetCounts, make_plan

CPU = MachineChoice(device="cpu", precision="32.32", threads=1)


def plan_for(images: int = 8000, *, preset: str = "demo", **options: object):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    facts = DatasetCounts(train_images=images, valid_images=images // 4, classes=10)
    return make_plan(read_settings(preset, flags).config, facts, CPU)


@pytest.mark.parametrize(
    ("micro", "accumulation", "replicas"), list(product([1, 7, 64], [1, 3], [1, 2, 8]))
)
def test_a_global_batch_is_micro_batch_by_accumulation_by_replicas(micro, accumulation, replicas):
    plan = plan_for(batch_size=micro, gradient_accumulation=accumulation, replicas=replicas)
    assert plan.global_batch == micro * accumulation * replicas
    assert (plan.micro_batch, plan.accumulation, plan.replicas) == (micro, accumulation, replicas)
    assert plan.total_steps == 8 * 8000 // plan.global_batch


def test_the_same_global_batch_gives_the_same_numbers():
    names = ("global_batch", "total_steps", "steps_per_epoch", "schedule", "log", "save")
    spread = plan_for(batch_size=16, replicas=4)
    folded = plan_for(batch_size=16, gradient_accumulation=4)
    assert [getattr(spread, name) for name in names] == [getattr(folded, name) for name in names]


@pytest.mark.parametrize(
    ("images", "batch", "epochs"),
    list(product([40, 64, 100, 999], [1, 3, 10], ["1", "2", "0.5", "2.7", "0.3"])),
)
def test_steps_with_a_carried_and_a_dropped_tail(images, batch, epochs):
    length = Fraction(epochs)
    warm = {"warmup_epoch": "0ep"}
    carried = plan_for(images, batch_size=batch, epochs=epochs, **warm)
    assert carried.total_steps == math.floor(length * images / batch)
    assert carried.total_steps * batch <= length * images < (carried.total_steps + 1) * batch
    if math.floor(length * (images // batch)):
        dropped = plan_for(images, batch_size=batch, epochs=epochs, epoch_tail="drop", **warm)
        assert dropped.total_steps == math.floor(length * (images // batch))
        assert dropped.steps_per_epoch == images // batch


def test_decimal_epochs_never_cost_a_step():
    # 0.07 * 100 is 7.000000000000001 in floating point, 0.29 * 100 is 28.999999999999996
    steps = [plan_for(100, batch_size=1, epochs=e).total_steps for e in ("0.29", "0.57", "0.58")]
    assert steps == [29, 57, 58]


def test_steps_that_are_asked_for_are_taken():
    plan = plan_for(8000, steps=333)
    assert plan.total_steps == 333
    assert plan.epochs == pytest.approx(333 / 125)
    assert plan.epoch_at(125) == 1.0


def test_less_than_one_step_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"--epochs: 0\.001 .*less than one step; .*--batch-size"):
        plan_for(8000, epochs=0.001)
    with pytest.raises(ConfigError, match=r"--epoch-tail drop: 63 images .*64; make it 63"):
        plan_for(63, epoch_tail="drop")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("2ep", 250),
        ("2", 250),
        ("17st", 17),
        ("10%", 100),
        ("0.5ep", 63),
        ("0ep", 0),
        ("8ep", 1000),
    ],
)
def test_warmup_in_epochs_steps_and_percent(text, steps):
    assert plan_for(warmup_epoch=text).schedule.warmup == steps


@pytest.mark.parametrize("text", ["8.1ep", "1001st"])
def test_a_warmup_longer_than_the_run_is_refused(text):
    with pytest.raises(ConfigError, match=rf"--warmup-epoch: {text} is \d+ steps, longer than"):
        plan_for(warmup_epoch=text)


def test_an_epoch_of_warmup_is_an_epoch_of_the_run():
    plan = plan_for(100, batch_size=30, epochs=2, epoch_tail="drop", warmup_epoch="2ep")
    assert plan.total_steps == plan.schedule.warmup == 6


def test_validation_batches_and_bad_images():
    assert plan_for(batch_size=64).valid_batch == 250
    assert plan_for(batch_size=300).valid_batch == 300
    assert plan_for(batch_size=300, valid_batch_size=7).valid_batch == 7
    assert [plan_for(n, batch_size=1).max_bad for n in (50, 1000, 8000)] == [10, 10, 80]
    assert plan_for(8000, max_bad="3").max_bad == 3
    assert plan_for(8000, max_bad="2%").max_bad == 160


def test_image_size_and_workers():
    assert plan_for().image_size == 28
    assert plan_for(image_size=12).image_size == 12
    assert plan_for().workers == 0, "a set held in memory has nothing to decode"
    assert plan_for(preset="folder-resnet18").workers == count_cores()
    assert plan_for(preset="folder-resnet18", workers=3).workers == 3
    assert plan_for(workers=3).workers == 3


def test_a_plan_as_a_dict_has_plain_numbers():
    values = plan_for(8000, batch_size=64, logs_per_epoch="1/2").to_dict()
    assert values["steps_per_epoch"] == 125.0 and values["epochs"] == 8.0
    assert values["train_images_seen"] == 64_000
    assert (values["log_points"], values["evaluate_points"], values["save_points"]) == (4, 8, 8)
    assert all(isinstance(value, int | float | str) for value in values.values())


def test_a_plan_is_a_frozen_pure_function_of_its_inputs():
    first, second = plan_for(), plan_for()
    assert first == second
    with pytest.raises(FrozenInstanceError):
        first.total_steps = 1


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda", "cuda:0", "cuda:0,2"])
def test_a_device_that_is_named_is_kept(device):
    assert resolve_device(device) == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:0,", "cpu:0", ""])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ConfigError, match=r"--device: expected auto, cpu, cuda, cuda:0,2 or mps"):
        read_settings("demo", {"device": device})


def test_what_the_machine_decides(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = read_settings("demo", {"device": "cpu"}).config
    assert choose_machine(config) == MachineChoice(
        device="cpu", precision="32.32", threads=count_cores()
    )
    gpu = read_settings("demo", {"device": "cuda:1"}).config
    assert (choose_machine(gpu).device, choose_machine(gpu).precision) == ("cuda:1", "16.32")
    asked = read_settings("demo", {"device": "cpu", "precision": "16.32"}).config
    assert choose_machine(asked).precision == "16.32"


@pytest.mark.parametrize(
    ("variable", "option", "threads"),
    [
        ("3", None, 3),
        (" 3 ", None, 3),
        ("3", "5", 5),
        ("0", None, count_cores()),
        ("3,2", None, count_cores()),
        ("many", None, count_cores()),
        ("", None, count_cores()),
    ],
)
def test_threads_are_the_options_then_the_environments_then_one_per_core(
    monkeypatch, variable, option, threads
):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = read_settings("demo", {"threads": option} if option else {}).config
    chosen = choose_machine(config)
    assert chosen.threads == threads
    facts = DatasetCounts(train_images=8000, valid_images=1500, classes=10)
    assert make_plan(config, facts, chosen).threads == threads


@pytest.mark.parametrize("variable", ["1025", "100000", "9" * 5000])
def test_more_threads_than_can_be_started_are_refused(monkeypatch, variable):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = read_settings("demo", {}).config
    with pytest.raises(ConfigError, match=rf"OMP_NUM_THREADS is {variable[:20]}: at most 1,024 t"):
        choose_machine(config)
    config = read_settings("demo", {"threads": "1024"}).config  # the most it takes
    assert choose_machine(config).threads == 1024
    monkeypatch.setenv("OMP_NUM_THREADS", "01024")
    assert choose_machine(read_settings("demo", {}).config).threads == 1024


def test_no_process_runs_without_a_thread():
    with pytest.raises(ConfigError, match="--threads: must be at least 1, got 0"):
        read_settings("demo", {"threads": "0"})
