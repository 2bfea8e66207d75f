"""Every preset takes real steps: its network, its images' way, its optimizer and its precision."""

import json
from math import isfinite

import pytest
from safetensors.torch import save_file

from phalanx.catalog.models import MODELS
from phalanx.cli.main import main
from phalanx.config.presets import builtin_preset_folder
from phalanx.models.build import build_model

NAMES = sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))
SMALL = {"image-size": 64, "batch-size": 4, "gradient-accumulation": 2, "steps": 3}
SMALL |= {"warmup-epoch": "1st", "iterations": 8, "device": "cpu", "workers": 0}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_takes_steps(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"--{option}={value}" for option, value in SMALL.items()]
    made = ["--data=generated", "--validation-mode=none", "--run-dir=run"]
    if name.startswith("finetune-"):
        model = MODELS[name.removeprefix("finetune-")]
        save_file(build_model(model, num_classes=7).state_dict(), "pretrained.safetensors")
        made += ["--init-weights=pretrained.safetensors", "--reset-head"]
    assert main(["train", name, *words, *made]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
