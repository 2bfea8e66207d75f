"""Every mistake gets where, what and the way out, a code, and no traceback."""

import json
from pathlib import Path

import pytest
from PIL import Image

import phalanx
from phalanx.cli.main import main
from phalanx.disk import quote_path
from phalanx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_folder")

CONFIG, DATA, CHECKPOINT = 2, 3, 4


def add_images(folder: str, count: int = 1) -> None:
    Path(folder).mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(Path(folder) / f"{number}.png")


def files_here() -> list[Path]:
    """Everything but the indices that are kept beside data."""
    return sorted(path for path in Path().rglob("*") if ".phalanx" not in path.parts)


@pytest.fixture
def fail(capsys):
    """Run a command line that goes wrong; what it said. Nothing may be left behind."""

    def run(*words: str, code: int) -> str:
        before = files_here()
        assert main(words) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("phalanx") and err.endswith("\n") and "Traceback" not in err
        assert files_here() == before, "a mistake leaves nothing behind"
        return err.removesuffix("\n")

    return run


SPELLING = [
    ("trian", "phalanx: no command is called 'trian'; did you mean 'train'?"),
    ("data shwo", "phalanx: no command is called 'data shwo'; did you mean 'data show'?"),
    ("--halp", "phalanx: no command is called '--halp'; "),
    ("train --batch-sise 3", "phalanx train: --batch-sise: no such option; did you mean '--batch"),
    ("train --batch-sise=3", "phalanx train: --batch-sise: no such option; did you mean '--batch"),
    ("train --epochz 3", "phalanx train: --epochz: no such option; did you mean '--epochs'?"),
    (
        "plan demo --max-bad=--",
        "phalanx plan: --max-bad: -- is not a value; give another, or leave the",
    ),
    ("train --resum runs/a", "phalanx train: --resum: no such option; did you mean '--resume'?"),
    ("plan --jsn", "phalanx plan: --jsn: no such option; did you mean '--json'?"),
    ("doctor --jsn", "phalanx doctor: --jsn: no such option; did you mean '--json'?"),
    ("validate resnet8 --lr 1", "phalanx validate: --lr: no such option; "),
    ("train dmeo", "phalanx train: dmeo: no preset is called that; did you mean 'demo'?"),
    ("presets cat demo --json", "phalanx presets cat: --json: no such option; there are none"),
    ("presets cat dmeo", "phalanx presets cat: dmeo: no preset is called that; did you mean 'demo"),
    ("train mine.yaml", "phalanx train: mine.yaml: no such file; `phalanx presets ls` lists"),
    ("train --model resnet19", "phalanx train: --model: no model is called 'resnet19'; did you m"),
    ("train --data cifar", "phalanx train: --data: no dataset is called 'cifar'; did you mean 'c"),
    ("train demo --data cifar", "phalanx train: --data: no dataset is called 'cifar'; did you me"),
    (
        "train --data nope",
        "phalanx train: --data: no dataset is called 'nope'; choose from embedded, ",
    ),
    (
        "train demo --data nope",
        "phalanx train: --data: no dataset is called 'nope'; choose from emb",
    ),
    ("train --lr-schedule cosin", "phalanx train: --lr-schedule: no choice is called 'cosin'; di"),
]

