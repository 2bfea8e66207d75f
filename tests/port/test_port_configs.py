"""`phalanx port --configs`: entries of an old configs.yml become presets that train."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_ports import port

from phalanx.cli.main import main
from phalanx.port.dialect_choice import DIALECTS

TF1 = """
.splits: &splits [b1/2/relu, b2/3/relu, b3/3/relu]
.base: &base
  model: resnet
  model_size: 50
  dataset: imagenet
  eight_bit_io: True
common: &common
  weight_decay: 1e-4
  loss_scaling: 128
mine: &mine
  <<: [*base, *common]
  epochs: 65
  batch_size: 8
  gradient-accumulation-count: 8
  replicas: 16
  optimiser: momentum
  lr_schedule: cosine
  validation: False
  enable_half_partials: off
  wandb: false
  seed:
  precision: 16.32
piped:
  <<: *mine
  batch_norm: true
  batch_size: 16
  shards: 4
  pipeline: True
  pipeline_splits: *splits
  available_memory_proportion: [0.15]
"""
TF2 = """
imagenet_config: &imagenet
  dataset: imagenet
rate: &rate {initial_learning_rate: 1e-5, epochs_to_total_decay: 8}
mine:
  <<: *imagenet
  model: resnet50
  micro-batch-size: 16
  global_batch_size: 8192
  num-replicas: 4
  num-epochs: 10
  stochastic-rounding: ON
  eight-bit-transfer: True
  optimizer-params: {momentum: 0.9}
  lr-schedule: cosine
  lr-schedule-params: *rate
  lr-warmup-params:
    warmup_mode: shift
    warmup_epochs: 2
other:
  <<: *imagenet
  model-name: resnet50
  model: resnet34
  ckpts-per-epoch: 0
"""
PYTORCH = """
small:
  model: resnet18
  data: generated
  batch_size: 4
  iterations: 4
  half_partial: True
  device_iteration: 2
  epoch: 1
  lr: 0.1
  enable_recompute: False
  pipeline_splits: []
