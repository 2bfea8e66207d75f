"""Every layout that people have: what is counted, and that a step can be trained on it."""

import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest

from phalanx.assemble.find_data import read_settings_with_data
from phalanx.cli.main import main
from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.convert.source_splits import find_source_splits
from phalanx.data.formats.sources import ValSplit, open_format
from small_layouts import (
    SYNSETS,
    write_classes,
    write_image,
    write_labels,
    write_prefixes,
    write_splits,
    write_tiny_imagenet,
)
from small_runs import read_result

QUICK = ["--model", "resnet8", "--image-size", "32", "--batch-size", "4", "--workers", "0"]
STEP = [*QUICK, "--steps", "1", "--warmup-epoch", "0", "--ckpts-per-epoch", "0", "--device", "cpu"]
IMAGENET = ["--steps", "60", "--batch-size", "4", "--no-memory"]
ALL_SUFFIXES = ("jpg", "PNG", "webp", "bmp", "gif", "tiff", "avif", "jfif")


def write_all_suffixes(root):
    write_splits(root, {"train": 8, "val": 2}, suffixes=ALL_SUFFIXES)
    (root / "train/cat/notes.txt").write_text("x")
    (root / "train/dog/fur.xcf").write_text("x")
    write_image(root / "train/loose.jpg")
    return root


LAYOUTS = {  # what writes it, its options, images to train and to validate on, how it is described
    "suffixes": (write_all_suffixes, "", 16, 4, "train/ and val/ with class folders"),
    "deep": (
        lambda root: write_splits(root, {"train": 4, "val": 2}, below="2023/may"),
        "",
        *(8, 4, "train/ and val/ with class folders"),
    ),
    "train-test": (
        lambda root: write_splits(root, {"Train": 5, "TEST": 2}),
        "",
        *(10, 4, "Train/ and TEST/ with class folders"),
    ),
    "training-dev": (
        lambda root: write_splits(root, {"training": 5, "eval": 1, "dev": 2}),
        "",
        *(10, 4, "training/ and dev/ with class folders; eval/ not used (--valid-split eval"),
    ),
    "chosen": (
        lambda root: write_splits(root, {"train": 5, "val": 2, "test": 3}),
        "--valid-split Test",
        *(10, 6, "train/ and test/ with class folders; val/ not used"),
    ),
    "flat": (
        lambda root: write_classes(root, 8),
        "--val-split 25%",
        *(12, 4, "class folders without splits"),
    ),
    "inside": (
        lambda root: write_classes(root / "photos/mine", 8).parents[1],
        "--val-split 0.25",
        *(12, 4, "class folders without splits"),
    ),
    "tiny": (
        write_tiny_imagenet,
        "",
        *(16, 4, "Tiny-ImageNet: train/ and val/ with folders of synsets; test/ not used"),
    ),
    "prefix": (
        write_prefixes,
        "--class-from prefix --val-split 4",
        *(16, 4, "train/ with classes from the prefixes of file names; test/ not used"),
    ),
    "csv": (write_labels, "--labels ROOT/labels.csv", 8, 2, "labels from labels.csv"),
    "jsonl": (
        lambda root: write_labels(root, splits=("", ""), form="jsonl"),
        "--labels ROOT/labels.jsonl --val-split 2",
        *(8, 2, "labels from labels.jsonl, without splits"),
    ),
}


