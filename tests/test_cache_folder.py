"""The cache folder, where there is no home to have it in."""

import os
import stat
from pathlib import Path

import pytest

from phalanx.cache_folder import find_user_cache, open_temporary_cache
from phalanx.errors import DiskError


def test_a_user_without_a_home_has_no_cache(tmp_path, monkeypatch):
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert find_user_cache() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_user_cache() == tmp_path / "phalanx"


def test_the_temporary_cache_is_the_same_every_time_and_private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = open_temporary_cache()
    assert open_temporary_cache() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert stat.S_IMODE(open_temporary_cache().stat().st_mode) == 0o700


@pytest.mark.parametrize("taken_by", ["a link", "a file", "another user"])
def test_a_temporary_cache_of_somebody_else_is_not_used(tmp_path, monkeypatch, taken_by):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = tmp_path / f"phalanx-{os.getuid()}"
    if taken_by == "a link":
        (tmp_path / "theirs").mkdir()
        name.symlink_to("theirs")
    elif taken_by == "a file":
        name.touch()
    else:
        other = os.getuid() + 1
        name = tmp_path / f"phalanx-{other}"
        name.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: other)
    folder = open_temporary_cache()
    assert folder != name
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_folder_for_temporary_files_is_a_mistake_with_a_way_out(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/dev/null/tmp")
    with pytest.raises(DiskError, match=r"temporary files .*\(Not a directory\); set TMPDIR"):
        open_temporary_cache()
