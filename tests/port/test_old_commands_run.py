"""Every command of the older READMEs runs, shrunk: few steps of small images made up."""

import re
from pathlib import Path

import pytest
from small_ports import port, read_old_commands

from phalanx.cli.main import COMMANDS as COMMANDS_HERE
from phalanx.cli.main import main

COMMANDS = [text for texts in read_old_commands().values() for text in texts]
BENCHMARKS = """
tf2_resnet50_train_real_pod16:
  cmd: phalanx bench infer resnet8 --synthetic-data --batch-size 1 --seconds 0.2 --warmup 0.1
"""
SHRUNK = {
    "train": "--data generated --iterations 10 --steps 10 --image-size 32 --batch-size 4 "
    "--gradient-accumulation 4 --replicas 2 --ckpts-per-epoch 2 --workers 0 --device cpu "
    "--precision 32.32 --run-dir R",
    "validate": "--batch-size 2 --image-size 32 --workers 0 --device cpu --precision 32.32",
}
MADE = "train --steps 2 --batch-size 4 --validation false --device cpu --run-dir"
PATHS = r"generated_checkpoints_dir_path|logs/\S+"


def make_run(folder: Path) -> Path:
    """A run of two steps that old commands about a run can be about."""
    assert main([*MADE.split(), str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("text", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_runs_when_shrunk(text, capsys, tmp_path):
    if re.search(PATHS, text):
        run = make_run(tmp_path / "made")
        text = re.sub(PATHS, str(run), text)
        capsys.readouterr()
    text = re.sub(r"--data-dir[ =]\S+|my_config", lambda m: "" if "-" in m[0] else "demo", text)
    text = text.replace("--repeat 10", "--repeat 2")
    (tmp_path / "old.sh").write_text(text)
    command = port(capsys, "--local", "--file", "old.sh")["command"]
    if command[1] not in COMMANDS_HERE:
        pytest.skip(f"there is no phalanx {command[1]} yet")
    (tmp_path / "benchmarks.yml").write_text(BENCHMARKS)
    about_run = any(word == str(tmp_path / "made") for word in command)
    is_help = command[-1] == "--help"
    added = [] if about_run or is_help else SHRUNK.get(command[1], "").split()
    if "--auto-loss-scaling" in text:  # 32 bits need none
        added = [word.replace("32.32", "16.16") for word in added]
    added += ["--device", "cpu"] if about_run and command[1] == "validate" else []
    assert main(["port", "--run", "--local", *added, "--file", "old.sh"]) == 0
    if command[1] == "train" and not about_run and not is_help:
        assert (tmp_path / "R" / "summary.json").exists()