def run_json(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_listed_planned_and_trained_on(tmp_path, capsys, name):
    write, options, train, valid, described = LAYOUTS[name]
    root = write(tmp_path / "data")
    given = options.replace("ROOT", str(root)).split()
    (found,) = run_json(capsys, "data", "list", root, *given)
    assert (found["train"], found["valid"], found["classes"]) == (train, valid, 2)
    assert found["why"].startswith(described) and not found["problems"]
    run = tmp_path / "run"
    words = ["train", "folder-resnet18", "--data-dir", root, "--run-dir", run, *given, *STEP]
    assert main(list(map(str, words))) == 0, capsys.readouterr().err
    plan = json.loads((run / "run.json").read_text())["plan"]
    assert (plan["train_images"], plan["valid_images"]) == (train, valid)
    assert read_result(run)["scored"] == valid
    assert f"data: {described}" in (run / "log.txt").read_text()


def test_what_is_ignored_is_counted_by_reason_everywhere(tmp_path, capsys):
    root = write_all_suffixes(tmp_path / "data")
    ignored = {".txt": 1, "outside class folders": 1, ".xcf": 1}
    (found,) = run_json(capsys, "data", "list", root)
    assert found["ignored"] == ignored
    words = ["plan", "folder-resnet18", "--data-dir", root, "--no-memory", *QUICK]
    assert run_json(capsys, *words)["ignored"] == ignored
    main(["data", "verify", str(root), "--workers", "1"])
    line = "ignored 3 files: 1 .txt, 1 .xcf, 1 outside class folders"
    assert f"  {line}\n" in capsys.readouterr().out
    run = tmp_path / "run"
    assert main(["train", *map(str, [*words[1:4], "--run-dir", run, *STEP])]) == 0
    assert f"data: {line}" in (run / "log.txt").read_text()


@pytest.mark.parametrize("places", [[""], ["", "train", "val"]])
def test_what_is_put_beside_class_folders_later_is_counted(tmp_path, capsys, places):
    root = tmp_path / "data"
    for split in places[1:] or places:
        write_classes(root / split, 4)

    def list_ignored():
        (found,) = run_json(capsys, "data", "list", root)
        return found["ignored"]

    assert list_ignored() == {}
    for count, place in enumerate(places, 1):
        write_image(root / place / "loose.jpg")
        assert list_ignored() == {"outside class folders": count}
    (root / places[-1] / "loose.jpg").rename(root / places[-1] / "cat/new.jpg")
    (root / "fish").symlink_to("nowhere")
    rest = {"outside class folders": len(places) - 1, "broken link fish": 1}
    assert list_ignored() == {why: count for why, count in rest.items() if count}


def test_a_flat_folder_is_training_data_for_every_command(tmp_path, capsys):
    root = write_classes(tmp_path / "data", 4)
    assert main(["data", "verify", str(root), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "folder, 8 train, 2 classes\n  class folders without splits\n" in said
    assert "  no validation split; --val-split 10% holds one out\n" in said
    for to in ("packed", "tar", "tfrecord", "folder"):
        words = ["data", "build", str(root), "--to", to, "--out", str(tmp_path / to)]
        assert main([*words, "--workers", "1"]) == 0
        capsys.readouterr()
        assert main(["plan", "folder-resnet18", "--data-dir", str(tmp_path / to), *QUICK]) == 3
        assert "no validation data" in (said := capsys.readouterr().err)
        assert "hold some out with --val-split 10%" in said
        words = ["plan", "folder-resnet18", "--data-dir", tmp_path / to, "--val-split", "25%"]
        plan = run_json(capsys, *words, "--no-memory", *QUICK)["plan"]
        assert (plan["train_images"], plan["valid_images"]) == (6, 2)


def write_parquet(root, files, labels):
    """The files as rows of one table; images have no names there."""
    root.mkdir(parents=True)
    columns = {"image": [{"bytes": file.read_bytes()} for file in files], "label": labels}
    pyarrow.parquet.write_table(pyarrow.table(columns), root / "train-00000-of-00001.parquet")
    return root


def write_form(form, root, out):
    """A flat folder in another form."""
    if form == "parquet":
        files = sorted(root.glob("*/*.jpg"))
        return write_parquet(out, files, [int(file.parent.name == "dog") for file in files])
    if form == "folder":
        return root
    build_dataset(root, out, BuildOptions(to=form), workers=1)
    return out


def test_every_form_is_split_alike(tmp_path):
    root = write_classes(tmp_path / "data", 12)
    names = {}
    for form in ("folder", "packed", "tar", "tfrecord", "parquet"):
        place = write_form(form, root, tmp_path / form)
        sides = {
            split: open_format(form, place, split, val_split=ValSplit("5"))
            for split in ("train", "valid")
        }
        found = {
            split: frozenset(
                side.name(number).rpartition(":")[2].rpartition("/")[2]
                for number in range(len(side))
            )
            for split, side in sides.items()
        }
        assert len(found["train"]) == 19 and len(found["valid"]) == 5
        assert not found["train"] & found["valid"]
        assert sides["valid"].read(0).shape == (36, 40, 3)
        assert sides["train"].fingerprint() != sides["valid"].fingerprint()
        assert np.bincount(sides["valid"].labels).tolist() == [3, 2]
        names[form] = found["valid"]
    del names["parquet"]  # whose images are numbered
    assert len({*names.values()}) == 1


def test_a_build_takes_labels_prefixes_and_a_split(tmp_path, capsys):
    table = write_labels(tmp_path / "table")
    prefixes = write_prefixes(tmp_path / "prefixes")
    lines = {
        "a": [table, "--labels", table / "labels.csv"],
        "b": [prefixes, "--class-from", "prefix", "--val-split", "4"],
    }
    for out, words in lines.items():
        line = ["data", "build", *words, "--to", "packed", "--out", tmp_path / out]
        assert main([*map(str, line), "--workers", "1"]) == 0
    built = [[s.images for s in find_source_splits(tmp_path / out)] for out in lines]
    assert built == [[8, 2], [16, 4]]
    assert find_source_splits(tmp_path / "b")[0].classes == ("cat", "dog")
    again = ["data", "build", prefixes, "--class-from", "prefix", "--to", "packed"]
    assert main([*map(str, again), "--out", str(tmp_path / "b")]) == 3
    assert "was built with --val-split 4, now without --val-split" in capsys.readouterr().err


def test_imagenet_may_lie_there_in_any_form(tmp_path, capsys):
    root = write_splits(tmp_path / "data", {"train": 4, "val": 2}, names=SYNSETS)
    for form in ("tfrecord", "tar", "packed", "parquet"):
        place = tmp_path / "parents" / form / "below"
        if form == "parquet":
            files = sorted(root.glob("*/*/*.jpg"))
            write_parquet(place, files, [number % 2 for number in range(len(files))])
            table = place / "train-00000-of-00001.parquet"
            shutil.copy(table, place / "test-00000-of-00001.parquet")
        else:
            build_dataset(root, place, BuildOptions(to=form), workers=1)
        for folder in (place, place.parent):
            words = ["plan", "--data", "imagenet", "--data-dir", folder, *IMAGENET]
            found = run_json(capsys, *words)
            assert found["name"] == "imagenet-resnet50"
            options = found["options"]
            assert (options["data"], options["data-dir"]) == (form, str(place))
    words = ["plan", "--data", "imagenet", "--data-dir"]
    assert main([*words, str(tmp_path / "parents"), *IMAGENET]) == 2
    assert "there are several datasets here" in capsys.readouterr().err
    assert run_json(capsys, *words, root, *IMAGENET)["options"]["data"] == "imagenet"


def test_a_folder_is_descended_into_by_the_commands_that_score(tmp_path, capsys):
    root = write_splits(tmp_path / "data", {"train": 4, "val": 2})
    run, more = tmp_path / "run", write_classes(tmp_path / "more/photos", 3).parent
    words = ["train", "folder-resnet18", "--data-dir", root, "--run-dir", run, *STEP]
    words[words.index("--ckpts-per-epoch") + 1] = "1"
    assert main(list(map(str, words))) == 0
    capsys.readouterr()
    for folder, images in ((root, 4), (tmp_path / "data/train", 8), (more, 6)):
        found = run_json(capsys, "validate", run, "--data-dir", folder)
        assert found["scored"] == images


def test_a_split_by_val_split_is_not_the_runs_own_without_a_word(tmp_path, capsys):
    root, other = write_classes(tmp_path / "data", 4), write_classes(tmp_path / "other", 4)
    split = write_splits(tmp_path / "split", {"train": 1, "val": 3})
    run = tmp_path / "run"
    words = ["train", "folder-resnet18", "--data-dir", root, "--run-dir", run, *STEP]
    words[words.index("--ckpts-per-epoch") + 1] = "1"
    assert main([*map(str, words), "--val-split", "25%"]) == 0
    part = f"note: --val-split 25%, which the run was trained with, is applied to {other} too, so"
    trained = "the run held out 25% and was trained on the rest"
    for options, images, said in (
        ([], 2, None),
        (["--val-split", "0.25"], 2, None),
        (["--data-dir", split], 6, None),
        (["--data-dir", other, "--val-split", "25%"], 2, None),
        (["--data-dir", other, "--val-split", "none"], 8, None),
        (["--data-dir", other], 2, part),
        (["--val-split", "4"], 4, f"note: --val-split 4: {trained}"),
        (["--val-split", "none"], 8, f"note: --val-split none: {trained}"),
    ):
        capsys.readouterr()
        assert main(["validate", str(run), *map(str, options), "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["scored"] == images
        assert (said in err) if said else ("note:" not in err), options


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("25%", ["--val-split", "0.25"], None),
        ("25%", ["--val-split", "4"], "note: --val-split 4: run held out 25% and was trained on"),
        ("none", ["--val-split", "2"], "note: --val-split 2: run was trained on all images, with"),
        ("none", [], None),
    ],
)
def test_a_fork_that_scores_images_of_its_parents_training_says_so(
    tmp_path, capsys, before, after, said
):
    root, run = write_classes(tmp_path / "data", 4), tmp_path / "run"
    words = ["train", "folder-resnet18", "--data-dir", root, "--run-dir", run, *STEP]
    words[words.index("--ckpts-per-epoch") + 1] = "1"
    words += ["--val-split", before] if before != "none" else ["--validation-mode", "none"]
    assert main([*map(str, words)]) == 0
    capsys.readouterr()
    fork = ["train", "--fork", run, "--run-dir", tmp_path / "fork", "--steps", "2", *after]
    fork += ["--validation-mode", "during"] if after else []
    assert main([*map(str, fork)]) == 0
    told = capsys.readouterr().out
    assert (said in told) if said else "note:" not in told


def test_all_images_may_be_for_training(tmp_path, capsys):
    data = write_classes(tmp_path / "data", 5)
    lines = ["--data-dir", str(data), *STEP, "--ckpts-per-epoch", "1", "--run-dir"]
    run = str(tmp_path / "run")
    assert main(["train", *lines, run]) == 3
    assert "no validation data" in capsys.readouterr().err
    assert main(["train", *lines, run, "--validation-mode", "none"]) == 0
    assert "nothing was scored" in capsys.readouterr().out
    plan = json.loads((tmp_path / "run/run.json").read_text())["plan"]
    assert (plan["train_images"], plan["valid_images"]) == (10, 0)
    assert main(["train", "--resume", run]) == 0
    capsys.readouterr()
    assert main(["validate", run]) == 0
    said = capsys.readouterr()
    assert "of 10 images" in said.out
    assert "the run held out no images: these are the ones it was trained on" in said.err
    other = write_classes(tmp_path / "other", 3)
    assert main(["validate", run, "--data-dir", str(other)]) == 0
    said = capsys.readouterr()
    assert "of 6 images" in said.out and "held out" not in said.err


def test_a_run_without_validation_images_resumes_with_and_without_them(tmp_path, capsys):
    data, run = write_splits(tmp_path / "data", {"train": 5}), tmp_path / "run"
    spoilt = next((data / "train").rglob("*.jpg"))
    spoilt.write_bytes(b"no image" + spoilt.read_bytes()[8:])
    lines = ["--data-dir", str(data), *QUICK, "--device", "cpu", "--dataset-cache", "true"]
    lines += ["--epochs", "2", "--warmup-epoch", "0", "--validation-mode", "none"]
    assert main(["train", *lines, "--run-dir", str(run)]) == 0
    capsys.readouterr()
    assert main(["validate", str(run)]) == 3
    said = capsys.readouterr().err
    assert "no validation data (found train/)" in said and "held out" not in said
    for added in (False, True):
        (run / "summary.json").unlink()
        shutil.rmtree(max((run / "checkpoints").glob("step-*")))
        if added:
            write_splits(data, {"val": 1})
            shutil.rmtree(run / "checkpoints")
        assert main(["train", "--resume", str(run)]) == 0
        assert len(read_result(run)["bad_images"]) == 1
    assert main(["validate", str(run)]) == 0


def test_a_fork_onto_other_classes_says_so(tmp_path, capsys):
    root, run = write_splits(tmp_path / "data", {"train": 4, "val": 1}), tmp_path / "run"
    words = ["train", "folder-resnet18", "--data-dir", root, "--run-dir", run, *STEP]
    words[words.index("--ckpts-per-epoch") + 1] = "1"
    assert main(list(map(str, words))) == 0
    new_head = f"--init-weights {run}/checkpoints/step-00000001/weights.safetensors --reset-head"
    fork = ["train", "--fork", str(run), "--steps", "2", "--run-dir"]
    assert main([*fork, str(tmp_path / "same")]) == 0
    assert "the classes are not those" not in capsys.readouterr().out
    (root / "train/dog").rename(root / "train/ant")  # comes first now
    (root / "val/dog").rename(root / "val/ant")
    assert main([*fork, str(tmp_path / "renamed")]) == 0
    said = capsys.readouterr().out
    assert "note: the classes are not those of the checkpoint ('cat' there, 'ant' here)" in said
    assert new_head in said
    write_splits(root, {"train": 1, "val": 1}, names=["emu"])
    assert main([*fork, str(tmp_path / "more")]) == 2
    assert (
        f"a fork needs the same number. To train a new classifier, start a new run with {new_head}"
        in (capsys.readouterr().err)
    )


def test_older_runs_keep_their_listing_and_their_split(tmp_path, capsys):
    root = write_classes(tmp_path / "data", 8, suffixes=("jpg", "png"))
    run = tmp_path / "run"
    words = ["train", "folder-resnet18", "--data-dir", str(root), "--run-dir", str(run), *STEP]
    words += ["--val-split", "25%", "--listing-rule", "1"]
    assert main(words) == 0
    before = read_result(run)
    config = run / "config.yaml"
    lines = [line for line in config.read_text().splitlines(True) if "listing-rule" not in line]
    config.write_text("".join(lines))
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "summary.json").unlink()
    write_image(root / "cat/below/new.jpg")  # today it would be seen
    assert main(["train", "--resume", str(run)]) == 0, capsys.readouterr().err
    after = read_result(run)
    assert after["weights_sha256"] == before["weights_sha256"]
    assert main(["train", "--resume", str(run), "--listing-rule", "2"]) == 2
    assert "the run was started with --listing-rule 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("", 3, "no validation data (found cat/, dog/); hold some out with --val-split 10%"),
        ("--val-split 0", 2, "--val-split: expected a share such as 10% or 0.1, or a number"),
        ("--val-split 100%", 2, "--val-split: expected a share such as 10% or 0.1, or a number"),
        ("--val-split 1.5", 2, "--val-split: expected a share such as 10% or 0.1, or a number"),
        ("--val-split 7", 2, "asks for 7 of 8 images, but at most 6 can be held out"),
        ("--val-split 1%", 2, "is less than one of 8 images; give a larger share"),
        ("--class-from prefix --labels x.csv", 2, "--labels: gives the class of each image, and"),
        ("--class-from suffix", 2, "--class-from: no choice is called 'suffix'"),
        ("--labels nowhere.csv", 3, "nowhere.csv: no such file; expected CSV or JSON Lines"),
        ("--valid-split dev", 2, "--valid-split dev: no such folder in"),
        ("--valid-split cat --val-split 2", 2, "has validation images already; leave the option"),
        ("--listing-rule 3", 2, "--listing-rule: must be at most 2, got 3"),
    ],
)
def test_bad_options_of_a_layout_are_refused(tmp_path, capsys, options, code, said):
    root = write_classes(tmp_path / "data", 4)
    words = ["plan", "folder-resnet18", "--data-dir", str(root), *options.split(), *QUICK]
    assert main(words) == code
    assert said in capsys.readouterr().err


