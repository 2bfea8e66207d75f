"""Copies of files in memory: shared while they are used, and safe from changes on the disk."""

import gc
import os
from pathlib import Path

import pytest

from phalanx.data.formats.file_bytes import copy_to_memory, list_copies


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"head and body")
    return path


def test_a_copy_outlives_its_file(path):
    copy = copy_to_memory(path, 5)
    os.truncate(path, 0)
    assert copy[:] == b"and body"


def test_a_file_that_did_not_change_is_copied_once(path):
    first = copy_to_memory(path)
    assert copy_to_memory(path) is first
    path.write_bytes(b"another body")
    assert copy_to_memory(path)[:] == b"another body" and first[:] == b"head and body"


def test_a_copy_that_nobody_uses_is_given_back(path):
    copy = copy_to_memory(path)
    descriptor = copy.memory.fileno()
    assert any(key.startswith(str(path)) for key in list_copies())
    del copy
    gc.collect()
    assert not any(key.startswith(str(path)) for key in list_copies())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_empty_file_has_no_copy(path):
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        copy_to_memory(path)
