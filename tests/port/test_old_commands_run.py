"""Every command of the older READMEs runs, shrunk: few steps of small images made up."""

import re
from pathlib import Path
from typing import Any

import pytest
from small_ports import port, read_old_commands

from phalanx.cli.main import main
from phalanx.errors import EXIT_UNTRUSTED

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
    "request": "--data embedded --model resnet8",  # noise is not sent
    "export": "--data embedded --model resnet8",
}
MADE = (  # a checkpoint after each step
    "train --steps 2 --batch-size 4 --ckpts-per-epoch 2000 --validation false --device cpu "
    "--run-dir"
)
PATHS = r"generated_checkpoints_dir_path|logs/\S+"
KINDS = {  # a command of each kind, the smallest
    "train": "python3 train.py --config mk2_resnet8_test",
    "profile": "gc-profile -d D -- python3 train.py --config mk2_resnet8_test",
    "validate": "python3 validation.py --model resnet --dataset cifar-10 --restore-path logs/R",
    "resume": "python3 restore.py --restore-path logs/R",
    "average": "python3 weight_avg.py --restore-path logs/R --mode mean -N 2",
    "benchmark": "python3 -m examples_utils benchmark --spec benchmarks.yml",
    "export": "python3 export_for_serving.py --config resnet50_infer_bs16 --export-dir out",
    "request": "python3 send_request.py --config resnet50_infer_bs16 --dataset-path D",
}


def make_run(folder: Path) -> Path:
    """A run of two steps that old commands about a run can be about."""
    assert main([*MADE.split(), str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("text", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_runs_when_shrunk(text, capsys, tmp_path):
    run_shrunk(text, capsys, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_of_each_kind_runs(kind, capsys, tmp_path):
    words = run_shrunk(KINDS[kind], capsys, tmp_path)
    assert words[1] == {"profile": "train", "resume": "train", "benchmark": "bench"}.get(kind, kind)
    if kind == "profile":
        assert list(tmp_path.glob("R/profile/*"))
    if kind == "export":
        assert (tmp_path / "out" / "resnet50_infer_bs16.onnx").exists()


def run_shrunk(text: str, capsys: Any, tmp_path: Path) -> list[str]:
    """Port a command and run the result with few steps; its words."""
    if re.search(PATHS, text):
        run = make_run(tmp_path / "made")
        text = re.sub(PATHS, str(run), text)
        capsys.readouterr()
    text = re.sub(r"--data-dir[ =]\S+|my_config", lambda m: "" if "-" in m[0] else "demo", text)
    text = text.replace("--repeat 10", "--repeat 2")
    text = re.sub(r"--dataset-path \S+", "--num-images 4", text)
    (tmp_path / "old.sh").write_text(text)
    command = port(capsys, "--local", "--file", "old.sh")["command"]
    (tmp_path / "benchmarks.yml").write_text(BENCHMARKS)
    about_run = any(word == str(tmp_path / "made") for word in command)
    is_help = command[-1] == "--help"
    added = [] if about_run or is_help else SHRUNK.get(command[1], "").split()
    if "--auto-loss-scaling" in text:  # 32 bits need none
        added = [word.replace("32.32", "16.16") for word in added]
    added += ["--device", "cpu"] if about_run and command[1] == "validate" else []
    code = main(["port", "--run", "--local", *added, "--file", "old.sh"])
    if command[1] == "bench":  # a benchmark of a fifth of a second is rightly not trusted
        assert code in (0, EXIT_UNTRUSTED)
        assert list(tmp_path.glob("bench-results/*/benchmark_results.json"))
        return command
    assert code == 0
    if command[1] == "train" and not about_run and not is_help:
        assert (tmp_path / "R" / "summary.json").exists()
    return command
