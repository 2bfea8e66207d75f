"""How long a network takes for a step, against what one would work out by hand."""

from dataclasses import replace

import pytest

from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from phalanx.plan.exchange import (
    Exchange,
    Network,
    count_hosts,
    predict_step_time,
    time_exchange,
    time_stage_waits,
)
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.pipeline import Pipeline, order_passes, time_passes
from phalanx.plan.plan import DatasetCounts, make_plan

SECOND = 118_750_000  # bytes: 0.95 of what 1 Gbit/s carries in a second
PAIR = 77_500_000  # 0.62 of it: two ranks over gloo that gather through one connection


def plan_for(ranks, *, device="cuda", stages=1, **options):
    """A plan of 64 images for each replica, which has a rank for each stage unless told."""
    flags = {
        "replicas": ranks // stages,
        **{name.replace("_", "-"): v for name, v in options.items()},
    }
    config = read_settings("demo", {name: str(value) for name, value in flags.items()}).config
    machine = MachineChoice(device=device, precision="32.32", threads=1, devices=ranks)
    facts = DatasetCounts(train_images=8000, valid_images=2000, classes=10)
    plan = make_plan(config, facts, machine)
    return replace(plan, layout=replace(plan.layout, ranks=ranks, stages=stages))


def time_gradients(plan, size=SECOND, *, hosts, gbit=1.0, bucket_mib=25):
    network, moved = Network(gbit=gbit, hosts=hosts), Exchange(gradients=size, statistics=0)
    return time_exchange(plan, [moved] * plan.layout.stages, network, bucket_mib=bucket_mib)


# --- bytes on a link ---


@pytest.mark.parametrize("gbit", [0.1, 1.0, 400.0])
def test_time_is_bytes_over_the_link(gbit):
    use = time_gradients(plan_for(4), hosts=4, gbit=gbit)
    assert use.sizes == {"gradients": SECOND, "statistics": 0, "activations": 0}
    assert use.total_s == use.seconds["gradients"] == pytest.approx(1 / gbit)


@pytest.mark.parametrize(("hosts", "sent"), [(1, 0), (2, 1), (4, 1), (8, 1)])
def test_a_ring_leaves_each_host_once(hosts, sent):
    assert time_gradients(plan_for(8), hosts=hosts).sizes["gradients"] == sent * SECOND


@pytest.mark.parametrize(("hosts", "sent"), [(1, 0), (2, 4), (4, 4), (8, 3)])
def test_every_stage_has_a_ring_of_its_own(hosts, sent):
    # a small stage and a large one: a host of both has both rings, and one alone waits for that
    parts = [Exchange(gradients=part * SECOND, statistics=0) for part in (1, 3)]
    network = Network(gbit=1, hosts=hosts)
    use = time_exchange(plan_for(8, stages=2), parts, network, bucket_mib=25)
    assert use.sizes["gradients"] == sent * SECOND
    assert use.seconds["gradients"] == pytest.approx(sent)
    assert use.tree_s == pytest.approx(sent * 4 / 3)


def test_a_cpu_copies_and_adds_what_the_largest_stage_has():
    parts = [Exchange(gradients=size, statistics=0) for size in (1000, 925_000_000)]
    plan = plan_for(8, stages=2, device="cpu")
    use = time_exchange(plan, parts, Network(gbit=1, hosts=2), bucket_mib=25)
    assert use.host_s == pytest.approx(1), "7.4 Gbit/s"


@pytest.mark.parametrize(("hosts", "sent"), [(1, 0), (2, 0), (4, 20), (8, 120)])
def test_stages_on_other_hosts_are_sent_to(hosts, sent):
    # borders of 100, 20 and 3 bytes, which go forward and come back as gradients
    parts = [Exchange(gradients=0, statistics=0, activations=n) for n in (100, 120, 23, 3)]
    network = Network(gbit=1, hosts=hosts)
    use = time_exchange(plan_for(8, stages=4), parts, network, bucket_mib=25)
    assert use.sizes["activations"] == sent


def test_a_host_sends_to_both_sides():
    # hosts of two devices and stages of three pipelines: 0 1 | 2 0 | 1 2, with borders of 7 and 5
    parts = [Exchange(gradients=0, statistics=0, activations=n) for n in (7, 12, 5)]
    use = time_exchange(plan_for(6, stages=3), parts, Network(gbit=1, hosts=3), bucket_mib=25)
    assert use.sizes["activations"] == 12