VALUES = [
    ("train --batch-size many", "--batch-size: expected a whole number, got 'many'"),
    ("train --batch-size 1.5", "--batch-size: expected a whole number, got '1.5'"),
    ("train --lr fast", "--lr: expected a number, got 'fast'"),
    ("train --lr nan", "--lr: expected a number, got nan"),
    ("train --lr -1e-3", "--lr: must be at least 0.0, got -0.001"),
    ("train --batch-size 0", "--batch-size: must be at least 1, got 0"),
    ("train --momentum 2", "--momentum: must be at most 1.0, got 2.0"),
    ("train --zero-init-residual=maybe", "--zero-init-residual: expected true or false, got 'may"),
    ("train --warmup-epoch soon", "--warmup-epoch: expected a length such as 5ep, 500st or 10%"),
    ("train --warmup-epoch 9ep", "--warmup-epoch: 9ep is 1125 steps, longer than the run of 1000"),
    ("train --epochs 0.001", "--epochs: 0.001 epochs of 125 steps are less than one step; train "),
    ("train --epochs 2 --steps 3", "--epochs: give epochs or steps, not both"),
    ("train --epochs 1 --batch-size 9000", "--epochs: 1 epoch of 0.888889 steps is less than "),
    ("train --epoch-tail drop --batch-size 9000", "--epoch-tail drop: 8000 images do not fill "),
    ("train --device nonsense", "--device: expected auto, cpu, cuda, cuda:0,2 or mps, got 'non"),
    ("train demo --data-dir x", "--data-dir: embedded does not read a folder; say what is there"),
    ("train --replicas many", "--replicas: expected a whole number or auto, got 'many'"),
    ("train --replicas 0", "--replicas: must be at least 1, got 0"),
    ("train --device cpu --replicas 16 --no-fold", "--no-fold: 16 replicas need 16 devices, and "
     "there is 1; with --no-fold false, each device runs several of them, one after the other"),
    ("train --device cpu --devices 2 --replicas 3 --no-fold", "--no-fold: 3 replicas need 3 "
     "devices, and there are 2; "),
    ("train --device cuda:0,2 --devices 4 --replicas 4", "--devices 4: --device cuda:0,2 names "
     "only 2 devices; use --devices 2, or --device cuda for all"),
    ("train --device mps --devices 2 --replicas 2", "--devices 2: --device mps names only 1 "
     "device; use --devices 1"),
    ("train --bn-span 2", "--bn-span 2: there is only 1 replica; give --replicas 2, or a multiple"
     " of that, or --bn-span 1"),
    ("train --replicas 12 --bn-span 5", "--bn-span 5: does not divide 12 replicas; use 1, 2, 3, 4"
     ", 6 or 12"),
    ("train --replicas 3 --batch-size 8 --global-batch-size 100", "--global-batch-size 100: is not"
     " a multiple of 24 = micro-batch 8 x replicas 3; use --global-batch-size 96 or 120"),
    ("train --device cpu --devices 4 --replicas auto", "--replicas auto: the global batch of 64, "
     "which it keeps, is not a multiple of 256 = micro-batch 64 x replicas 4; use --batch-size 16 "
     "--global-batch-size 64 or --global-batch-size 256"),
    ("train --gradient-accumulation 2 --global-batch-size 128", "--gradient-accumulation: give "
     "gradient-accumulation or global-batch-size, not both"),
    ("train --resume a --fork b", "--resume continues a run, --fork starts a new one from its"),
    ("data show --step 0", "--step: expected a step from 1 to 1,000, got '0'"),
    ("data show --step 1001", "--step: expected a step from 1 to 1,000, got '1001'"),
    ("data show --step x", "--step: expected a step from 1 to 1,000, got 'x'"),
    ("data show --data synthetic", "--data synthetic: its noise is made on the device"),
    ("bench overhead --pairs 1", "--pairs: expected a whole number of at least 3, got '1'"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), SPELLING, ids=[line for line, _ in SPELLING])
def test_a_misspelt_name_is_answered_with_the_near_one(fail, line, said):
    assert fail(*line.split(), code=CONFIG).startswith(said)


@pytest.mark.parametrize(("line", "said"), VALUES, ids=[line for line, _ in VALUES])
def test_a_wrong_value_is_answered_with_what_is_wanted(fail, line, said):
    words = line.split()
    name = next(two for two in (" ".join(words[:2]), words[0]) if two in KNOWN)
    assert fail(*words, code=CONFIG).startswith(f"phalanx {name}: {said}")


KNOWN = ("train", "data show", "bench overhead")