"""
SMALL = "--image-size 32 --device cpu --precision 32.32 --workers 0 --validation false"


def port_entries(capsys, text: str, *words: str) -> dict[str, dict]:
    """The answers for several entries, by name."""
    Path("configs.yml").write_text(text, encoding="utf-8")
    assert main(["port", "--json", "--configs", "configs.yml", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return {one["entry"]: one for one in (found if isinstance(found, list) else [found])}


def rows(answer: dict) -> dict[str, dict]:
    """What became of each key, by key."""
    said = [row for row in answer["options"] if row["source"] == "command"]
    return {row["old"].partition(":")[0]: row for row in said}


# --- what becomes of entries ---


def test_an_entry_is_what_the_same_command_is(capsys):
    """The config of an entry is the one of a command that gives its keys as options."""
    found = port_entries(capsys, TF1)
    assert set(found) == {"mine", "piped"}
    options = (
        "--model resnet --model-size 50 --dataset imagenet --eight-bit-io --weight-decay 1e-4 "
        "--loss-scaling 128 --epochs 65 --gradient-accumulation-count 8 --replicas 16 "
        "--optimiser momentum --lr-schedule cosine --no-validation --precision 16.32 "
    )
    piped = (
        "--batch-norm --batch-size 16 --shards 4 --pipeline --pipeline-splits b1/2/relu b2/3/relu "
        "b3/3/relu --available-memory-proportion 0.15"
    )
    for name, more in (("mine", "--batch-size 8"), ("piped", piped)):
        command = port(capsys, "--dialect", "tf1", f"python3 train.py {options}{more}")
        assert found[name]["resolved"] == command["resolved"]
        assert found[name]["plan"] == command["plan"]
        assert found[name]["variables"] == command["variables"]
        assert found[name]["problem"] is None
    assert found["piped"]["plan"]["global_batch"] == 16 * 8 * 16


def test_every_key_has_a_row(capsys):
    found = rows(port_entries(capsys, TF1)["mine"])
    assert len(found) == 17
    assert found["gradient-accumulation-count"]["new"] == "--gradient-accumulation 8"
    assert found["validation"]["new"] == "--validation false"
    assert found["enable_half_partials"]["new"] == "--half-partials false"
    assert found["wandb"]["why"] == "off, as it is without the key"
    assert "no value" in found["seed"]["why"]
    assert found["precision"]["old"] == "precision: 16.32"


def test_no_key_is_told_twice(capsys):
    answer = port_entries(capsys, TF1)["piped"]
    assert not [row for row in answer["options"] if row["source"] == "config"]


def test_prefixes_and_parameters_in_braces_are_understood(capsys):
    found = port_entries(capsys, TF2)
    mine = found["mine"]
    assert (mine["dialect"], mine["resolved"]["model"]) == ("tf2", "resnet50")
    assert mine["resolved"]["lr-per-image"] == 1e-5
    assert (mine["resolved"]["lr-decay-length"], mine["resolved"]["warmup-epoch"]) == ("8ep", "2ep")
    assert mine["plan"]["global_batch"] == 8192
    assert mine["resolved"]["enable-stochastic-rounding"] is True
    other = found["other"]
    assert other["resolved"]["model"] == "resnet34"
    assert (
        "model-name: resnet50: does not count; model: resnet34 says otherwise"
        in (other["warnings"])
    )


def test_tensorflow_1_ignored_keys_that_were_not_written_out(capsys):
    text = "mine: {model: resnet, dataset: imagenet, batch_size: 4, gradient_accumulation: 8}"
    answer = port_entries(capsys, text)["mine"]
    assert answer["resolved"]["gradient-accumulation"] == 8
    assert answer["warnings"][0] == (
        "gradient_accumulation, taken as gradient_accumulation_count: the old program ignored a "
        "key that was not written in full"
    )


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tf1", "tf2", "pytorch"])
def test_the_keys_of_known_configurations_tell_the_program(name, every, capsys):
    """Entries made of the options of each named configuration are those configurations."""
    skipped = ("resnet50_infer", "imagenet_config", "cifar10_config")
    known = [n for n in DIALECTS[name].configs if not n.startswith(skipped)]
    configs = {n: DIALECTS[name].configs[n] for n in known[::every]}
    entries = {n: _read_options(name, text) for n, text in configs.items()}
    found = port_entries(capsys, json.dumps(entries))
    assert len(found) == len(configs) > 10 // every
    Path("configs.yml").unlink()  # in which commands would find these entries
    for entry, answer in found.items():
        assert answer["dialect"] == name
        command = port(capsys, "--dialect", name, f"python3 train.py --config {entry}")
        for figure in ("global_batch", "total_steps", "lr_highest", "replicas", "warmup_steps"):
            assert answer["plan"][figure] == command["plan"][figure], (entry, figure)


def _read_options(dialect: str, text: str) -> dict[str, object]:
    """A command line's options as keys and values, with underscores."""
    from shlex import split

    from phalanx.port.match import match_words

    table = DIALECTS[dialect].scripts["train.py"].options
    given = match_words(split(text), table).given
    values = {
        one.option.name.replace("-", "_"): (
            list(one.values) if one.option.takes == "many" else one.text
        )
        for one in given
    }
    return {key: value == "true" if value in ("true", "false") else value
            for key, value in values.items()}  # fmt: skip


def test_parts_of_other_entries_are_left_out_unless_they_are_named(capsys):
    Path("configs.yml").write_text(TF1, encoding="utf-8")
    assert main(["port", "--configs", "configs.yml"]) == 0
    printed = capsys.readouterr()
    assert "left out: .base, common: only parts of other entries" in printed.err
    assert printed.out.count("extends: ") == 2
    assert main(["port", "--configs", "configs.yml", "common", ".base"]) == 0
    printed = capsys.readouterr()
    assert "# common, an entry of a configs.yml of TensorFlow 1" in printed.out
    assert printed.out.count("extends: ") == 2
    assert "left out" not in printed.err