@pytest.mark.parametrize(("hosts", "sent"), [(1, 0), (2, 0), (4, 1), (8, 1)])
def test_statistics_leave_a_host_where_their_group_does(hosts, sent):
    network, moved = Network(gbit=1, hosts=hosts), Exchange(gradients=0, statistics=500)
    use = time_exchange(plan_for(8, bn_span=4), [moved], network, bucket_mib=25)
    assert use.sizes["statistics"] == sent * 500
    parts = [moved, Exchange(gradients=0, statistics=40)]
    use = time_exchange(plan_for(16, bn_span=4, stages=2), parts, network, bucket_mib=25)
    assert use.sizes["statistics"] == sent * 540


def test_a_tree_moves_all_twice():
    use = time_gradients(plan_for(4), hosts=4)
    assert use.tree_s == pytest.approx(4 / 3), "a ring moves 2 * 3/4 of the gradients"
    assert time_gradients(plan_for(4, determinism="strict"), hosts=4).tree_s is None


@pytest.mark.parametrize(
    ("ranks", "device", "size"),
    [(2, "cpu", PAIR), (2, "cuda", SECOND), (4, "cpu", SECOND)],
)
def test_two_ranks_of_gloo_gather_more_slowly(ranks, device, size):
    strict = plan_for(ranks, device=device, determinism="strict")
    assert time_gradients(strict, size, hosts=ranks).total_s == pytest.approx(1)
    reduced = plan_for(ranks, device=device)
    assert time_gradients(reduced, hosts=ranks).total_s == pytest.approx(1)


def test_a_cpu_copies_and_adds_whatever_the_network():
    for hosts in (1, 2, 4):
        reduced = time_gradients(plan_for(4, device="cpu"), 925_000_000, hosts=hosts)
        assert reduced.host_s == pytest.approx(1), "7.4 Gbit/s"
        strict = plan_for(4, device="cpu", determinism="strict")
        assert time_gradients(strict, 250_000_000, hosts=hosts).host_s == pytest.approx(1)
    assert time_gradients(plan_for(4), hosts=4).host_s == 0, "a GPU is not measured"
    assert time_gradients(plan_for(1, device="cpu"), 0, hosts=1).host_s == 0


# --- hosts ---


def test_hosts_have_the_same_number_of_devices():
    plan = plan_for(6)
    assert [count_hosts(plan, hosts) for hosts in (None, 1, 2, 3, 6)] == [6, 1, 2, 3, 6]
    for hosts in (4, 12):
        message = f"^--hosts {hosts}: 6 devices cannot be shared evenly by {hosts} hosts; give a "
        message += "number that divides 6$"
        with pytest.raises(ConfigError, match=message):
            count_hosts(plan, hosts)


# --- a step ---


def test_all_but_the_last_bucket_can_hide_behind_the_backward_pass():
    # four ranks: a ring of SECOND bytes adds up 2/3 of them, 75.5 MiB
    plan = plan_for(4)
    for bucket_mib, buckets in {100: 1, 40: 2, 25: 4, 1: 76}.items():
        use = time_gradients(plan, hosts=4, bucket_mib=bucket_mib)
        assert use.before_end_s == pytest.approx(1 - 1 / buckets)
    assert time_gradients(plan_for(4, determinism="strict"), hosts=4).before_end_s == 0


@pytest.mark.parametrize(
    ("rate", "compute", "hidden"),
    [(640, 0.1, 0.055), (64, 1, 0.55), (32, 2, 0.75), (6.4, 10, 0.75)],
)
def test_a_step_is_compute_and_what_does_not_hide(rate, compute, hidden):
    plan = plan_for(4)
    step = predict_step_time(plan, time_gradients(plan, hosts=4), images_per_second=rate)
    assert (step.compute_s, step.hidden_s) == pytest.approx((compute, hidden))
    assert step.communication_s == pytest.approx(1)
    assert step.total_s == pytest.approx(compute + 1 - hidden)


def test_only_the_last_pass_hides_anything():
    plan = plan_for(4, gradient_accumulation=5)
    step = predict_step_time(plan, time_gradients(plan, hosts=4), images_per_second=320)
    assert (step.compute_s, step.hidden_s) == pytest.approx((1, 0.11))


def test_ordered_sums_hide_nothing():
    plan = plan_for(4, determinism="strict")
    step = predict_step_time(plan, time_gradients(plan, hosts=4), images_per_second=64)
    assert step.total_s == pytest.approx(2)
    plan = plan_for(4, device="cpu", determinism="strict")
    step = predict_step_time(plan, time_gradients(plan, hosts=4), images_per_second=64)
    assert step.host_s == pytest.approx(0.475)
    assert step.total_s == pytest.approx(2.475)