def test_options_of_folders_are_refused_for_other_forms(tmp_path, capsys):
    root = write_splits(tmp_path / "data", {"train": 2, "val": 1})
    build_dataset(root, tmp_path / "packed", BuildOptions(to="packed"), workers=1)
    words = ["plan", "folder-resnet18", "--data-dir", str(tmp_path / "packed"), *QUICK]
    assert main([*words, "--valid-split", "test"]) == 2
    assert "--valid-split: is for folders of image files, not for packed" in capsys.readouterr().err
    assert main([*words, "--val-split", "1"]) == 2
    assert "has validation images already; leave the option out" in capsys.readouterr().err
    assert main(["plan", "demo", "--val-split", "1", "--no-memory"]) == 2
    assert "--val-split: embedded has validation images" in capsys.readouterr().err
    assert main(["plan", "demo", "--labels", "x.csv", "--no-memory"]) == 2
    assert "--labels: embedded does not read image folders" in capsys.readouterr().err


def test_images_without_classes_are_told_how_to_get_them(tmp_path, capsys):
    root = write_labels(tmp_path / "table")
    assert main(["data", "list", str(root)]) == 3
    assert f"--labels {root}/labels.csv, or --class-from" in capsys.readouterr().err
    write_prefixes(tmp_path / "data")
    for words in (["data", "list"], ["data", "verify"]):
        assert main([*words, str(tmp_path / "data")]) == 3
        assert "--labels FILE, or --class-from prefix" in capsys.readouterr().err
    words = ["plan", "folder-resnet18", "--data-dir", str(tmp_path / "data"), *QUICK]
    assert main(words) == 3
    assert "--labels FILE, or --class-from prefix" in capsys.readouterr().err