def test_options_of_ours_are_laid_over_entries(capsys):
    words = ["--epochs", "3", "piped", "--workers", "2"]
    resolved = port_entries(capsys, TF1, *words)["piped"]["resolved"]
    assert (resolved["epochs"], resolved["workers"]) == (3, 2)


def test_entries_of_either_program_are_taken_as_one_of_them(capsys):
    text = "mine: {batch_size: 4, replicas: 2, momentum: 0.9}"
    answer = port_entries(capsys, text)["mine"]
    assert answer["warnings"][0] == (
        "taken as entries of TensorFlow 1 (tf1); --dialect pytorch if they are not"
    )
    assert port_entries(capsys, text, "--dialect", "pytorch")["mine"]["dialect"] == "pytorch"


# --- presets ---


def test_a_preset_is_written_and_trains(capsys):
    Path("configs.yml").write_text(PYTORCH, encoding="utf-8")
    assert main(["port", "--configs", "configs.yml", "--save", "mine"]) == 0
    printed = capsys.readouterr()
    assert "wrote mine/small.yaml; train with it: phalanx train --config mine/small.yaml" in (
        printed.err
    )
    assert printed.out.startswith("phalanx train --config mine/small.yaml\n")
    words = ["--config", "mine/small.yaml", *SMALL.split(), "--run-dir", "R"]
    assert main(["train", *words]) == 0
    summary = json.loads(Path("R/summary.json").read_text())
    assert summary["steps"] == 8  # iterations x device iterations