def test_the_busiest_rank_counts():
    # five replicas on four ranks: two rounds; four side by side: one pass of all their images
    folded = plan_for(4, replicas=5)
    step = predict_step_time(folded, time_gradients(folded, hosts=4), images_per_second=64)
    assert (step.compute_s, step.hidden_s) == pytest.approx((2, 0.55))
    together = plan_for(2, replicas=8, bn_span=4)
    step = predict_step_time(together, time_gradients(together, hosts=2), images_per_second=64)
    assert (step.compute_s, step.hidden_s) == pytest.approx((4, 0.8)), "five buckets"


def test_stages_divide_the_work_and_idle():
    plan = plan_for(4, stages=2, gradient_accumulation=6)
    use = time_gradients(plan, hosts=4)
    step = predict_step_time(plan, use, images_per_second=64, bubble=0.25)
    assert (step.compute_s, step.communication_s) == pytest.approx((6 / 2 / 0.75, 1))
    assert step.hidden_s == 0, "their sums come after all passes"
    assert use.tree_s == pytest.approx(2), "of two pipelines"


def test_one_rank_waits_for_nobody():
    plan = plan_for(1)
    use = time_gradients(plan, 0, hosts=1)
    assert (use.total_s, use.tree_s, use.before_end_s) == (0, None, 0)
    assert predict_step_time(plan, use, images_per_second=128).total_s == 0.5


# --- stages that wait ---


@pytest.mark.parametrize(
    ("way", "ends"),
    [
        (0, {0: [1, 2, 7, 9], 1: [2, 3, 5, 7]}),
        (0.5, {0: [1, 2, 8, 10], 1: [2.5, 3.5, 5.5, 7.5]}),
        (3, {0: [1, 2, 15, 18], 1: [5, 8, 10, 12]}),  # the second goes when the first is there
    ],
)
def test_what_is_sent_takes_its_time(way, ends):
    orders = [order_passes("Grouped", stage=stage, stages=2, passes=2) for stage in (0, 1)]
    timed = time_passes(orders, forward=[1, 1], backward=[2, 2], transfers=[way])
    assert {stage: [one.end for one in timed if one.stage == stage] for stage in (0, 1)} == ends


@pytest.mark.parametrize(("received", "waits"), [(0, 0), (SECOND / 12, 1 / 6), (SECOND / 2, 1.5)])
def test_only_what_stages_wait_for_counts(received, waits):
    # as above: a forward pass takes a sixth of a second, a backward pass two
    pipeline = Pipeline(starts=("layer2/0",), schedule="Grouped")
    for ranks, replicas, rounds in ((2, 1, 1), (4, 2, 1), (2, 3, 3)):
        plan = plan_for(ranks, stages=2, replicas=replicas, gradient_accumulation=2)
        plan = replace(plan, pipeline=pipeline)
        figures = {"shares": [0.5, 0.5], "received": [0, received], "images_per_second": 64}
        apart = time_stage_waits(plan, Network(gbit=1, hosts=ranks), **figures)
        assert apart == pytest.approx(rounds * waits)
        together = time_stage_waits(plan, Network(gbit=1, hosts=ranks // 2), **figures)
        assert together == 0, "both stages of a pipeline are on one host"
        use = time_exchange(
            plan,
            [Exchange(gradients=SECOND, statistics=0, activations=4 * SECOND)] * 2,
            Network(gbit=1, hosts=ranks),
            bucket_mib=25,
        )
        step = predict_step_time(plan, use, images_per_second=64, stage_waits_s=apart)
        assert step.communication_s == pytest.approx((ranks > 2) + apart)


@pytest.mark.parametrize(("recompute", "waits"), [("false", 3.5 / 6), ("true", 5 / 8)])
def test_recomputation_is_a_part_of_the_measured_time(recompute, waits):
    # of a pass of a second that two stages share, forward passes have 1/3, or 1/4 of four parts:
    # without a network both steps take 9/6 = 12/8 s, with one 12.5/6 and 17/8 s
    plan = plan_for(2, stages=2, gradient_accumulation=2, enable_recompute=recompute)
    plan = replace(plan, pipeline=Pipeline(starts=("layer2/0",), schedule="Grouped"))
    assert (plan.recompute_patterns is not None) == (recompute == "true")
    figures = {"shares": [0.5, 0.5], "received": [0, SECOND / 4], "images_per_second": 64}
    network = Network(gbit=1, hosts=2)
    assert time_stage_waits(plan, network, **figures) == pytest.approx(waits)


def test_without_stages_nobody_waits():
    figures = {"shares": [], "received": [], "images_per_second": 64}
    assert time_stage_waits(plan_for(4), Network(gbit=1, hosts=4), **figures) == 0