def test_tiny_imagenet_whose_images_were_moved_into_class_folders(tmp_path, capsys):
    write_tiny_imagenet(tmp_path)
    shutil.rmtree(tmp_path / "val/images")
    write_classes(tmp_path / "val", 3, names=SYNSETS)  # and the table is still there
    assert main(["data", "list", str(tmp_path)]) == 0
    assert "16 + 6 images, 2 classes" in capsys.readouterr().out


def test_nothing_is_written_where_it_would_become_a_class(tmp_path, capsys, monkeypatch):
    flat, split = tmp_path / "flat", tmp_path / "split"
    write_classes(flat, 4)
    write_splits(split, {"train": 4, "val": 1})
    monkeypatch.chdir(flat)  # the run folder is runs/NAME here, unless it is named
    words = ["train", "folder-resnet18", *STEP, "--val-split", "2", "--data-dir"]
    assert main([*words, "."]) == 2
    said = capsys.readouterr().err
    assert said.startswith("phalanx train: --run-dir runs/folder-resnet18-")
    assert f": is inside {flat}, whose folders are read as classes; choose a folder outs" in said
    inside = ["--data-dir", str(split), "--run-dir", str(split / "train/run")]
    assert main(["train", "folder-resnet18", *STEP, *inside]) == 2
    assert f"train/run: is inside {split}/train, whose folders" in capsys.readouterr().err
    assert main(["data", "build", ".", "--to", "packed", "--out", "packed"]) == 2
    assert "--out packed: is inside ., whose folders are read as" in capsys.readouterr().err
    assert sorted(path.name for path in flat.glob("[!.]*")) == ["cat", "dog"]
    assert main([*words, ".", "--run-dir", ".runs/1"]) == 0, "hidden folders are no classes"
    inside[-1] = str(split / "run")
    assert main(["train", "folder-resnet18", *STEP, *inside]) == 0, "beside train/"


