"""`phalanx plan --network`: what a step takes of the links between hosts."""

import json

import pytest

from phalanx.cli.main import main
from small_photos import write_photos

pytestmark = pytest.mark.usefixtures("empty_folder")

COUNT = 78_042  # weights of the demo's ResNet-8
RATE = 0.1 * 0.95 * 1e9 / 8  # bytes a second of 0.1 Gbit/s that arrive
FOUR = ("--device=cpu", "--replicas=4", "--devices=4", "--threads=1", "--network=0.1")


@pytest.fixture
def told(capsys):
    """The rows of a plan from `network` on."""

    def read(*words: str) -> list[str]:
        assert main(["plan", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        return lines[next(n for n, line in enumerate(lines) if line.startswith("network")) :]

    return read


@pytest.fixture
def as_json(capsys):
    """What the JSON of a plan says of the network."""

    def read(*words: str) -> dict:
        assert main(["plan", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["network"]

    return read


def test_in_words(told):
    assert told("demo", *FOUR, "--bn-span=4", "--images-per-second=800") == [
        "network       0.1 Gbit/s for each of 4 hosts, 1 device on each",
        "              each way, in a step       bytes     time",
        "              gradients             457.3 KiB  39.4 ms  ring all-reduce",
        "                                               52.6 ms  instead, if a tree added them up",
        "              BatchNorm statistics   15.8 KiB  1.36 ms",
        "step time     121 ms = compute 80 ms + communication 40.8 ms + copies and sums 0.506 ms",
        "              2,111 images/s, 0.66 of 4 devices without a network",
    ]


def test_without_a_measurement(told):
    rows = told("demo", *FOUR, "--hosts=2", "--determinism=strict")
    assert rows == [
        "network       0.1 Gbit/s for each of 2 hosts, 2 devices on each",
        "              each way, in a step      bytes     time",
        "              gradients            914.6 KiB  78.9 ms  gathered from all",
        "step time     needs a measurement: give --images-per-second, what one device trains alone",
    ]


def test_what_stays_on_one_host_takes_no_network(told):
    for words in (FOUR[1:], ("--network=0.1",)):
        rows = told("demo", "--device=cpu", *words, "--hosts=1", "--images-per-second=640")
        assert rows[1] == "              nothing goes over it"
        assert rows[2].startswith("step time     10") and "+ communication 0 ms" in rows[2]
        assert ("+ copies and sums 0.506 ms" in rows[2]) == ("--devices=4" in words)


def test_as_json(as_json):
    found = as_json("demo", *FOUR, "--images-per-second=640", "--bucket-mib=0.1")
    ring = 2 * 3 / 4 * 4 * COUNT
    step = found.pop("step")
    assert found["sizes"] == {"gradients": ring, "statistics": 0, "activations": 0}
    assert found["communication_s"] == found["seconds"]["gradients"]
    assert found["communication_s"] == pytest.approx(ring / RATE)
    assert (found["gbit"], found["hosts"]) == (0.1, 4)
    assert (found["image_bytes"], found["input_bytes"], found["input_s"]) == (0, 0, 0)
    hidden = ring / RATE * 2 / 3  # three buckets of 0.1 MiB
    total = 0.1 + ring / RATE - hidden + ring * 8 / 7.4e9
    assert step == pytest.approx(
        {
            "compute_s": 0.1,
            "communication_s": ring / RATE,
            "hidden_s": hidden,
            "host_s": ring * 8 / 7.4e9,
            "total_s": total,
            "total_s_with_input": total,
        }
    )
    assert as_json("demo", *FOUR)["step"] is None
    assert as_json("demo", "--device=cpu") is None


def test_stages_send_to_other_hosts(told, capsys):
    words = ("demo", *FOUR, "--replicas=2", "--pipeline-splits=layer2/0", "--batch-size=32",
             "--gradient-accumulation=4", "--images-per-second=320", "--json")  # fmt: skip
    sizes = {}
    for hosts in (1, 2, 4):
        assert main(["plan", *words, f"--hosts={hosts}"]) == 0
        found = json.loads(capsys.readouterr().out)
        step, sizes[hosts] = found["network"]["step"], found["network"]["sizes"]
        assert step["compute_s"] == pytest.approx(4 * 32 / 320 / 2 / (1 - found["bubble"]))
        assert 0 < found["bubble"] < 0.5 and step["hidden_s"] == 0
        gradients = found["network"]["seconds"]["gradients"]
        assert (step["communication_s"] > gradients) == (hosts == 4), "stages wait for each other"
    sent, parts = found["exchange"], [one["memory"]["gradients"] for one in found["stages"]]
    assert sizes[1] == {"gradients": 0, "statistics": 0, "activations": 0}
    assert sizes[2] == sizes[1] | {"gradients": 4 * COUNT}, "both stages' rings, 2 x 1/2 of each"
    assert sizes[4] == sent | {"gradients": max(parts)} and sent["activations"] > 0
    assert "              activations and their gradients " in "\n".join(told(*words[:-1]))


def test_images_that_come_over_the_same_links(told, as_json):
    words = ("imagenet-resnet50", "--device=cuda", "--replicas=8", "--devices=8", "--network=1",
             "--hosts=2", "--batch-size=8", "--gradient-accumulation=1")  # fmt: skip
    found = as_json(*words, "--images-per-second=4000")
    assert found["image_bytes"] == 115_000, "the mean of ImageNet's files"
    assert found["input_bytes"] == 32 * 115_000
    step = found["step"]
    assert step["total_s_with_input"] == found["communication_s"] + found["input_s"]
    rows = told(*words, "--images-per-second=4000")
    assert rows[4] == (
        "              images                 3.5 MiB   31 ms  only if they come over the same link"
    )
    assert rows[-2:] == [
        "input         each host reads 21 images/s, 2.3 MiB/s, to keep up",
        "              over the same links a step takes 1.54 s",
    ]


def test_files_are_as_large_as_they_are(as_json, tmp_path):
    write_photos(tmp_path / "photos", {"train": 3, "val": 1})
    sizes = [path.stat().st_size for path in (tmp_path / "photos" / "train").rglob("*.jpg")]
    found = as_json("folder-resnet18", "--data-dir=photos", "--network=1", "--device=cpu",
                    "--image-size=64", "--batch-size=4")  # fmt: skip
    assert found["image_bytes"] == pytest.approx(sum(sizes) / len(sizes))


@pytest.mark.parametrize("value", ["0", "-1", "fast", "nan", "inf", ""])
@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ("--network", "Gbit/s of each host's link, such as 10 or 0.1"),
        ("--images-per-second", "a number above zero, such as 2500"),
    ],
)
def test_numbers_that_are_none(capsys, flag, wanted, value):
    words = ["--network=10", f"{flag}={value}"]
    assert main(["plan", "demo", *words]) == 2
    assert f"{flag}: expected {wanted}, got {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--network=1", "--hosts=0"), "--hosts: expected a whole number of at least 1, got '0'"),
        (("--network=1", "--hosts=-2"), "--hosts: expected a whole number of at least 1, got '-2'"),
        (("--network=1", "--hosts=a"), "--hosts: expected a whole number of at least 1, got 'a'"),
        (
            ("--network=1", "--hosts=3", "--replicas=4", "--devices=4", "--device=cpu"),
            "--hosts 3: 4 devices cannot be shared evenly by 3 hosts; give a number that divides 4",
        ),
        (("--hosts=2",), "--hosts: belongs to --network GBIT, which is not given"),
        (
            ("--images-per-second=9",),
            "--images-per-second: belongs to --network GBIT, which is not given",
        ),
        (
            ("--network=1", "--no-memory"),
            "--network: needs what --no-memory skips; leave one of them out",
        ),
    ],
)
def test_what_does_not_go_together(capsys, words, message):
    assert main(["plan", "demo", *words]) == 2
    assert message in capsys.readouterr().err
