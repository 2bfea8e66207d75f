"""`phalanx port`: where commands come from, and what is done with the answer."""

import io
import json
import re
import subprocess
import sys

import pytest
import yaml

from phalanx.cli.main import main
from small_layouts import write_classes

OLD = "python train.py --model resnet --model-size 20 --dataset cifar-10 --epochs 20"
TINY = [
    "--data", "embedded", "--model", "resnet8", "--steps", "2", "--batch-size", "4",
    "--validation", "false", "--device", "cpu", "--precision", "32.32",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def port(capsys, *words):
    assert main(["port", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_words_text_script_and_standard_input_give_the_same(capsys, monkeypatch, tmp_path):
    (tmp_path / "run.sh").write_text(f"#!/bin/sh\ncd x\n{OLD} \\\n  --batch-size 8\n")
    expected = port(capsys, "--", *OLD.split(), "--batch-size", "8")["command"]
    assert port(capsys, *OLD.split(), "--batch-size", "8")["command"] == expected
    assert port(capsys, f"{OLD} --batch-size=8")["command"] == expected
    assert port(capsys, "--file", "run.sh")["command"] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{OLD} --batch-size 8\n"))
    assert port(capsys)["command"] == expected


def test_a_script_may_have_several_commands(capsys, tmp_path):
    text = f"source enable.sh\npip install x\n{OLD}\npython restore.py --restore-path logs/R\n"
    (tmp_path / "run.sh").write_text(text)
    first, second = port(capsys, "--file", "run.sh")
    assert first["command"][:2] == ["phalanx", "train"]
    assert second["line"] == "phalanx train --resume logs/R"
    assert main(["port", "--file", "run.sh"]) == 0
    assert "left out: line 1: source enable.sh" in capsys.readouterr().err


def test_the_answer_has_the_command_the_table_and_the_plan(capsys):
    assert main(["port", "--", *OLD.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("phalanx train tf1-resnet8 ")
    assert ["--epochs", "20", "kept", "--epochs", "20"] in [line.split() for line in lines]
    assert "defaults of TensorFlow 1 that differ" in lines
    assert any(line.startswith("global batch  32 = micro-batch 32 x") for line in lines)
    assert all(len(line) <= 100 for line in lines[: lines.index("")])


def test_a_plan_that_fails_is_told_and_ends_well(capsys):
    """A warm-up, a split or a norm that cannot be is told in the plan's place."""
    words = [*OLD.split(), "--pipeline", "--pipeline-splits", "zebra"]
    assert main(["port", "--", *words]) == 0
    assert "it would not start: --pipeline-splits: " in capsys.readouterr().out
    assert main(["port", "--run", "--data", "embedded", "--", *words]) == 2
    assert "zebra" in capsys.readouterr().err


def test_options_of_ours_are_laid_over_the_result(capsys):
    answer = port(capsys, "--steps", "3", "--enable-recompute", "--", *OLD.split())
    assert answer["resolved"]["steps"] == 3
    assert answer["resolved"]["epochs"] is None
    assert answer["resolved"]["enable-recompute"] is True
    assert answer["plan"]["warmup_steps"] < 3


@pytest.mark.parametrize(
    ("given", "spelled"),
    [("0.4", "--gpu-decode 0.4"), ("true", "--gpu-decode"), ("", "--gpu-decode")],
)
def test_a_share_of_ours_is_not_the_old_commands_first_word(capsys, given, spelled):
    line = port(capsys, "--gpu-decode", *given.split(), *OLD.split())["line"]
    assert "--epochs 20 " in line and line.endswith(f" {spelled}")


def test_variables_stay_and_are_filled_in_for_the_plan(capsys, monkeypatch):
    answer = port(capsys, f"{OLD} --data-dir $NOWHERE/imagenet")
    assert "--data-dir $NOWHERE/imagenet" in answer["line"]
    assert any(text.startswith("$NOWHERE: is not set here") for text in answer["warnings"])
    monkeypatch.setenv("NOWHERE", "/nowhere")
    answer = port(capsys, f"{OLD} --data-dir $NOWHERE/imagenet")
    assert "/nowhere/imagenet: there is no such folder here" in answer["warnings"][-1]
    assert answer["resolved"]["data"] == "cifar10"


def test_save_writes_a_file_that_trains_the_same(capsys, tmp_path):
    assert main(["port", "--save", "mine.yaml", "--", *OLD.split()]) == 0
    capsys.readouterr()
    saved = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert saved["extends"] == "tf1-resnet8"
    resolved = port(capsys, "--", *OLD.split())["resolved"]
    assert main(["plan", "mine.yaml", "--no-memory", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["options"]
    assert planned == resolved
    assert main(["port", "--save", "mine.yaml", "--", *OLD.split()]) == 2
    assert "exists already" in capsys.readouterr().err


def test_run_runs_the_new_command(capsys, tmp_path):
    words = ["--run", *TINY, "--run-dir", "R", "--", *OLD.split(), "--optimiser", "momentum"]
    assert main(["port", *words]) == 0
    assert "running: phalanx train tf1-resnet8" in capsys.readouterr().err
    options = yaml.safe_load((tmp_path / "R" / "config.yaml").read_text())
    assert (options["optimizer"], options["steps"]) == ("momentum", 2)
    assert main(["port", "--run", "python restore.py --restore-path R"]) == 0
    score = "python validation.py --model resnet --restore-path R"
    assert main(["port", "--run", "--device", "cpu", "--", *score.split()]) == 0
    assert "top-1" in capsys.readouterr().out


def test_local_leaves_the_hosts_out(capsys):
    old = f"poprun --host a,b --num-replicas 4 {OLD}"
    assert port(capsys, old)["line"].startswith("phalanx launch --host a,b")
    local = port(capsys, "--local", "--", *old.split())
    assert local["line"].startswith("phalanx train ")
    assert local["resolved"]["replicas"] == 4


def test_help_after_the_dashes_belongs_to_the_old_command(capsys):
    assert port(capsys, "--", "python", "train.py", "--help")["line"].endswith("--help")
    assert main(["port", "--help"]) == 0
    assert "usage: phalanx port" in capsys.readouterr().out


def test_an_answer_needs_no_torch():
    words = [*OLD.split(), "--shards", "2", "--gradient-accumulation-count", "2"]
    code = (
        "import sys; from phalanx.cli.main import main; "
        f"code = main(['port', '--', *{words!r}]); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'cv2')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_mistake_in_a_script_is_located(capsys, tmp_path):
    (tmp_path / "run.sh").write_text(f"{OLD}\n\n{OLD} --zebra\n")
    assert main(["port", "--file", "run.sh"]) == 2
    assert "phalanx port: line 3: --zebra: the old program" in capsys.readouterr().err


def test_a_warning_never_breaks_the_name_of_an_option(capsys):
    assert main(["port", "--", "python", "resnet_main.py", "--size", "x50", "--pipeline"]) == 0
    told = capsys.readouterr()
    assert "--num-ipus" in told.out + told.err


def test_steps_are_counted_by_the_images_that_are_here(capsys, tmp_path):
    """Not by the published number of ImageNet's, whose warm-up would outlast this run."""
    for split in ("train", "val"):
        write_classes(tmp_path / "imagenet" / split, 4)
    old = "python train.py --dataset imagenet --model-size 18 --batch-size 4"
    answer = port(capsys, f"{old} --data-dir imagenet")
    images = answer["plan"]["train_images"]
    assert 0 < images < 100
    assert answer["decided"]["warmup-epoch"] == f"{5 * images // 4}st"
    assert answer["problem"] is None
    assert port(capsys, f"{old} --data-dir none")["decided"]["warmup-epoch"] == "1601458st"
    entry = {"model": "resnet", "dataset": "imagenet", "data_dir": "imagenet", "batch_size": 4}
    (tmp_path / "c.yml").write_text(yaml.safe_dump({"mine": entry}))
    assert port(capsys, "--configs", "c.yml")["decided"]["warmup-epoch"] == f"{5 * images // 4}st"


def test_a_row_says_that_an_option_of_ours_counts(capsys):
    answer = port(capsys, "--steps", "10", "--data", "generated", "--", *OLD.split())
    rows = {row["old"]: row for row in answer["options"]}
    for old, ours in {
        "--dataset cifar-10": "--data generated",
        "--epochs 20": "--steps 10",
    }.items():
        assert rows[old]["new"] == ""
        assert rows[old]["why"] == f"does not count beside {ours}, which is given to `port`"
    implied = port(capsys, "--steps", "10", "--", *OLD.split()[:-2])["options"]
    assert not any("--epochs" in row["new"] for row in implied)


def test_what_the_command_depends_on_and_is_not_here_is_told(capsys):
    answer = port(capsys, f"cd old/app && {OLD}")
    assert answer["warnings"] == [
        "cd old/app: was left out; change to that folder first, or relative paths lead elsewhere"
    ]
    runner = "python3 -m examples_utils benchmark --spec none.yml"
    assert port(capsys, runner)["warnings"] == ["none.yml: there is no such file here"]


@pytest.mark.parametrize("flag", ["--json", "--run"])
def test_what_a_script_holds_besides_is_named_every_time(flag, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.cli.port._run_all", lambda answers: 0)
    script = tmp_path / "run.sh"
    loop = "for s in 1 2; do make data; done"
    script.write_text(f"{loop}\npython3 train.py --model resnet18 --data cifar10\n")
    assert main(["port", flag, "--file", str(script)]) == 0
    assert capsys.readouterr().err.count("left out: line 1: make data\n") == 1


@pytest.mark.parametrize(
    "wrapper",
    ["srun -n 4", "torchrun --nproc_per_node 2", "docker run --rm image", "conda run -n x",
     "python3 -m torch.distributed.launch --nproc_per_node=2", "srun --output=log.py python",
     "conda run -n python3.9 python", "xvfb-run", "srun -n 4 python -u"],
)  # fmt: skip
def test_what_starts_the_old_command_is_left_out_with_a_warning(wrapper, capsys):
    command = f"{wrapper} train.py --model resnet18 --data cifar10"
    assert main(["port", "--", *command.split()]) == 0
    printed, left = " ".join(capsys.readouterr().out.split()), re.sub(" python( -u)?$", "", wrapper)
    assert f"warning: {left}: was left out; start the new command with it" in printed


def test_commands_that_set_a_machine_up_are_no_trainings(capsys, tmp_path):
    script, line = tmp_path / "run.sh", "python3 train.py --model resnet18 --data cifar10"
    others = "conda install -y python\ndocker pull python\npoetry add python\nuv pip install python"
    others += "\npython3 -\npython3 - x"
    script.write_text(f"{others}\n{line}\n")
    assert main(["port", "--file", str(script)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("phalanx train") == 1
    assert [row.split(": ")[2] for row in printed.err.splitlines()] == others.split("\n")
