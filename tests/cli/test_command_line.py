"""The commands that need no training: what they say, and how soon."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import phalanx
from phalanx.cli import packages
from phalanx.cli.main import COMMANDS, load_command, main
from phalanx.config.presets import builtin_preset_folder, iterate_old_presets
from phalanx.config.schema import OPTIONS

HOME = Path(phalanx.__file__).parents[2]


@pytest.fixture(autouse=True)
def here(empty_folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def say(capsys):
    """Run a command line that goes well; what it printed."""

    def run(*words: str) -> str:
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def start(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *words], capture_output=True, text=True, check=False
    )


# --- help ---


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_overview_lists_every_command(say, words):
    out = say(*words)
    assert out.startswith("usage: phalanx COMMAND") and len(COMMANDS) >= 12
    for name, (_, summary) in COMMANDS.items():
        assert f"  {name} " in out and summary in out


@pytest.mark.parametrize("columns", [40, 59, 60, 80])
def test_a_narrow_terminal_shows_every_word_of_the_help(say, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = say("train", "--help")
    options = out.partition("Examples")[0]
    assert "…" not in out and max(map(len, options.splitlines())) <= columns
    shown = "".join(out.split())
    for option in OPTIONS.values():
        assert f"--{option.name}" in out
        assert "".join(option.help.split()) in shown, option.name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_examples(say, name):
    out = say(*name.split(), "--help")
    assert out.startswith(f"usage: phalanx {name}")
    assert f"  phalanx {name}" in out.partition("Examples")[2]
    used = set(re.findall(r"--[a-z][\w-]*", out.partition("\n\n")[0])) - {"--option"}
    # rich before 14.3 indents by one column more
    assert used <= set(re.findall(r"^ {4,5}(--[\w-]+)", out, flags=re.MULTILINE))


def test_a_group_lists_its_commands(say):
    for words in (["presets"], ["presets", "--help"]):
        out = say(*words)
        assert "presets ls" in out and "presets cp" in out and "doctor" not in out


def test_the_help_of_train_names_every_option_with_its_default(say):
    out = say("train", "--help")
    for name in OPTIONS:
        assert f"--{name} " in out
    assert "[64]" in out and "[runs/NAME-TIME]" in out and "[off]" in out


@pytest.mark.parametrize(
    ("model", "own", "others", "defaults"),
    [
        (
            "efficientnet-b4",
            "--efficientnet-group-dim",
            "--shortcut-type",
            ("380 for", "0.2", "0.4"),
        ),
        ("resnet20", "--shortcut-type", "--efficientnet-group-dim", ("32 for", "0.0", "A")),
    ],
)
def test_help_with_a_model_ends_with_what_only_its_family_has(say, model, own, others, defaults):
    for words in (["--model", model], [f"--model={model}"]):
        out = say("train", *words, "--help")
        tail = out.partition("Examples")[2]
        assert own in tail and own not in out.partition("Examples")[0]
        assert others not in out
        last = tail.partition("Defaults of ")[2]
        assert last.startswith(model.replace("-", "_"))
        assert all(value in last for value in defaults)


def test_help_with_a_model_that_does_not_exist_names_near_ones(capsys):
    assert main(["train", "--model", "resnet51", "--help"]) == 2
    assert "did you mean 'resnet65' or 'resnet56' or 'resnet50'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_text_is_a_sentence_before_its_default(name):
    command = load_command(name)
    options = [OPTIONS[option] for option in command.options]
    for shown in (*command.arguments, *options):
        text = re.sub(r"  \[[^]]+\]$", "", shown.help)
        assert text.endswith("."), f"{shown.name}: {shown.help}"


def test_an_example_stays_indented_where_it_is_wrapped(say, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    examples = say("launch", "--help").partition("Examples\n")[2].splitlines()
    assert len(examples) > 2 * len(load_command("launch").examples)
    assert [line for line in examples if not re.match(r"  (phalanx |    \S)", line)] == []


def test_help_wins_over_mistakes(say):
    assert say("train", "--epochz", "3", "--help").startswith("usage: phalanx train")


def test_the_version(say):
    assert say("--version") == f"phalanx {phalanx.__version__}\n"


# --- without torch ---

QUICK = {
    "overview": (["--help"], 0),
    "help of train": (["train", "--help"], 0),
    "misspelt option": (["train", "--epochz", "3"], 2),
    "two wrong values": (["train", "demo", "--lr", "fast", "--keep", "0"], 2),
    "misspelt preset": (["plan", "dmeo"], 2),
}


IMPOSSIBLE = (
    "--warmup-epoch 20",
    "--lr-schedule step",
    "--lr-schedule step --lr-epoch-decay 6,2",
    "--auto-loss-scaling --precision 32.32",
    "--enable-recompute --recompute-checkpoints layer9",
    "--epochs 2 --steps 9",
    "--weight-avg-strategy mean --weight-avg-N 99",
    "--logs-per-epoch 1/3",
    "--training false --validation false",
    "--training false --ema-decay 2",
    "--device cpu --replicas 2 --no-fold",
    "--replicas 6 --bn-span 4",
    "--global-batch-size 100",
    "--device cpu --devices 3 --replicas auto",
)
WITHOUT_TORCH = """
import json, sys
from phalanx.cli.main import main

