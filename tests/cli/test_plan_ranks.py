"""`phalanx plan` shows any layout with no accelerator present: who runs what, memory, exchange."""

import json
from functools import partial

import pytest

from phalanx.cli.main import main

pytestmark = pytest.mark.usefixtures("empty_folder")

COUNT = 78_042  # weights of a ResNet-8 for ten classes
CHANNELS = 16 + 2 * 16 + 2 * 32 + 32 + 2 * 64 + 64  # of its batch norms: stem, blocks, shortcuts
STATISTICS = 2 * 4 * CHANNELS  # a mean and a variance each
RING = 2 * 3 / 4  # of what four ranks add up, each receives so much


@pytest.fixture
def told(read_plan):
    """The rows of a plan of the demo by their names, and the table under `ranks`."""
    return partial(read_plan, "demo", "--device=cpu", "--no-memory")


@pytest.fixture
def as_json(capsys):
    """The JSON of a plan of the demo, with options as keywords."""

    def read(*, bare=False, **options):
        words = ["--no-memory"] * bare
        words += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        assert main(["plan", "demo", "--device=cpu", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return read


# --- who runs what ---


def test_one_replica_has_no_table(told):
    rows = told()
    assert "ranks" not in rows and rows["device"] == ["cpu, 32.32, 1 thread"]


def test_replicas_on_one_device_are_a_line(told):
    rows = told("--replicas", "16")
    assert rows["ranks"] == ["16 replicas folded onto 1 device: they run one after the other"]
    assert rows["global batch"] == ["1,024 = micro-batch 64 x accumulation 1 x replicas 16"]


def test_ranks_have_a_table(told):
    rows = told("--replicas=16", "--devices=4", "--gradient-accumulation=2", "--threads=1")
    assert rows["ranks"] == [
        "16 replicas folded onto 4 devices: 4 on each, one after the other",
        "rank  replicas      passes per step",
        "0     0, 4, 8, 12   8",
        "1     1, 5, 9, 13   8",
        "2     2, 6, 10, 14  8",
        "3     3, 7, 11, 15  8",
    ]
    assert rows["device"] == ["4 processes on cpu, 32.32, 1 thread each"]
    assert rows["workers"] == ["0 for each rank"]


def test_a_gpu_is_planned_for_where_there_is_none(told):
    rows = told("--device=cuda", "--devices=2", "--replicas=2", "--threads=3")
    assert rows["device"] == ["2 x cuda, 16.32, 3 threads each"]
    assert rows["ranks"][0] == "2 replicas, one on each of 2 devices"


@pytest.mark.parametrize(
    ("devices", "first"),
    [
        (1, None),
        (2, "0     0-3, 8-11   2                shared within each pass"),
        (4, "0     0-3       1                shared within each pass"),
        (8, "0     0-1       1                shared with rank 1"),
        (16, "0     0         1                shared with ranks 1, 2, 3"),
    ],
)
def test_shared_statistics_are_in_the_table(told, devices, first):
    rows = told("--replicas=16", "--bn-span=4", f"--devices={devices}")["ranks"]
    assert len(rows) == (1 if devices == 1 else 2 + min(devices, 8 if devices == 8 else 7))
    if first:
        assert rows[1].endswith("  BatchNorm statistics") and rows[2] == first


def test_long_tables_lose_their_middle(told):
    rows = told("--replicas=1000", "--devices=100")["ranks"]
    assert rows[0] == "1,000 replicas folded onto 100 devices: 10 on each, one after the other"
    assert rows[2] == "0     0, 100, 200, ..., 900   10"
    assert [row.split()[0] for row in rows[2:]] == ["0", "1", "2", "3", "...", "98", "99"]


def test_ranks_are_in_the_json(as_json):
    found = as_json(replicas=4, devices=2, bn_span=2, bare=True)
    ranks = [(row["rank"], row["replicas"], row["passes"]) for row in found["ranks"]]
    assert ranks == [(0, [[0, 1]], 1), (1, [[2, 3]], 1)]
    assert {name: found["plan"][name] for name in ("replicas", "ranks", "bn_span")} == {
        "replicas": 4,
        "ranks": 2,
        "bn_span": 2,
    }
    assert found["statistics_groups"] == []
    apart = as_json(replicas=4, devices=4, bn_span=2, bare=True)
    assert apart["statistics_groups"] == [[0, 1], [2, 3]]
    (alone,) = as_json(bare=True)["ranks"]
    assert (alone["replicas"], alone["passes"]) == ([[0]], 1)


# --- what it takes ---


def test_replicas_side_by_side_are_a_larger_batch(as_json):
    alone, folded = as_json()["memory"], as_json(replicas=4)["memory"]
    assert folded["activations"] == alone["activations"]
    assert folded["peak"] > alone["peak"] + folded["statistics"], "gradients of passes before stay"
    together = as_json(replicas=4, bn_span=4)["memory"]
    large = as_json(batch_size=256)["memory"]
    assert together["activations"] == large["activations"]
    assert together["peak"] == large["peak"] + together["statistics"]
    spread = as_json(replicas=4, bn_span=4, devices=4)["memory"]
    assert spread["activations"] == alone["activations"]
    assert spread["peak"] == as_json(gradient_accumulation=2)["memory"]["peak"] + STATISTICS, (
        "DDP's gradients are always there"
    )


def test_every_pass_of_a_rank_has_its_statistics(as_json):
    assert as_json()["memory"]["statistics"] == 0
    for devices, own in {1: 5, 2: 3, 5: 1}.items():
        found = as_json(replicas=5, devices=devices)["memory"]
        assert found["statistics"] == own * STATISTICS
        assert found.pop("peak") == sum(found.values())
    assert as_json(replicas=4, bn_span=2)["memory"]["statistics"] == 2 * STATISTICS
    assert as_json(replicas=4, ema_decay=0.9)["memory"]["statistics"] == 8 * STATISTICS
    assert as_json(replicas=4, norm_type="none")["memory"]["statistics"] == 0


def test_sums_in_the_order_of_replicas_are_kept_apart(as_json):
    plain, strict = (as_json(replicas=4, determinism=how)["memory"] for how in ("seeded", "strict"))
    assert (plain["sums"], strict["sums"]) == (0, 4 * COUNT)
    alone = as_json()["memory"]["peak"]
    assert strict["peak"] == alone + strict["sums"] + strict["statistics"], "passes begin anew"
    assert strict.pop("peak") == sum(strict.values())
    assert as_json(determinism="strict")["memory"]["sums"] == 0


def test_gradients_go_round_once_and_in_strict_order_every_time(as_json):
    assert (
        as_json()["exchange"]
        == as_json(replicas=4)["exchange"]
        == {
            "gradients": 0,
            "statistics": 0,
            "activations": 0,
        }
    )
    for replicas in (4, 16):
        found = as_json(replicas=replicas, devices=4)["exchange"]
        assert found == {"gradients": RING * 4 * COUNT, "statistics": 0, "activations": 0}
        found = as_json(replicas=replicas, devices=4, determinism="strict")["exchange"]
        assert found["gradients"] == replicas / 4 * 3 * 4 * COUNT


def test_statistics_are_exchanged_where_a_group_is_on_several_ranks(as_json):
    options = {"replicas": 8, "bn_span": 4, "gradient_accumulation": 3}
    for devices, partners in {2: 0, 4: 1, 8: 3}.items():
        found = as_json(**options, devices=devices)["exchange"]["statistics"]
        assert found == 3 * 2 * partners * STATISTICS, "forward and backward, in every pass"


def test_memory_and_exchange_in_words(capsys):
    words = ["--replicas=4", "--devices=4", "--bn-span=2", "--device=cpu", "--threads=1"]
    assert main(["plan", "demo", *words]) == 0
    rows = {line[:14].strip(): line[14:] for line in capsys.readouterr().out.splitlines()}
    assert rows["memory"].startswith("peak 32.9 MiB in each process: weights 307.5 KiB, gradients ")
    assert ", running statistics 2.6 KiB, " in rows["memory"]
    assert rows["exchange"] == (
        "each rank sends and receives 462.5 KiB per step: gradients 457.3 KiB, BatchNorm "
        "statistics 5.2 KiB"
    )
    assert main(["plan", "demo", "--device=cpu", "--replicas=4"]) == 0
    out = capsys.readouterr().out
    assert "\nexchange" not in out and "in each process" not in out


def test_without_torch_there_are_no_bytes(as_json):
    found = as_json(replicas=4, devices=4, bare=True)
    assert found["memory"] is found["exchange"] is None
