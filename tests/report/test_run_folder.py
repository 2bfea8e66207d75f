import errno
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.disk import convert_disk_errors, write_atomically
from phalanx.errors import CheckpointError, ConfigError, DiskError
from phalanx.report.folder import create_run, open_run
from phalanx.sweep.state import create_sweep_folder
from synthetic_run import CONFIG, make_facts


def new_run(path):
    return create_run(path, config_text=CONFIG.format(lr=0.1), facts=make_facts())


def test_a_created_run_opens_with_the_same_facts(tmp_path):
    new_run(tmp_path / "deep" / "demo")
    run = open_run(tmp_path / "deep" / "demo")
    assert run.facts["format"] == 1
    assert run.facts["chosen"] == {"device": "cpu", "precision": "32.32", "threads": 2}
    assert run.config_text == CONFIG.format(lr=0.1)
    assert run.facts["created"].endswith("Z")


def test_options_are_spelt_as_in_the_file(tmp_path):
    options = new_run(tmp_path / "demo").options
    assert options["precision"] == "32.32"
    assert options["weight-decay"] == "5e-5"
    assert options["compile"] == "off"
    assert options["splits"] == "[layer1/0, layer2/0]"


def test_updating_facts_changes_only_those_and_leaves_no_temporary_file(tmp_path):
    run = new_run(tmp_path / "demo")
    run.update_facts(chosen={"device": "cuda"})
    assert run.facts["chosen"] == {"device": "cuda"}
    assert run.facts["command"] == make_facts()["command"]
    assert sorted(p.name for p in run.path.iterdir()) == ["config.yaml", "run.json"]


def test_an_empty_folder_is_free(tmp_path):
    (tmp_path / "demo").mkdir()
    assert new_run(tmp_path / "demo").run.is_file()


def test_what_a_kill_left_before_the_run_was_there_is_taken_over(tmp_path):
    run = new_run(tmp_path / "demo")
    run.run.unlink()
    (run.path / ".run.json.999999999.part").write_text("{")
    assert new_run(run.path).run.is_file()
    run.run.unlink()
    run.config.write_text("mine: 1\n")
    with pytest.raises(ConfigError, match="is not empty"):
        new_run(run.path)
    assert run.config.read_text() == "mine: 1\n"


def test_a_used_folder_is_refused_with_the_way_out(tmp_path):
    new_run(tmp_path / "demo")
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume .*demo.*another"):
        new_run(tmp_path / "demo")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; choose another --run-dir"):
        new_run(tmp_path / "other")
    with pytest.raises(ConfigError, match="is a file"):
        new_run(tmp_path / "other" / "thesis.txt")
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def test_opening_what_is_no_run_says_what_one_holds_and_what_was_meant(tmp_path):
    run = new_run(tmp_path / "demo-2026")
    with pytest.raises(
        CheckpointError, match=r"no such folder.*run\.json.*did you mean .*demo-2026"
    ):
        open_run(tmp_path / "demo-2025")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        open_run(tmp_path)
    run.checkpoints.mkdir()
    with pytest.raises(CheckpointError, match=r"it is inside the run .*demo-2026"):
        open_run(run.checkpoints)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"format": 1', "is damaged: it is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "no format number"),
        ('{"format": 99}', "format 99 is newer"),
    ],
)
def test_damaged_facts_are_named(tmp_path, text, told):
    run = new_run(tmp_path / "demo")
    run.run.write_text(text)
    with pytest.raises(CheckpointError, match=told):
        _ = run.facts


def test_damaged_options_are_named(tmp_path):
    run = new_run(tmp_path / "demo")
    run.config.write_text("model: [")
    with pytest.raises(CheckpointError, match=r"config\.yaml: is damaged: it is not YAML"):
        _ = run.options


def test_a_run_cannot_be_made_under_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"file/demo: a part of this path is a file"):
        new_run(tmp_path / "file" / "demo")


def test_a_folder_that_takes_no_files_is_a_disk_error():
    with pytest.raises(DiskError, match=r"/proc/phalanx\.json: "):
        write_atomically(Path("/proc/phalanx.json"), "{}")


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "facts.json"
    write_atomically(path, "old")
    part = tmp_path / f".facts.json.{os.getpid()}.part"
    part.symlink_to("/dev/full")  # every write to it fails with "no space left"
    with pytest.raises(DiskError, match=r"facts\.json: no space left \(.* free on .*\); free some"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["facts.json"]


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EACCES, "no permission"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_disk_mistakes_have_words(tmp_path, number, told):
    with pytest.raises(DiskError) as refused, convert_disk_errors(tmp_path / "x"):
        raise OSError(number, os.strerror(number))
    assert told in str(refused.value)
    assert "--run-dir" not in str(refused.value), "an option that most commands do not have"


def test_a_run_folder_that_cannot_be_made_names_its_option(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="file, not a folder; choose another --run-dir"):
        create_run(tmp_path / "file" / "run", config_text="", facts={})
    with pytest.raises(DiskError, match="file, not a folder; choose another --sweep-dir"):
        create_sweep_folder(tmp_path / "file" / "sweep")
    with pytest.raises(DiskError, match="file, not a folder; choose another folder"):
        write_atomically(tmp_path / "file" / "report.html", "")


HOLD = """
    import sys, time
    from pathlib import Path
    from phalanx.report.folder import open_run
    with open_run(Path(sys.argv[1])).lock():
        {inside}
        print("locked", flush=True)
        time.sleep(60)
"""


@contextmanager
def hold_lock(run, inside="pass"):
    """Another process that trains this run, and the first line it says."""
    code = textwrap.dedent(HOLD.format(inside=inside))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as holder:
        try:
            yield holder, holder.stdout.readline()
        finally:
            holder.kill()


def test_one_process_trains_a_run_and_its_lock_dies_with_it(tmp_path):
    run = new_run(tmp_path / "demo")
    with hold_lock(run) as (holder, said):
        assert said == "locked\n"
        told = rf"is being trained by process {holder.pid} on \S+ since \d{{4}}-.*--fork"
        with pytest.raises(CheckpointError, match=told), run.lock():
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with run.lock():
        pass
    with run.lock():  # and it is let go at the end of the block
        pass
