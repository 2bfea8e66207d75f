"""How many replicas and ranks a run has: by its options, its devices, and the world it is in."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from phalanx.assemble.prepare import StartingPoint
from phalanx.assemble.scoring_target import (
    ScorableCheckpoint,
    adapt_settings_to_scoring,
    plan_checkpoint,
)
from phalanx.config.read import dump_config, read_settings, read_stored_settings
from phalanx.errors import ConfigError
from phalanx.plan.layout import Layout
from phalanx.plan.machine_choice import (
    MachineChoice,
    choose_machine,
    choose_scoring_machine,
    plan_layout,
    resolve_replicas,
    reuse_machine,
)
from phalanx.plan.plan import DatasetCounts, make_plan

FACTS = DatasetCounts(train_images=8000, valid_images=1500, classes=10)
STORED = {"device": "cpu", "precision": "32.32", "threads": 4}
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*WORLD, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(import_module("phalanx.plan.world"), "count_cores", lambda: 8)


@pytest.fixture
def launch(monkeypatch):
    """Make this process rank 1 of a launcher's world, on one machine or on several."""

    def start(ranks: int, *, here: int | None = None) -> None:
        local = str(here or ranks)
        values = ("1", str(ranks), "1", local, "localhost", "29500")
        for name, value in zip(WORLD, values, strict=True):
            monkeypatch.setenv(name, value)

    return start


def settings_with(**options: object):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    return read_settings("demo", {"device": "cpu", **flags})


def settle(**options: object):
    return resolve_replicas(settings_with(**options))


def plan(**options: object):
    settings = settle(**options)
    machine = choose_machine(settings.config)
    return make_plan(settings.config, FACTS, machine, user_options=settings.user_options)


