"""Old commands are ported in an empty folder, and no data is anywhere."""

import pytest


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DATA_DIR", "DATASETS_DIR"):
        monkeypatch.delenv(name, raising=False)