ELSEWHERE = [
    ("--optimiser sgd", "it is --optimizer here"),
    ("--num-epochs 3", "it is --epochs here"),
    ("--micro-batch-size 3", "it is --batch-size here"),
    ("--micro_batch_size 3", "it is --batch-size here"),
    ("--gradient-accumulation-count 3", "it is --gradient-accumulation here"),
    ("--enable-half-partials", "it is --half-partials here"),
    ("--enable-recomputation", "it is --enable-recompute here"),
    ("--recomputation", "it is --enable-recompute here"),
    ("--log-freq 3", "it is --logs-per-epoch here, a rate: times per epoch, not steps between two"),
    (
        "--restore-path x",
        "use `phalanx train --resume RUN` to continue a run, or --init-weights FILE to start from "
        "weights",
    ),
    (
        "--BN-decay 0.9",
        "it is --batchnorm-momentum here, the share of the new batch: 1 minus the decay",
    ),
    ("--shuffle", "there is nothing to set: every epoch has a new random order"),
    ("--epochs-per-ckpt 2", "it is --ckpts-per-epoch here, a rate: 1/N for every N epochs"),
    ("--rmsprop-epsilon 1", "it is --optimizer-eps here"),
    ("--abs-end-learning-rate 1", "it is --lr-end-ratio here, as a share of the peak"),
    ("--num-replicas 4", "it is --replicas here, which fold onto fewer devices"),
    ("--gpus 4", "it is --devices here, with --replicas auto for a replica on each"),
    ("--sync-batchnorm", "it is --bn-span here, with the number of replicas"),
    ("--total-batch-size 4", "it is --global-batch-size here"),
    ("--ipus-per-replica 2", "it is --shards here, the devices of one replica"),
    (
        "--world-size 4",
        "there is no option for it: `phalanx train --replicas N` starts a rank for each device, or "
        "joins the ranks that torchrun started",
    ),
]


@pytest.mark.parametrize(("words", "hint"), ELSEWHERE)
def test_what_other_programs_call_an_option_is_answered_with_ours(fail, words, hint):
    flag = words.split()[0]
    said = fail("train", "demo", *words.split(), code=CONFIG)
    assert said == f"phalanx train: {flag}: no such option; {hint}"
    Path("mine.yaml").write_text(f"{flag.removeprefix('--')}: 1\n")
    said = fail("plan", "mine.yaml", code=CONFIG)
    assert said.endswith(f"mine.yaml:1: {flag.removeprefix('--')}: no such option; {hint}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--num-ipus 6 --replication-factor 4",
            "--num-ipus 6: the number of devices must be a multiple of the replication factor, 4; "
            "use 4 or 8",
        ),
        (
            "--num-ipus=4 --replication-factor=2 --batch-size=30",
            "--batch-size 30: the batch size must be a multiple of the number of devices, 4; use "
            "28 or 32",
        ),
        (
            "--num_ipus 8 --replication_factor 4 --batch-size 32",
            "--num-ipus 8 --replication-factor 4: write --replicas 4 --shards 2 --batch-size 8",
        ),
    ],
)
def test_the_counts_of_the_popart_program_are_worked_out(fail, words, told):
    said = fail("train", "demo", *words.split(), code=CONFIG).splitlines()
    assert said[0] == "phalanx train: 3 problems:" and said[-1].strip() == told
    assert "it is --shards here" in said[1] and "it is --replicas here" in said[2]


def test_a_command_without_options_of_a_run_hints_at_none(fail):
    said = fail("doctor", "--optimiser", code=CONFIG)
    assert "--optimizer" not in said


@pytest.mark.parametrize(
    "words", ["models show resnet8 --pretrained", "predict r i --input-size 3"]
)
def test_what_a_command_cannot_do_is_not_answered_with_what_is_spelt_alike(fail, words):
    said = fail(*words.split(), code=CONFIG)
    assert "no such option; " in said and "did you mean" not in said