def test_a_folder_without_images_beside_classes_is_named(tmp_path, capsys):
    write_classes(tmp_path, 2)
    (tmp_path / "emu").mkdir()
    for words in (["data", "list"], ["data", "verify"]):
        assert main([*words, str(tmp_path)]) == 3
        said = f"{tmp_path}/emu: holds no image, but the folders beside it look like classes"
        assert said in capsys.readouterr().err
    shutil.copyfile(next(tmp_path.rglob("*.jpg")), tmp_path / "loose.jpg")
    assert main(["data", "list", str(tmp_path)]) == 3
    assert said in capsys.readouterr().err, "not that there are no class folders"


def test_a_link_that_leads_to_itself_hides_no_dataset(tmp_path, capsys):
    write_classes(tmp_path / "data/set", 2)
    (tmp_path / "data/loop").symlink_to("loop")
    assert main(["data", "list", str(tmp_path)]) == 0
    assert ": 4 training images, " in capsys.readouterr().out


def test_a_run_finds_the_images_of_its_labels_from_any_folder(tmp_path, monkeypatch):
    write_labels(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = read_settings_with_data(None, {"labels": "labels.csv"})
    assert settings.config.data.data_dir == str(tmp_path)


@pytest.mark.parametrize(("name", "what"), [("no.csv", "no such file"), (".", "is a folder")])
def test_a_file_of_labels_that_is_missing_is_called_by_its_option(tmp_path, capsys, name, what):
    path = tmp_path / name
    assert main(["data", "list", str(tmp_path), "--labels", str(path)]) == 3
    assert f"--labels {path}: {what}" in capsys.readouterr().err


def test_classes_whose_names_differ_only_in_case_are_named(tmp_path, capsys):
    data = write_splits(tmp_path / "data", {"train": 4, "val": 1})
    rows = [f"{path.relative_to(data)},{path.parent.name}" for path in sorted(data.rglob("*.jpg"))]
    table = tmp_path / "table.csv"
    told = "Cat and cat differ only in case or spaces, and are two classes"
    for first, says in ((rows[0], False), (rows[0].replace(",c", ",C"), True)):
        table.write_text("\n".join(["path,label", first, *rows[1:]]))
        options = ["--labels", str(table), "--val-split", "20%"]
        for words in (["data", "list", str(data)], ["plan", "folder-resnet18", "--data-dir", data]):
            capsys.readouterr()
            assert main([*map(str, words), *options]) == 0
            assert (told in capsys.readouterr().out) == says
