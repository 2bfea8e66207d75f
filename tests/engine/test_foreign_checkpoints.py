"""Checkpoints whose sums are right and whose contents are not ours: refused, never a traceback."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from phalanx.cli.main import main
from small_runs import small_run

FILES = ("facts.json", "weights.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def stopped(digits, tmp_path_factory):
    """A run that has not come to its end: its summary is gone, its checkpoint is there."""
    run = tmp_path_factory.mktemp("foreign") / "run"
    assert main(small_run(digits, run, steps=2)) == 0
    (run / "summary.json").unlink()
    return run


@pytest.fixture
def checkpoint(stopped):
    """The checkpoint, which is put back as it was afterwards."""
    folder = max((stopped / "checkpoints").glob("step-*"))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    yield folder
    for path, content in before.items():
        path.write_bytes(content)


def write_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Change a file, and the manifest with it."""
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest["files"][name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def assert_refused(stopped: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    for command in (["validate", str(stopped)], ["train", "--resume", str(stopped)]):
        assert main(command) == 4, capsys.readouterr()
        printed = capsys.readouterr().err
        for word in words:
            assert word in printed


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_that_does_not_list_a_file(name, stopped, checkpoint, capsys):
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    del manifest["files"][name]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert_refused(stopped, capsys, f"({name} is not listed)")


@pytest.mark.parametrize("entry", [{"bytes": "1"}, {"bytes": 1.0}, {"sha256": 1}, {"bytes": None}])
def test_a_manifest_whose_entries_are_no_entries(entry, stopped, checkpoint, capsys):
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest["files"]["facts.json"] |= entry
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert_refused(stopped, capsys, "manifest.json: damaged, or not written by Phalanx")


def test_a_manifest_does_not_name_files_elsewhere(stopped, checkpoint, capsys):
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    content = (stopped / "run.json").read_bytes()
    entry = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    manifest["files"]["../../run.json"] = entry
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert_refused(stopped, capsys, "manifest.json: damaged, or not written by Phalanx")


@pytest.mark.parametrize("content", ["[]", "7", "{}", "no JSON", "[" * 100_000, '"\\ud800"'])
def test_facts_that_are_no_facts(content, stopped, checkpoint, capsys):
    write_file(checkpoint, "facts.json", content.encode())
    assert_refused(stopped, capsys, "facts.json: is damaged")


@pytest.mark.parametrize("value", [None, 7, [7], "x", {"x": []}])
@pytest.mark.parametrize("name", ["config", "classes", "preprocessing", "plan", "state"])
def test_facts_with_something_else_in_them(name, value, stopped, checkpoint, capsys):
    facts = json.loads((checkpoint / "facts.json").read_bytes())
    write_file(checkpoint, "facts.json", json.dumps(facts | {name: value}).encode())
    if (name, value) != ("classes", "x"):
        assert_refused(stopped, capsys, "facts.json: is damaged")
    del facts[name]
    write_file(checkpoint, "facts.json", json.dumps(facts).encode())
    assert_refused(stopped, capsys, f"it has no {name}")


def test_facts_that_lack_something_deeper(stopped, checkpoint, capsys):
    facts = json.loads((checkpoint / "facts.json").read_bytes())
    for changes in (
        {"preprocessing": {"image_size": 12, "exif_orientation": True, "x": 1}},
        {"state": {"step": 2}},
    ):
        write_file(checkpoint, "facts.json", json.dumps(facts | changes).encode())
        command = ["train", "--resume"] if "state" in changes else ["validate"]
        assert main([*command, str(stopped)]) == 4
        assert "facts.json: is damaged, or was not written by Phalanx (" in capsys.readouterr().err


CHECK = {"since": 1, "is_decided": True, "waited": 0.3, "cores_only": [4]}


@pytest.mark.parametrize(
    "value",
    [
        7,
        [],
        {},
        {"since": 1},
        CHECK | {"since": "x"},
        CHECK | {"is_decided": None},
        CHECK | {"waited": "x"},
        CHECK | {"cores_only": 4},
        CHECK | {"cores_only": [[4]]},
        CHECK | {"x": 1},
    ],
)
def test_an_image_check_that_is_invalid(value, stopped, checkpoint, capsys):
    facts = json.loads((checkpoint / "facts.json").read_bytes())
    facts["state"]["image_check"] = value
    write_file(checkpoint, "facts.json", json.dumps(facts).encode())
    assert main(["train", "--resume", str(stopped)]) == 4
    assert "facts.json: is damaged, its image_check is invalid" in capsys.readouterr().err


def test_a_run_json_that_lacks_something(stopped, capsys):
    before = (stopped / "run.json").read_text()
    for name in ("name", "origins", "chosen", "data"):
        (stopped / "run.json").write_text(json.dumps(json.loads(before) | {name: 7}))
        assert main(["train", "--resume", str(stopped)]) == 4
        assert f"run.json: is damaged (no {name}); restore it" in capsys.readouterr().err
    (stopped / "run.json").write_text(before)


@pytest.mark.parametrize("name", FILES[1:])
def test_tensors_that_are_none(name, stopped, checkpoint, capsys):
    write_file(checkpoint, name, b"no tensors")
    assert main(["train", "--resume", str(stopped)]) == 4
    assert (
        f"{name}: is damaged, or was not written by Phalanx (SafetensorError"
        in capsys.readouterr().err
    )


def test_the_optimizer_of_another_model(stopped, checkpoint, capsys):
    write_file(checkpoint, FILES[2], (checkpoint / FILES[1]).read_bytes())
    assert main(["train", "--resume", str(stopped)]) == 4
    assert (
        "optimizer.safetensors: is damaged, or was not written by Phalanx ("
        in capsys.readouterr().err
    )
