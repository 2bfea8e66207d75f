"""`phalanx data list` and `data fetch`: what they print, and how they end."""

import hashlib
import json
from dataclasses import replace

import pytest
from PIL import Image

from phalanx.cli.main import main
from phalanx.data.fetch import PUBLISHED_FILES
from phalanx.data.formats.sources import DATA_FORMATS

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def say(capsys):
    """Run a command line; its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["data", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def pets(tmp_path):
    for split, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8)).save(tmp_path / f"pets/{split}/{name}/{number}.png")
    return tmp_path / "pets"


def test_the_list_has_every_form_and_how_to_get_it(say, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = say("list")
    assert (code, err) == (0, "")
    for name, form in DATA_FORMATS.items():
        assert any(
            line.startswith(f"{name} ") and form.how_to_get in line for line in out.splitlines()
        )
    rows = json.loads(say("list", "--json")[1])
    assert {row["data"] for row in rows} == {*DATA_FORMATS, "embedded", "generated", "synthetic"}


def test_on_a_narrow_terminal_the_list_wraps_and_cuts_nothing_off(say, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "…" not in say("list")[1]


def test_a_folder_is_listed_with_counts_and_classes(say, pets):
    code, out, _ = say("list", str(pets.parent))
    assert code == 0 and out.startswith(f"folder in {pets}: 6 + 2 images, 2 classes\n")
    (row,) = json.loads(say("list", str(pets.parent), "--json")[1])
    assert (row["train"], row["valid"], row["classes"], row["problems"]) == (6, 2, 2, [])


def test_a_file_of_labels_is_listed_from_its_own_folder(say, pets):
    images = sorted(path.relative_to(pets) for path in (pets / "train").rglob("*.png"))
    rows = "".join(f"{path},{path.parent.name}\n" for path in images)
    (pets / "table.csv").write_text(f"path,label\n{rows}")
    code, out, _ = say("list", "--labels", "pets/table.csv")
    assert code == 0 and out.startswith(f"folder in {pets}: 6 training images, 2 classes\n")
    assert "  labels from table.csv, without splits\n" in out


def test_a_link_that_leads_nowhere_is_listed_as_ignored(say, pets):
    (pets / "train/fish").symlink_to("nowhere")
    (pets / "test").symlink_to("test")  # in a circle
    code, out, _ = say("list", str(pets))
    assert code == 0 and ": 6 + 2 images, 2 classes\n" in out
    assert "  ignored 2 files: 1 broken link test, 1 broken link train/fish\n" in out


@pytest.mark.parametrize(
    ("to", "files"),
    [
        ("tfrecord", "train-00000-of-00001 and validation-00000-of-00001"),
        ("tar", "train-000000.tar and valid-000000.tar"),
        ("packed", "train.phx and valid.phx"),
    ],
)
def test_a_set_of_shards_is_listed_with_the_files_that_are_there(say, pets, to, files):
    assert say("build", str(pets), "--to", to, "--out", "shards", "--workers", "1")[0] == 0
    for path in (pets.parent / "shards").glob("validation-*.tar"):
        path.rename(path.with_name(path.name.replace("validation", "valid")))
    code, out, _ = say("list", "shards")
    assert code == 0 and out.splitlines()[1] == f"  {files}"


def test_what_is_wrong_with_a_set_is_listed_with_it(say, pets):
    (pets / "val/cat/0.png").unlink()
    code, out, _ = say("list", str(pets))
    assert code == 0 and ": 6 training images, 2 classes\n" in out
    assert f"  {pets}/val/cat: no image in this class folder\n" in out


def test_a_handout_says_that_it_is_to_be_built(say, tmp_path):
    (tmp_path / "ILSVRC2012_img_val.tar").write_bytes(b"")
    code, out, _ = say("list", str(tmp_path))
    assert code == 0 and "convert with phalanx data build" in out and "images" not in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["list", "nowhere"], 3, "phalanx data list: nowhere: no such folder"),
        (["list", "."], 3, "phalanx data list: .: nothing readable here"),
        (["list", "--class-from", "prefix"], 2, "--class-from: say which folder: phalanx data li"),
        (["list", "--labels", "no.csv"], 3, "no.csv: no such file; expected CSV or JSON Lines"),
        (["list", ".", "--jsno"], 2, "--jsno: no such option; did you mean '--json'?"),
        (["fetch"], 2, "phalanx data fetch: say which set to fetch: cifar10, cifar100, mnist, f"),
        (["fetch", "minst"], 2, "'minst' cannot be fetched; did you mean 'mnist'?"),
    ],
)
def test_mistakes_end_with_a_line_and_a_code(say, words, code, message):
    found, out, err = say(*words)
    assert (found, out) == (code, "") and message in err


def test_a_folder_without_data_is_refused_with_what_it_holds(say, tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.data.layouts.image_files.find_spec", lambda name: None)
    for name in ("cat/1.heic", "dog/2.HEIC", "dog/2.xcf", "dog/.hidden"):
        (tmp_path / "phone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "phone" / name).write_bytes(b"")
    code, out, err = say("list", "phone")
    ignored = "ignored 3 files: 2 .heic (pip install 'phalanx[heic]'), 1 .xcf"
    assert (code, out) == (3, "") and f" folders below ({ignored}); `phalanx data list`" in err


def publish_here(monkeypatch, tmp_path, data=b"bytes of an archive"):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/some.tar.gz").write_bytes(data)
    url = (tmp_path / "there").as_uri() + "/"
    sums = {"some.tar.gz": hashlib.md5(b"bytes of an archive").hexdigest()}
    monkeypatch.setitem(
        PUBLISHED_FILES, "cifar10", replace(PUBLISHED_FILES["cifar10"], url=url, md5=sums)
    )


def test_a_set_is_fetched_and_the_way_to_train_on_it_is_told(say, tmp_path, monkeypatch):
    publish_here(monkeypatch, tmp_path)
    code, out, err = say("fetch", "cifar10", "--data-dir", "mine")
    assert code == 0 and (tmp_path / "mine/some.tar.gz").is_file()
    assert out.startswith("cifar10: 1 file downloaded, all checksums match\n")
    assert out.endswith("phalanx train --data cifar10 --data-dir mine\n")
    assert err == "some.tar.gz: 19 B of 19 B\n"
    code, out, err = say("fetch", "cifar10", "--data-dir", "mine")
    assert code == 0 and out.startswith("cifar10: already here") and err == ""


def test_a_set_goes_to_the_environments_folder_or_to_data(say, tmp_path, monkeypatch):
    publish_here(monkeypatch, tmp_path)
    assert say("fetch", "cifar10")[0] == 0 and (tmp_path / "data/cifar10/some.tar.gz").is_file()
    monkeypatch.setenv("DATA_DIR", "elsewhere")
    assert say("fetch", "cifar10")[0] == 0 and (tmp_path / "elsewhere/some.tar.gz").is_file()


def test_a_failed_fetch_ends_with_code_3(say, tmp_path, monkeypatch):
    publish_here(monkeypatch, tmp_path, data=b"something else")
    code, out, err = say("fetch", "cifar10")
    assert (code, out) == (3, "") and "wrong checksum" in err
