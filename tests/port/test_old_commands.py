"""Every command of the older READMEs ports."""

import pytest
from small_ports import port, read_old_commands

COMMANDS = [(name, text) for name, texts in read_old_commands().items() for text in texts]
SLIPS = {  # a part of the lines that have a slip of their README: how many, what was assumed
    "--ipus-per-replica --mpi-local-args": (1, "--ipus-per-replica: its value is missing; taken"),
    "python3 --config": (1, "the script is missing after the interpreter; taken as train.py"),
    "--shards 1 --data-dir your_dataset_path --restore-path": (1, "taken as validation.py"),
    "--group-dim=16": (4, "--group-dim 16: ported as it stands."),
}
REFUSED = [text for _, text in COMMANDS if "--num-epochs 5 " in text]  # there, too: a log point
# every second of five epochs
COUNTS = {
    "tf1": 25,
    "tf1-benchmarks": 14,
    "tf2": 12,
    "runner": 2,
    "lightning": 2,
    "popart": 1,
    "lightning-table": 2,  # the first with the other names of its table
}


def test_the_list_has_them_all():
    assert {name: len(texts) for name, texts in read_old_commands().items()} == COUNTS
    assert len(COMMANDS) == sum(COUNTS.values()) == 56 + 2
    assert len(REFUSED) == 1


@pytest.mark.parametrize(
    ("section", "text"), COMMANDS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(COMMANDS)]
)
def test_a_command_of_a_readme_ports(section, text, capsys):
    answer = port(capsys, text)
    assert answer["command"][0] == "phalanx"
    assert answer["dialect"] == section.partition("-")[0]
    assert bool(answer["problem"]) == (text in REFUSED)
    given = [row for row in answer["options"] if row["source"] in ("command", "launcher")]
    for row in given:
        assert row["new"] or row["why"], row


@pytest.mark.parametrize("part", SLIPS)
def test_a_slip_of_a_readme_is_told_with_what_was_assumed(part, capsys):
    count, warning = SLIPS[part]
    found = [text for _, text in COMMANDS if part in text.replace("\\\n", "")]
    assert len(found) == count
    for text in found:
        assert any(warning in line for line in port(capsys, text)["warnings"])


@pytest.mark.parametrize(
    "before",
    [
        "nohup nice -n 10",
        "sudo -E -u me",
        "time -p",
        "/usr/bin/time -v -o log.txt",
        "/usr/bin/env -u X",
        "timeout -k 9 3h",
        "numactl --cpunodebind=0 -m 0",
        "taskset -c 0-3",
        "stdbuf -oL",
        "if true; then",
        "{",
        "!",
    ],
)
def test_what_starts_an_old_command_is_left_out(before, capsys):
    bare = "python3 train.py --model resnet --dataset imagenet"
    assert port(capsys, f"{before} {bare}")["line"] == port(capsys, bare)["line"]


def test_a_script_that_is_started_as_a_module_is_the_same_script(capsys):
    options = "--model resnet --dataset imagenet"
    module, script = (port(capsys, f"python3 {s} {options}") for s in ("-m train", "train.py"))
    assert module["line"] == script["line"]


def test_what_the_shell_runs_for_a_value_is_run_for_the_new_command_too(capsys):
    text = "python3 train.py --model resnet --dataset imagenet --data-dir $(dirname $PWD)/x"
    assert '--data-dir "$(dirname $PWD)/x"' in port(capsys, text)["line"]