BESIDE = "is given as well; leave this one out"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-b 3", "-b: no such option; it is --batch-size here"),
        ("-j 3", "-j: no such option; it is --workers here"),
        ("-lr 3", "-lr: no such option; did you mean '--lr'?"),
        ("--batch_size 3", "--batch_size: no such option; did you mean '--batch-size'?"),
        ("--maxEpochs 3", "--maxEpochs: no such option; it is --epochs here"),
        ("--no-validation", "--no-validation: no such option; write --validation false"),
        ("--opt sgd --optimizer lamb", f"--opt: no such option; --optimizer {BESIDE}"),
        ("--batch-sise 3 --batch-size 4", f"--batch-sise: no such option; --batch-size {BESIDE}"),
        ("--batch_size 3 --batch-size 4", f"--batch_size: no such option; --batch-size {BESIDE}"),
        ("--zzz", "--zzz: no such option; none of the 1"),
    ],
)
def test_an_option_in_another_spelling_is_answered_and_never_with_one_that_is_given(
    fail, words, said
):
    assert fail("plan", "demo", *words.split(), code=CONFIG).startswith(f"phalanx plan: {said}")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--precision 16-mixed", "it is 16.32 here, with --half-type float16 --auto-loss-scaling"),
        ("--precision bf16", "it is 16.32 here, with --half-type bfloat16, which is the default"),
        (
            "--optimizer adam",
            "it is adamw here, with --weight-decay 0 to be Adam; its L2 decay is "
            "--l2-regularization",
        ),
        ("--lr-schedule onecycle", "it is cosine here, with --warmup-epoch 25%"),
        ("--optimizer lion", "there is no such optimizer; the nearest is adamw"),
    ],
)
def test_what_other_programs_call_a_value_is_answered_with_ours(fail, words, answer):
    flag, value = words.split()
    said = fail("plan", "demo", flag, value, code=CONFIG)
    assert said == f"phalanx plan: {flag}: no choice is called {value!r}; {answer}"


def test_so_are_datasets_and_devices(fail):
    said = fail("train", "--data", "ImageFolder", code=CONFIG)
    assert said == "phalanx train: --data: no dataset is called 'ImageFolder'; it is folder here"
    said = fail("plan", "demo", "--device", "gpu", code=CONFIG)
    assert said.endswith("or mps, got 'gpu'; it is cuda here, or cuda:0 for the first one")


def test_a_keyword_of_another_program_is_answered_with_ours():
    with pytest.raises(ConfigError) as caught:
        phalanx.train("demo", max_epochs=3, opt="sgd", precision="16-mixed")
    assert "--max-epochs: no such option; it is --epochs here\n" in str(caught.value)
    assert "--opt: no such option; it is --optimizer here\n" in str(caught.value)
    assert "'16-mixed'; it is 16.32 here, with --half-type float16" in str(caught.value)


def test_a_preset_may_follow_a_list(capsys):
    words = ["--lr-schedule", "step", "--lr-epoch-decay", "2,4", "demo", "--no-memory"]
    assert main(["plan", *words]) == 0
    assert "\nlearning rate step" in capsys.readouterr().out


def test_a_folder_may_follow_a_device(fail):
    add_images("7")
    said = fail("predict", "gone", "--device", "cpu", "7", code=CHECKPOINT)
    assert said.startswith("phalanx predict: gone: ")


def test_a_negative_value_goes_with_the_unknown_flag_before_it(fail):
    said = fail("plan", "demo", "--no-memory", "--foo", "-14", code=CONFIG)
    assert said.startswith("phalanx plan: --foo: no such option; ")


def test_all_problems_of_a_plan_are_told(fail):
    words = "--warmup-epoch 20 --logs-per-epoch 1/3 --lr-schedule step --auto-loss-scaling"
    more = "--precision 32.32 --enable-recompute --recompute-checkpoints xx"
    said = fail("train", "demo", *words.split(), *more.split(), code=CONFIG)
    assert said.startswith("phalanx train: 5 problems:\n  --warmup-epoch: 20ep is 2500 steps")


def test_two_problems_are_both_told(fail):
    said = fail("train", "--epochz", "3", "--keep", "0", "--lr", "fast", code=CONFIG)
    assert said.startswith("phalanx train: 3 problems:\n")
    for part in (
        "--epochz: no such option",
        "--keep: must be at least 1",
        "--lr: expected a number",
    ):
        assert f"\n  {part}" in said
    twice = fail("doctor", "--jsn", "--al", code=CONFIG)
    assert "--jsn: no such option" in twice and "--al: no such option" in twice


def test_problems_of_a_file_name_its_lines(fail):
    Path("mine.yaml").write_text("# mine\nbatch-sise: 3\nlr: fast\n")
    said = fail("plan", "mine.yaml", "--keep", "0", code=CONFIG)
    assert "\n  mine.yaml:2: batch-sise: no such option; did you mean 'batch-size'?" in said
    assert "\n  mine.yaml:3: lr: expected a number, got 'fast'" in said
    assert "\n  --keep: must be at least 1, got 0" in said