def test_a_preset_is_found_by_its_name_beside_the_old_file(capsys):
    """./presets comes first, and what an entry extends is not the old entry of that name."""
    Path("configs.yml").write_text(TF2, encoding="utf-8")
    expected = port(capsys, "--configs", "configs.yml", "mine")
    assert main(["port", "--configs", "configs.yml", "mine", "--save", "presets"]) == 0
    text = Path("presets/mine.yaml").read_text()
    assert "extends: tf2/imagenet_config\n" in text
    capsys.readouterr()
    assert main(["plan", "--config", "mine", "--json", "--no-memory"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["global_batch"] == expected["plan"]["global_batch"]
    assert plan["total_steps"] == expected["plan"]["total_steps"]


def test_a_preset_may_have_the_name_of_the_one_that_it_extends(capsys):
    """The old program's defaults are a preset of that name, and the file here is not it."""
    Path("old.yml").write_text("cifar10_config: {dataset: cifar10, model-name: cifar_resnet8}\n")
    assert main(["port", "--configs", "old.yml", "--save", "presets"]) == 0
    assert main(["plan", "--config", "cifar10_config", "--no-memory"]) == 0
    assert "resnet8" in capsys.readouterr().out


def test_variables_that_a_preset_cannot_hold_are_in_its_comment(capsys):
    Path("configs.yml").write_text(TF1, encoding="utf-8")
    assert main(["port", "--configs", "configs.yml", "piped", "--save", "p"]) == 0
    line = "CUDNN_CONV_WSCAP_DBG=135 CUBLASLT_WORKSPACE_SIZE=138240 phalanx train --config p/piped"
    assert f"# train with it: {line}.yaml\n" in Path("p/piped.yaml").read_text()
    assert line in " ".join(capsys.readouterr().out.replace("\\\n", "").split())


def test_an_old_file_nearby_does_not_hide_presets_from_commands(capsys):
    Path("configs.yml").write_text(
        "resnet50_mk2_pipelined: {half_partial: 1}\nmine: {half_partial: 1}\n"
    )
    line = "python3 train_lightning.py --config"
    answer = port(capsys, f"{line} resnet50_mk2_pipelined")
    assert answer["command"] == ["phalanx", "train", "pl/resnet50_mk2_pipelined"]
    assert answer["problem"] is None
    answer = port(capsys, f"{line} mine")
    assert (
        "--config mine: no preset is called that here; `phalanx port --configs"
        in (answer["warnings"][0])
    )


def test_torch_is_not_imported():
    Path("configs.yml").write_text(TF1, encoding="utf-8")
    code = (
        "import sys; from phalanx.cli.main import main; "
        "assert main(['port', '--configs', 'configs.yml']) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# --- mistakes ---


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (TF1, ["--configs", "none.yml"], "--configs none.yml: no such file; name the configs.yml"),
        ("a: [1", [], "configs.yml:1: not valid YAML"),
        ("a: &a {<<: 3}", [], "configs.yml:1: not valid YAML: expected a mapping"),
        ("just a sentence", [], "configs.yml:1: expected lines of the form"),
        ("", [], "configs.yml: has no entries; name the configs.yml of an older program"),
        (".base: {model: resnet}", [], "all entries are parts of others (.base); name the one"),
        ("model: resnet\nepochs: 3", [], "configs.yml:1: model: expected the name of an entry, and "
                                         "its options below it; got a single value"),
        ("mine: [model, resnet]", [], "configs.yml:1: mine: expected the name of an entry, and its "
                                      "options below it; got a list"),
        (TF1, ["minne"], "configs.yml: has no entry minne; did you mean 'mine'?"),
        (TF1.replace("epochs:", "ephocs:"), [], "configs.yml:13: ephocs: the old program has no "
                                                "such option; did you mean epochs"),
        (TF1.replace("batch_size: 8", "batch_sise: 8"), [], "did you mean batch_size"),
        (TF1.replace("epochs: 65", "learning_rate: 1"), [],
         "configs.yml:13: learning_rate: may stand for learning_rate_decay, "
         "learning_rate_schedule; write the one you mean in full"),
        (TF1.replace("epochs: 65", "epochs: many"),
         [], "configs.yml:13: epochs: expected a number"),
        (TF1.replace("pipeline: True", "pipeline: perhaps"),
         [], "pipeline: expected true or false"),
        (TF1.replace("epochs: 65", "epochs: {a: b}"),
         [], "epochs: expected a value, got a mapping"),
        (TF1.replace("epochs: 65", "epochs: 65\n  iterations: 9"), [],
         "mine: epochs and iterations: only one of them may be given; choose one"),
        (TF1, ["--run"], "--run: is for commands, and --configs for entries; train with a preset"),
        (TF1, ["--file", "run.sh"], "--file: is for commands, and --configs for entries"),
        (TF1, ["--dialect", "popart"], "--dialect popart: that program read no configs.yml"),
        (TF1, ["--dialect", "tf9"], "--dialect tf9: no such dialect"),
        (TF1, ["--save", "configs.yml"], "--save configs.yml: is a file; with --configs, name a"),
        ("a/b: {model: resnet, dataset: imagenet}", ["--save", "p"], "cannot be the name of a"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered(text, words, said, capsys):
    Path("configs.yml").write_text(text, encoding="utf-8")
    assert main(["port", "--configs", "configs.yml", *words]) == 2
    printed = capsys.readouterr()
    assert said in " ".join(printed.err.split())
    assert "Traceback" not in printed.err
    assert not Path("p").exists()


def test_what_several_entries_merge_is_told_once(capsys):
    Path("configs.yml").write_text(TF1.replace("loss_scaling", "los_scaling"), encoding="utf-8")
    assert main(["port", "--configs", "configs.yml"]) == 2
    told = capsys.readouterr().err
    assert told.count("los_scaling: the old program has no such option") == 1
    assert "to leave an entry out, name those to port after the file" in told


def test_nothing_is_written_over(capsys):
    Path("configs.yml").write_text(TF1, encoding="utf-8")
    Path("p").mkdir()
    Path("p/piped.yaml").write_text("mine")
    assert main(["port", "--configs", "configs.yml", "--save", "p"]) == 2
    assert "--save p: p/piped.yaml exists already; remove it, or name another" in (
        capsys.readouterr().err
    )
    assert [path.name for path in Path("p").iterdir()] == ["piped.yaml"]