for words, code in json.loads(sys.argv[1]):
    found = main(words)
    assert found == code, f"{words} ended with {found}"
    assert "torch" not in sys.modules, f"{words} imported torch"
"""


def test_help_plans_and_mistakes_never_import_torch():
    lines = [
        *QUICK.values(),
        *(([*name.split(), "--help"], 0) for name in COMMANDS),
        (["plan", "--json", "--no-memory"], 0),
        (["plan", "--at", "soon"], 2),
        (["plan", "cifar10-resnet20", "--origin", "--no-memory"], 0),
        (["presets", "ls"], 0),
        (["data", "show"], 0),
        (["data", "show", "--step", "0"], 2),
        (["train", "--data", "folder"], 3),
        (["train", "--data", "folder", "--data-dir", "nowhere"], 3),
        (["train", "--resume", "nowhere"], 4),
        (["train", "--fork", "nowhere"], 4),
        (["validate", "nowhere"], 4),
        (["predict", "nowhere", "nothing.png"], 3),
        (["report", "nowhere"], 4),
        (["compare", "nowhere", "nowhere"], 4),
        *((["train", "demo", *pair.split()], 2) for pair in IMPOSSIBLE),
        (["bench", "overhead", "--pairs", "none"], 2),
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("phalanx train: ") >= 7, "the mistakes were told"


@pytest.mark.parametrize(
    ("words", "names"),
    [("compare a", "RUN"), ("predict", "RUN, IMAGE|DIR"), ("bench serve", "FILE|RUN")],
)
def test_missing_arguments_are_named_as_in_the_help(words, names, capsys):
    assert main(words.split()) == 2
    problem = f"the following arguments are required: {names}; see phalanx "
    assert problem in capsys.readouterr().err


# --- plan ---


def test_a_plan_as_json_holds_numbers_options_and_origins(say):
    answer = json.loads(say("plan", "demo", "--batch-size", "32", "--replicas", "2", "--json"))
    assert answer["name"] == "demo"
    assert answer["plan"]["global_batch"] == 64 and answer["plan"]["total_steps"] == 1000
    assert answer["options"]["batch-size"] == 32 and list(answer["options"]) == list(OPTIONS)
    assert (answer["origins"]["batch-size"], answer["origins"]["lr"]) == ("flag", "preset demo")


def test_a_plan_in_words_shows_the_arithmetic(say):
    out = say("plan", "--batch-size", "16", "--gradient-accumulation", "2", "--replicas", "4")
    assert "128 = micro-batch 16 x accumulation 2 x replicas 4" in out
    assert "500 steps = 8 epochs of 62.5 steps" in out
    assert not Path("runs").exists(), "a plan writes nothing"


def test_origins_say_who_set_each_option(say):
    Path("mine.yaml").write_text("extends: demo\nlr: 0.3\n")
    out = say("plan", "mine.yaml", "--seed", "7", "--origin")
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert set(OPTIONS) <= set(rows)
    assert rows["lr"].split() == ["lr", "0.3", "file", "mine.yaml"]
    assert rows["seed"].endswith("flag") and rows["keep"].endswith("default")
    assert rows["momentum"].endswith("preset demo")
    assert rows["wandb"].split()[1] == "false" and rows["wandb-project"].split()[1] == "none"


def test_a_preset_can_be_named_three_ways(say):
    named = [say("plan", *words, "--json") for words in (["demo"], ["--config", "demo"], [])]
    assert len(set(named)) == 1


def test_the_catalog_stands_in_for_data_that_is_not_here(say):
    answer = json.loads(say("plan", "--data", "cifar10", "--json"))
    assert answer["plan"]["train_images"] == 50_000 and answer["plan"]["num_classes"] == 10


def test_old_spellings_work_as_flags(say):
    words = ("--epoch", "2", "--checkpoint-path", "runs/a", "--imagenet-data-path", "pictures")
    Path("pictures").mkdir()
    options = json.loads(say("plan", "demo", *words[:4], "--json"))["options"]
    assert (options["epochs"], options["run-dir"]) == (2.0, "runs/a")
    assert main(["plan", "folder-resnet18", *words[4:]]) == 3, "the folder is empty, and was found"


def test_a_switch_may_stand_alone_or_with_a_word(say):
    for words in (["--zero-init-residual"], ["--zero-init-residual=yes"]):
        assert json.loads(say("plan", *words, "--json"))["options"]["zero-init-residual"] is True


# --- presets ---


def test_presets_are_listed_with_what_they_are(say):
    Path("presets").mkdir()
    Path("presets/cats.yaml").write_text("# cats at night\nlr: 1\n")
    lines = dict(line.split(None, 1) for line in say("presets", "ls").splitlines())
    assert lines["cats"] == "cats at night"
    ours = {path.stem for path in builtin_preset_folder().glob("*.yaml")}
    assert len(ours) >= 8 and set(lines) == ours | {"cats"}
    listed = json.loads(say("presets", "ls", "--json"))
    assert {row["name"]: row["about"] for row in listed} == lines


def test_old_names_are_listed_apart_with_what_they_are(say):
    lines = dict(line.split(None, 1) for line in say("presets", "ls", "--old").splitlines())
    assert len(lines) == len(list(iterate_old_presets())) >= 50
    assert lines["tf2/resnet8_test"].startswith("ResNet-8 on CIFAR-10"), "its name is not enough"
    assert lines["resnet50_mk2_pipelined"].endswith("4 replicas of four stages (PyTorch Lightning)")
    listed = json.loads(say("presets", "ls", "--old", "--json"))
    assert {row["name"]: row["about"] for row in listed} == lines
    assert "extends: tf1-resnet50-bn" in say("presets", "cat", "mk2_resnet50_bn_16ipus")


@pytest.mark.parametrize("words", [["--config"], []])
def test_an_old_name_is_planned(words, say):
    answer = json.loads(say("plan", *words, "mk2_resnet50_bn_64ipus", "--json", "--no-memory"))
    plan = answer["plan"]
    assert (plan["global_batch"], plan["replicas"], plan["total_steps"]) == (16_384, 16, 7819)
    assert answer["origins"]["replicas"] == "preset mk2_resnet50_bn_64ipus"


@pytest.mark.parametrize("command", ["train", "plan", "validate", "bench train", "bench infer"])
def test_a_name_of_two_applications_is_an_error_with_both(command, capsys):
    assert main([*command.split(), "--config", "resnet8_test"]) == 2
    told = capsys.readouterr().err
    assert "tf1/resnet8_test (TensorFlow 1) or tf2/resnet8_test (TensorFlow 2)" in told


def test_a_preset_is_printed_as_it_is_written(say):
    assert say("presets", "cat", "demo") == (builtin_preset_folder() / "demo.yaml").read_text()


def test_a_copied_preset_is_the_one_that_is_used(say, capsys):
    assert "presets/demo.yaml" in say("presets", "cp", "demo")
    copy = Path("presets/demo.yaml")
    assert copy.read_text() == (builtin_preset_folder() / "demo.yaml").read_text()
    copy.write_text(copy.read_text().replace("epochs: 8", "epochs: 4"))
    answer = json.loads(say("plan", "demo", "--json"))
    assert answer["plan"]["epochs"] == 4.0
    assert answer["origins"]["epochs"] == "preset presets/demo.yaml"
    assert main(["presets", "cp", "demo"]) == 2
    assert "presets/demo.yaml: already exists; name another" in capsys.readouterr().err


def test_a_preset_is_copied_to_a_file_or_into_a_folder(say):
    Path("shelf").mkdir()
    say("presets", "cp", "mnist-resnet8", "shelf")
    say("presets", "cp", "mnist-resnet8", "deep/er/mine.yaml")
    texts = {Path(p).read_text() for p in ("shelf/mnist-resnet8.yaml", "deep/er/mine.yaml")}
    assert texts == {(builtin_preset_folder() / "mnist-resnet8.yaml").read_text()}


def test_an_entry_of_configs_yml_is_printed_and_copied_alone(say):
    Path("configs.yml").write_text("cats:\n  lr: 0.5\ndogs:\n  lr: 0.25\n")
    assert "0.5" in say("presets", "cat", "cats")
    assert "0.25" not in say("presets", "cat", "cats")
    say("presets", "cp", "cats", "mine.yaml")
    assert json.loads(say("plan", "mine.yaml", "--json"))["options"]["lr"] == 0.5


# --- data show, doctor ---


def test_data_show_draws_the_batch_of_a_step(say):
    words = ("data", "show", "demo", "--batch-size", "6")
    assert say(*words, "--step", "3", "--out", "a.png") == "a.png: step 3, 6 images\n"
    say(*words, "--step", "3", "--workers", "2", "--out", "b.png")
    say(*words, "--step", "4", "--out", "c.png")
    with Image.open("a.png") as first, Image.open("b.png") as again, Image.open("c.png") as other:
        assert first.format == "PNG" and min(first.size) > 100
        below_the_title = (0, first.height // 2, first.width, first.height)
        sheets = [sheet.crop(below_the_title).tobytes() for sheet in (first, again, other)]
    assert sheets[0] == sheets[1] != sheets[2]


def test_the_doctor_looks_at_everything(say):
    findings = {row["what"]: row for row in json.loads(say("doctor", "--json"))}
    assert {"python", "torch", "numpy", "safetensors", "cpu", "memory", "disk here"} <= set(
        findings
    )
    assert all(row["state"] in ("ok", "note") for row in findings.values())
    assert "ready to train" in say("doctor")


def test_the_doctor_lists_every_dependency_and_every_extra(say, monkeypatch):
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    extras = set(project["optional-dependencies"]) - {"dev"}
    findings = {row["what"]: row for row in json.loads(say("doctor", "--json"))}
    assert needed <= set(findings)
    assert {name for name in findings if name.startswith("extra ")} == {
        f"extra {name}" for name in extras
    }
    monkeypatch.setattr("phalanx.cli.doctor.find_spec", lambda name: None)
    told = say("doctor")
    assert "note  extra sweep             optuna is not installed (phalanx sweep)\n" in told
    assert "-> pip install 'phalanx[sweep]'\n" in told and "ready to train" in told
    lacking = {"starlette", "orjson"}
    monkeypatch.setattr("phalanx.cli.doctor.find_spec", lambda name: name not in lacking or None)
    findings = {row["what"]: row for row in json.loads(say("doctor", "--json"))}
    found = "starlette, orjson are not installed (phalanx serve)"
    assert findings["extra serve"]["found"] == found


def test_the_doctor_names_packages_that_are_too_old(say, monkeypatch, capsys):
    old = {"torch": "2.9.1+cpu", "simplejpeg": "1.7.9", "onnx": "1.16.2", "onnxscript": "0.4.0"}
    version = packages.metadata.version
    monkeypatch.setattr(packages.metadata, "version", lambda name: old.get(name) or version(name))
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "MISS  torch                   2.9.1+cpu is too old (everything)\n" in told
    assert "-> pip install 'torch>=2.11'\n" in told and "\n1 missing or too old\n" in told
    assert "note  simplejpeg              1.7.9 is too old (fast JPEG decoding" in told
    assert "note  extra export            onnx 1.16.2, onnxscript 0.4.0 are too old (" in told
    assert "-> pip install 'phalanx[export]'\n" in told
    monkeypatch.setattr(packages.metadata, "requires", lambda name: None)
    assert "ok    torch                   2.9.1+cpu (everything)\n" in say("doctor")


@pytest.mark.parametrize("words", [("doctor",), ("train", "demo", "--steps", "1")])
def test_packages_that_do_not_fit_are_no_bug_of_phalanx(tmp_path, monkeypatch, words):
    (tmp_path / "old").mkdir()
    for name in ("pydantic", "rich"):
        (tmp_path / f"old/{name}.py").write_text("raise SystemError('another core')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'old'}{os.pathsep}{HOME / 'src'}")
    done = start(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"phalanx {words[0]}: packages that Phalanx needs are missing or too old:\n"
        "  pydantic: another core (options); pip install pydantic\n"
        "  rich: another core (progress and help); pip install rich\n"
    )


def test_the_doctor_warns_of_more_threads_than_cores(say, monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    findings = {row["what"]: row for row in json.loads(say("doctor", "--json"))}
    assert findings["threads"]["state"] == "ok" and not findings["threads"]["remedy"]
    assert findings["threads"]["found"].startswith("4 per process (from OMP_NUM_THREADS;")
    monkeypatch.delenv("OMP_NUM_THREADS")
    told = say("doctor")
    assert "note  threads                 8 per process (one per core;" in told
    assert "to run two processes here, give each --threads 4: with more threads" in told
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "MISS  threads                 OMP_NUM_THREADS is 100000: at most 1,024 thr" in told
    assert "-> set it to the number of cores or less, unset it, or give --threads\n" in told


# --- the process ---


def test_the_process_ends_with_the_commands_code():
    good, bad = start("presets", "cat", "demo"), start("trian")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("# ResNet-8")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "phalanx: no command is called 'trian'; did you mean 'train'?\n"


def test_a_reader_that_has_enough_is_no_error(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "presets", "ls"],
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