@pytest.mark.parametrize(
    "line",
    ["predict", "validate", "compare a", "presets cat", "train demo extra", "train --epochs"],
)
def test_words_too_few_or_too_many_point_to_the_help(fail, line):
    words = line.split()
    said = fail(*words, code=CONFIG)
    assert "--help" in said or "usage: " in said, said


def test_names_that_begin_with_a_hyphen_follow_two(fail, capsys):
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        add_images(f"-pets/{name}")
    assert (
        main(["data", "list", "--", "-pets"])
        == main(["data", "list", "--json", "--", "-pets"])
        == 0
    )
    assert capsys.readouterr().out.startswith("folder in -pets: 2 + 2 images, 2 classes")
    Path("--help").mkdir()
    assert "--help: nothing readable here" in fail("data", "list", "--", "--help", code=DATA)
    said = fail("predict", "-pets", code=CONFIG)
    assert "-pets: no such option; a path that begins with a hyphen is written ./-pets\n" in said
    assert "--jsn: no such option" in fail("predict", "run", "--jsn", code=CONFIG)


def test_commands_in_messages_can_be_copied(fail, capsys):
    line = "train demo --steps 1 --validation false --device cpu"
    assert main([*line.split(), "--run-dir", "my run"]) == 0
    assert capsys.readouterr()
    facts = json.loads(Path("my run/run.json").read_text())
    assert facts["command"] == f"phalanx {line} --run-dir 'my run'"
    said = fail("train", "--resume", "my run", "--steps", "2", code=CONFIG)
    assert "phalanx train --fork 'my run' --run-dir NEW --steps 2" in said
    assert "`phalanx train --resume 'my run'` continues it" in fail("plan", "my run", code=CONFIG)
    for name in ("a b/train/cat", "a b/train/dog", "-c/train/cat", "-c/train/dog"):
        add_images(f"sets/{name}")
    said = fail("train", "--data-dir", "sets", code=CONFIG)
    assert "\n  --data folder --data-dir sets/-c    (" in said
    assert "\n  --data folder --data-dir 'sets/a b'    (" in said
    assert [quote_path(name) for name in ("-x y", "x")] == ["'./-x y'", "x"]


# --- data ---


def test_a_folder_that_is_not_named_or_not_there(fail):
    for data in ("folder", "cifar10"):
        said = fail("data", "show", "--data", data, "--no-fetch", code=DATA)
        assert (
            f": --data {data} is read from a folder: give --data-dir DIR, or set DATA_DIR" in said
        )
    said = fail("train", "--data", "folder", "--data-dir", "nowhere", code=DATA)
    assert said.startswith("phalanx train: nowhere: no such folder; give the dataset's folder with")
    Path("file").write_text("")
    said = fail("train", "--data", "mnist", "--data-dir", "file", code=DATA)
    assert "file: is a file, not a folder" in said
    for words in (["train"], ["plan"], ["validate", "resnet8"]):
        assert " nowhere: no such folder; " in fail(*words, "--data-dir", "nowhere", code=DATA)
    add_images("cats")
    said = fail("train", "--data-dir", "cats", code=DATA)
    assert said.startswith("phalanx train: cats: found images but no class folders; move them")


def test_a_folder_may_be_named_like_a_home_that_nobody_has(fail):
    said = fail("train", "--data-dir", "~nobody-here", code=DATA)
    assert "~nobody-here: no such folder" in said
    for name in ("cat", "dog"):
        add_images(f"~nobody-here/train/{name}")
        add_images(f"~nobody-here/val/{name}")
    line = "--data-dir ~nobody-here --model resnet8 --batch-size 1 --image-size 16"
    assert main(["plan", *line.split()]) == 0


def test_data_in_another_format_than_the_named_one_is_recognised(fail):
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        add_images(f"pets/{name}")
    for data in ("tar", "tfrecord", "packed"):
        said = fail("train", "--data", data, "--data-dir", "pets", code=DATA)
        first, line = said.splitlines()
        assert first.endswith(
            f" pets: not a dataset in the format {data}; what is here is read with:"
        )
        assert line.startswith("  --data folder --data-dir pets    (images in class folders")