def refusal(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(**options)
    return str(caught.value)


# --- --replicas auto ---


@pytest.mark.parametrize(
    ("device", "visible", "devices", "found"),
    [
        ("cpu", None, None, 1),
        ("cpu", None, "4", 4),
        ("cpu", "0,1,2", None, 1),
        ("cuda", "0,1,2", None, 3),
        ("cuda", "GPU-aa, GPU-bb", None, 2),
        ("cuda", "0,1,2,3", "2", 2),
        ("cuda", "0,1", "4", 4),  # of a machine that is not here
        ("cuda:0,2", "0,1,2,3", None, 2),
        ("cuda:3", None, None, 1),
        ("mps", None, None, 1),
    ],
)
def test_auto_is_a_replica_for_each_device(monkeypatch, device, visible, devices, found):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = {} if devices is None else {"devices": devices}
    settled = settle(
        device=device, replicas="auto", batch_size=48, gradient_accumulation=12, **options
    )
    assert settled.config.machine.replicas == found
    layout = plan_layout(settled.config, choose_machine(settled.config))
    assert (layout.ranks, layout.folded) == (found, False)


def test_auto_keeps_the_global_batch():
    one, four = (
        plan(gradient_accumulation=8),
        plan(gradient_accumulation=8, replicas="auto", devices=4),
    )
    assert (one.global_batch, four.global_batch) == (512, 512)
    assert (four.replicas, four.accumulation, four.micro_batch) == (4, 2, 64)
    assert one.schedule == four.schedule and one.total_steps == four.total_steps
    given = plan(replicas="auto", devices=4, global_batch_size=1024)
    assert (given.replicas, given.accumulation) == (4, 4)


@pytest.mark.parametrize("number", ["16", "'16'"])
def test_auto_keeps_the_global_batch_of_the_replicas_it_replaces(tmp_path, number):
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: demo\nbatch-size: 4\ngradient-accumulation: 3\nreplicas: {number}\n")
    flags = {"device": "cpu", "devices": "8", "replicas": "auto"}
    settled = resolve_replicas(read_settings(str(file), flags))
    found = make_plan(settled.config, FACTS, choose_machine(settled.config))
    assert (found.replicas, found.accumulation, found.global_batch) == (8, 6, 4 * 3 * 16)


def test_a_batch_that_auto_cannot_keep_is_refused_with_ways_out(tmp_path):
    told = "the global batch of 64, which it keeps, is not a multiple of 256 = micro-batch 64 x "
    told += "replicas 4; use --batch-size 16 --global-batch-size 64 or --global-batch-size 256"
    assert refusal(replicas="auto", devices=4) == f"--replicas auto: {told}"
    found = plan(replicas="auto", devices=4, batch_size=16, global_batch_size=64)
    assert (found.global_batch, found.accumulation) == (64, 1)
    assert plan(replicas="auto", devices=4, global_batch_size=256).accumulation == 1
    file = tmp_path / "mine.yaml"
    file.write_text("extends: demo\ndevice: cpu\ndevices: 4\nreplicas: auto\n")
    with pytest.raises(ConfigError) as caught:
        resolve_replicas(read_settings(str(file)))
    assert str(caught.value) == f"{file}:4: replicas auto: {told}"


def test_a_number_is_not_replaced():
    settings = settings_with(replicas=16, devices=4)
    assert resolve_replicas(settings) is settings
    assert settle(replicas=3, devices=4).config.machine.replicas == 3
    assert settings_with().config.machine.replicas == 1, "one is the default"


# --- --global-batch-size ---


def test_a_global_batch_fills_in_the_accumulation():
    found = plan(global_batch_size=768, batch_size=32, replicas=3)
    assert (found.global_batch, found.accumulation) == (768, 8)
    assert found.steps_per_epoch == pytest.approx(8000 / 768)
    assert plan(global_batch_size=64).to_dict()["accumulation"] == 1


def test_the_higher_layer_decides_between_accumulation_and_global_batch(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: demo\ngradient-accumulation: 3\n")
    config = read_settings(str(file), {"global-batch-size": "128"}).config
    assert (config.train.gradient_accumulation, config.train.global_batch_size) == (None, 128)
    file.write_text("extends: demo\nglobal-batch-size: 128\n")
    config = read_settings(str(file), {"gradient-accumulation": "3"}).config
    assert (config.train.gradient_accumulation, config.train.global_batch_size) == (3, None)
    file.write_text("extends: demo\nglobal-batch-size: 128\ngradient-accumulation: 2\n")
    with pytest.raises(ConfigError) as caught:
        read_settings(str(file))
    told = "gradient-accumulation: give gradient-accumulation or global-batch-size, not both"
    assert str(caught.value) == f"{file}:3: {told}"


def test_a_global_batch_that_does_not_divide_is_reported_with_all_else():
    told = refusal(global_batch_size=100, lr_schedule="step")
    assert "100: is not a multiple of 64 = micro-batch 64 x replicas 1; use " in told


def test_what_auto_found_is_stored_so_that_a_resume_reads_it():
    config = settle(replicas="auto", devices=4, gradient_accumulation=4).config
    stored = yaml.safe_load(dump_config(config))
    assert (stored["replicas"], stored["gradient-accumulation"]) == (4, None)
    again = read_stored_settings(stored, flags={}, where="run", name="demo").config
    assert again == config and again.train.global_batch_size == 256


# --- layouts ---


def test_replicas_fold_onto_what_is_there_unless_that_is_refused():
    found = plan(replicas=16, devices=4)
    assert (found.replicas, found.layout.ranks, found.layout.rounds) == (16, 4, 4)
    assert refusal(replicas=16, devices=4, no_fold=True) == (
        "--no-fold: 16 replicas need 16 devices, and there are 4; with --no-fold false, each "
        "device runs several of them, one after the other"
    )
    assert refusal(replicas=2, bn_span=2, no_fold=True).startswith("--no-fold: 2 replicas need 2")
    assert not plan(replicas=16, devices=16, no_fold=True).layout.folded
    assert not plan(no_fold=True).layout.folded


def test_a_problem_of_the_layout_is_reported_with_others():
    told = refusal(replicas=6, bn_span=4, warmup_epoch="20ep")
    assert told.startswith("2 problems:\n") and "  --warmup-epoch: " in told
    assert "\n  --bn-span 4: does not divide 6 replicas; use 1, 2, 3 or 6" in told


def test_only_batch_norm_has_statistics_to_share():
    assert plan(replicas=4, bn_span=4).layout.turn_size == 4
    for norm in ("group", "none"):
        layout = plan(replicas=4, bn_span=3, norm_type=norm, norm_num_groups=8).layout
        assert (layout.bn_span, layout.turn_size) == (1, 1)


def test_statistics_that_ranks_exchange_cost_the_same_bits_and_that_is_said():
    together = {"replicas": 4, "bn_span": 2, "determinism": "strict", "threads": 1}
    (note,) = (text for text in plan(**together, devices=4).warnings if "strict" in text)
    assert "--bn-span 2" in note and "only to rounding; with --devices 2 or fewer" in note
    assert not any("strict" in text for text in plan(**together, devices=2).warnings)
    assert not any("rounding" in t for t in plan(replicas=4, bn_span=2, devices=4).warnings)


def test_a_note_says_that_strict_bits_depend_on_the_share_of_threads():
    strict = {"replicas": 2, "determinism": "strict"}
    for devices, threads in ((1, 8), (2, 4)):
        (note,) = plan(**strict, devices=devices).warnings
        assert note == (
            f"--determinism strict: {threads} threads per process; a run that begins with another "
            "number of devices may use another number of threads, which changes the last bits; "
            f"give all of them --threads {threads}"
        )
        assert not plan(**strict, devices=devices, threads=4).warnings
    assert not plan(**strict | {"determinism": "seeded"}).warnings
    assert not plan(**strict | {"replicas": 1}).warnings


def test_scoring_needs_no_more_than_one_device():
    settings = settings_with(replicas=4, no_fold=True)
    facts = {"plan": {"train_images": 80, "valid_images": 20}, "classes": ["a", "b"]}
    start = StartingPoint(checkpoint=Path("step-00000001"), facts=facts, use="score")
    checkpoint = ScorableCheckpoint(start=start, settings=settings, choice="")
    assert plan_checkpoint(checkpoint).layout.ranks == 1


@pytest.mark.parametrize(
    ("flags", "ranks", "threads"),
    [({}, 1, 8), ({"devices": "3"}, 3, 2), ({"devices": "1"}, 1, 8), ({"threads": "5"}, 1, 5)],
)
def test_a_checkpoint_is_scored_on_the_devices_that_are_asked_for_now(flags, ranks, threads):
    trained = settings_with(replicas=4, devices=4, no_fold=True, bn_span=2).config.flat()
    found = adapt_settings_to_scoring(
        read_stored_settings(trained, flags=flags, where="run", name="run")
    )
    scoring = make_plan(found.config, FACTS, choose_scoring_machine(found.config))
    assert (scoring.layout, scoring.threads) == (Layout(ranks, ranks), threads)
    assert scoring.global_batch == 4 * scoring.micro_batch  # epochs are counted as in training


def test_a_launchers_ranks_score_whatever_the_replicas_are(launch):
    launch(6, here=2)
    for replicas in ("auto", 1, 16):
        config = adapt_settings_to_scoring(settings_with(replicas=replicas, devices=2)).config
        scoring = make_plan(config, FACTS, choose_scoring_machine(config), user_options=["devices"])
        assert (scoring.layout, scoring.threads) == (Layout(6, 6), 4)
        assert scoring.warnings == ("--devices 2 has no effect: the launcher started the ranks",)


def test_our_own_ranks_do_what_devices_asks_for(launch, monkeypatch):
    launch(2)
    monkeypatch.setenv("PHALANX_RESTART", "0")
    assert plan(replicas=2, devices=2).warnings == ()
    config = adapt_settings_to_scoring(settings_with(devices=2)).config
    assert make_plan(config, FACTS, choose_scoring_machine(config)).warnings == ()


# --- threads and workers ---


def test_ranks_share_the_threads_of_their_machine(launch):
    assert plan(replicas=4, devices=4).threads == 2
    assert plan(replicas=2, devices=4).threads == 4, "two of them are not used"
    assert plan(replicas=16, devices=16).threads == 1
    assert plan(replicas=4, devices=4, threads=3).threads == 3
    launch(8, here=4)
    assert plan(replicas=8).threads == 2


def test_the_environment_sets_the_threads_of_each_rank_up_to_its_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [plan(replicas=8, devices=n).threads for n in (1, 2, 4, 8)] == [2, 2, 2, 1]


def test_ranks_share_the_cores_for_workers():
    photos = {"data": "generated", "model": "resnet18"}
    assert plan(**photos).workers == 8
    assert plan(**photos, replicas=64, devices=64).workers == 1


@pytest.mark.parametrize(("allocated", "each"), [("16", 8), ("8", 4), (None, 4)])
def test_ranks_that_slurm_binds_have_cores_of_their_own(monkeypatch, allocated, each):
    slurm = {"PROCID": "0", "STEP_NUM_TASKS": "2", "LOCALID": "0", "CPUS_ON_NODE": allocated}
    for name, value in slurm.items():
        if value:
            monkeypatch.setenv(f"SLURM_{name}", value)
    found = plan(data="generated", model="resnet18", replicas=2)
    assert (found.workers, found.threads) == (each, each)


def test_a_resume_on_as_many_ranks_keeps_its_threads(launch):
    config = settings_with(replicas=4, devices=2).config
    assert reuse_machine(STORED, config, ranks=2) == MachineChoice(**STORED, devices=2)
    four = settings_with(replicas=4, devices=4).config
    assert reuse_machine(STORED, four, ranks=2).threads == 2, "more ranks share the cores"
    strict = settings_with(replicas=4, devices=4, determinism="strict").config
    assert reuse_machine(STORED, strict, ranks=2).threads == 4, "other threads are other bits"
    one = settings_with(replicas=4, devices=1).config
    assert reuse_machine(STORED, one, ranks=2).threads == 8, "the only rank has all cores"


# --- a launcher's world ---


def test_more_ranks_than_replicas_are_replicas_each_and_that_is_said(launch):
    launch(4)
    settled = settle(replicas=2)
    assert settled.config.machine.replicas == 4
    (note,) = settled.notes
    told = "--replicas 2: the launcher started 4 ranks, which makes 4 replicas"
    assert note == f"{told} and a global batch of 256"
    assert plan(replicas=2).layout.ranks == 4
    kept = settle(replicas=2, global_batch_size=512)
    assert kept.notes == (told,)
    assert plan(replicas=2, global_batch_size=512).global_batch == 512


def test_more_replicas_than_ranks_fold(launch):
    launch(2)
    settings = settings_with(replicas=8)
    assert resolve_replicas(settings) is settings
    assert plan(replicas=8).layout.replicas_of(1) == (1, 3, 5, 7)
    assert refusal(replicas=8, no_fold=True).startswith(
        "--no-fold: 8 replicas need 8 devices, and the launcher started 2; "
    )


def test_auto_takes_the_ranks_that_there_are(launch):
    launch(4)
    settled = settle(replicas="auto", gradient_accumulation=4, devices=2)
    assert settled.config.machine.replicas == 4 and settled.notes == ()
    found = plan(replicas="auto", gradient_accumulation=4, devices=2)
    assert (found.layout.ranks, found.global_batch, found.accumulation) == (4, 256, 1)
    assert found.warnings == ("--devices 2 has no effect: the launcher started the ranks",)


def test_ranks_that_would_idle_are_refused_with_how_many_to_start(launch):
    launch(3)
    assert refusal(replicas=4, bn_span=4) == (
        "--replicas 4: the launcher started 3 ranks, and 4 replicas with --bn-span 4 can use only "
        "2; start 2 or 4"
    )
    config = settings_with(replicas=2).config  # of a run that is resumed: its replicas stay
    with pytest.raises(ConfigError) as caught:
        plan_layout(config, reuse_machine(STORED, settings_with(replicas=3).config, ranks=1))
    assert str(caught.value) == (
        "--replicas 2: the launcher started 3 ranks, and 2 replicas can use only 2; start 2"
    )


def test_a_resume_with_more_ranks_than_replicas_is_refused(launch):
    launch(3)
    config = settings_with(replicas=2).config
    with pytest.raises(ConfigError, match="2 replicas can use only 2; start 2"):
        reuse_machine(STORED, config, ranks=1)
    assert reuse_machine(STORED, settings_with(replicas=5).config, ranks=1).devices == 3


def test_a_launcher_with_more_ranks_than_named_devices_is_refused(launch):
    launch(4)
    assert refusal(device="cuda:0,2", replicas=4) == (
        "--device cuda:0,2: the launcher started 4 ranks here, and this names 2 devices; start 2, "
        "or name more"
    )
    launch(4, here=2)
    assert plan(device="cuda:0,2", replicas=4).layout.ranks == 4


def test_ranks_of_our_own_are_no_launchers(launch, monkeypatch):
    launch(4)
    monkeypatch.setenv("PHALANX_RESTART", "0")
    found = plan(replicas=8, devices=4)
    assert (found.layout.ranks, found.warnings) == (4, ())
    assert plan(replicas=4, devices=9).warnings[0].startswith("--devices 9: 4 replicas use only 4")


# --- what has no effect ---


def test_devices_that_no_replica_needs_are_reported():
    way_out = "; --replicas auto trains one on each"
    assert plan(devices=4).warnings == (f"--devices 4: 1 replica uses only 1{way_out}",)
    assert plan(devices=4, replicas=2).warnings == (f"--devices 4: 2 replicas use only 2{way_out}",)
    told = f"--devices 3: 4 replicas with --bn-span 4 use only 2{way_out}"
    assert plan(devices=3, replicas=4, bn_span=4).warnings == (told,)
    assert plan(devices=4, replicas=16).warnings == plan(devices=4, replicas=4).warnings == ()


@pytest.mark.parametrize(("name", "value"), [("bucket_mib", 50), ("rank_timeout", 60)])
def test_what_ranks_need_has_no_effect_for_one(name, value):
    flag = f"--{name.replace('_', '-')}"
    told = (f"{flag} has no effect with one rank, which has no others to talk to",)
    assert plan(**{name: value}).warnings == plan(**{name: value}, replicas=4).warnings == told
    assert plan(**{name: value}, replicas=4, devices=2).warnings == ()


def test_a_validation_device_that_trains_anyway_is_reported():
    told = ("--validation-device cpu has no effect: that is the device that trains",)
    assert plan(validation_device="cpu").warnings == told
    assert plan(validation_device="cuda:1").warnings == ()
    config = settings_with(validation_device="cpu").config
    gpu = replace(choose_machine(config), device="cuda")
    assert make_plan(config, FACTS, gpu).warnings == ()


# --- stages ---


def test_stages_have_devices_of_their_own_where_there_are_enough():
    stages = {"pipeline_splits": "layer2/0", "gradient_accumulation": 4, "replicas": 4}
    for devices, expected in (
        (1, Layout(4, 1)),
        (2, Layout(4, 2, stages=2)),
        (3, Layout(4, 2, stages=2)),
        (4, Layout(4, 4, stages=2)),
        (100, Layout(4, 8, stages=2)),
    ):
        assert plan(**stages, devices=devices).layout == expected
    assert plan(**stages, shards=1, devices=3).layout == Layout(4, 3)


def test_a_launcher_makes_replicas_of_stages(launch):
    launch(8)
    stages = {"pipeline_splits": "layer2/0", "gradient_accumulation": 4}
    settings = settle(**stages)
    assert settings.config.machine.replicas == 4
    assert settings.notes[-1].startswith(
        "--replicas 1: the launcher started 8 ranks, which makes 4 replicas of 2 stages"
    )
    launch(3)
    assert refusal(**stages, replicas=2).endswith(
        "2 replicas of 2 stages can use only 2; start 2 or 4"
    )


def test_a_launcher_whose_ranks_do_not_divide_into_stages_cannot_score(launch):
    launch(3)
    config = settings_with(
        pipeline_splits="layer2/0", pipeline_validation_model=True, replicas=1
    ).config
    with pytest.raises(ConfigError, match="started 3 ranks, and pipelines of 2 stages use 2 of "):
        plan_layout(config, choose_scoring_machine(config))
    launch(4)
    assert plan_layout(config, choose_scoring_machine(config)) == Layout(2, 4, stages=2)


def test_workers_share_the_cores_of_their_machine(launch, monkeypatch):
    monkeypatch.setattr(import_module("phalanx.plan.world"), "count_cores", lambda: 16)
    launch(8, here=2)
    settings = settings_with(data="folder", data_dir=".", replicas=8)
    machine = choose_machine(settings.config)
    assert (
        make_plan(settings.config, FACTS, machine, user_options=settings.user_options).workers == 8
    )