@pytest.mark.parametrize("data", ["folder", "mnist", "fashion-mnist", "cifar10"])
def test_an_empty_folder_says_what_should_be_in_it(fail, data):
    Path("empty").mkdir()
    said = fail("train", "--data", data, "--data-dir", "empty", "--no-fetch", code=DATA)
    assert said.startswith("phalanx train: empty") and len(said) > 60
    wanted = {"folder": "train/CLASS/", "cifar10": "data_batch_1.bin"}
    assert wanted.get(data, "train-images") in said


def test_a_class_folder_without_an_image_is_named(fail):
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        add_images(f"pets/{name}")
    Path("pets/train/bird").mkdir()
    Path("pets/train/fish").mkdir()
    said = fail("train", "--data", "folder", "--data-dir", "pets", code=DATA)
    for name in ("bird", "fish"):
        assert f"pets/train/{name}: no image in this class folder" in said
    assert said.endswith("add what is missing, rename these or remove them")


def test_one_class_is_not_enough(fail):
    add_images("pets/train/cat")
    add_images("pets/val/cat")
    said = fail("train", "--data", "folder", "--data-dir", "pets", code=DATA)
    assert "pets/train: has only one class folder, cat/; a classifier needs two" in said


def test_a_class_that_training_never_saw_is_named(fail):
    for name in ("train/cat", "train/dog", "val/cat", "val/dogs"):
        add_images(f"pets/{name}")
    said = fail("train", "--data", "folder", "--data-dir", "pets", code=DATA)
    assert "pets/val/dogs: the training data has no such class; did you mean 'dog'?" in said


def test_predictions_have_one_form(fail):
    said = fail("predict", "runs/a", "x.png", "--csv", "--json", code=CONFIG)
    assert "--csv, --json: each is a form of the answers; give one of them" in said


def test_images_to_predict_that_are_not_there(fail):
    assert "x.png: no such file or folder" in fail("predict", "runs/a", "x.png", code=DATA)
    Path("empty").mkdir()
    said = fail("predict", "runs/a", "empty", code=DATA)
    assert "empty: no image in this folder; " in said


# --- runs ---


def test_a_run_folder_that_exists_is_left_alone(fail):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/run.json").write_text("{}")
    said = fail("train", "--run-dir", "runs/a", code=CONFIG)
    assert said.startswith("phalanx train: --run-dir runs/a: already holds a run; ")
    assert "--resume runs/a" in said
    Path("notes").mkdir()
    Path("notes/diary.txt").write_text("dear diary")
    assert "notes: is not empty" in fail("train", "--run-dir", "notes", code=CONFIG)
    said = fail("train", "--run-dir", "notes/diary.txt", code=CONFIG)
    assert "notes/diary.txt: is a file; choose another --run-dir" in said


@pytest.mark.parametrize(
    "line",
    ["train --resume {}", "train --fork {}", "report {}", "compare {} {}", "validate {}"],
)
def test_what_is_no_run_is_refused(fail, line):
    Path("notes").mkdir()
    name = " ".join(line.split()[:1])
    said = fail(*line.format("notes", "notes").split(), code=CHECKPOINT)
    assert said.startswith(f"phalanx {name}: notes: is not a run folder; a run folder holds run.js")
    said = fail(*line.format("nowhere", "nowhere").split(), code=CHECKPOINT)
    assert said.startswith(f"phalanx {name}: nowhere: ") and "no such" in said


def test_a_misspelt_run_names_the_near_one(fail):
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/run.json").write_text("{}")
    said = fail("train", "--resume", "runs/frist", code=CHECKPOINT)
    assert said.endswith("did you mean runs/first?")


def test_a_damaged_run_is_refused(fail):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/run.json").write_text("{")
    said = fail("train", "--resume", "runs/a", code=CHECKPOINT)
    assert "runs/a/run.json: is damaged: it is not JSON" in said


def test_a_file_where_a_folder_should_be_is_a_disk_error(fail):
    Path("file").write_text("")
    said = fail("train", "--run-dir", "file/a", code=6)
    assert "file/a: a part of this path is a file" in said


# --- devices ---


def test_a_device_that_is_not_here_is_refused(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    for device in ("cuda", "cuda:1"):
        assert main(["train", "--steps", "20", "--device", device, "--run-dir", device]) == CONFIG
        err = capsys.readouterr().err
        assert err.startswith("phalanx train: --device")
        assert "CUDA" in err and "--device cpu" in err and "Traceback" not in err
