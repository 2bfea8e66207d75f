"""What MLflow's client is asked for, without a server."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from phalanx.report.folder import create_run
from phalanx.trackers.mlflow_client import MLflow
from phalanx.trackers.tracker import load_state, read_run_facts


class Unknown(Exception):
    """As a server answers that has no such run."""

    error_code = "RESOURCE_DOES_NOT_EXIST"


class Server:
    """Any server; the calls that have come are those of all of them."""

    calls: list[tuple[str, str]]
    runs: set[tuple[str, str]]
    fails = False

    def __init__(self, tracking_uri: str) -> None:
        self.calls.append(("client", tracking_uri))
        self.uri = tracking_uri

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="0")

    def create_run(self, experiment, *, run_name, tags):
        self.calls.append(("create", self.uri))
        run = f"r{len(self.runs)}"
        self.runs.add((self.uri, run))
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run, *, status):
        if (self.uri, run) not in self.runs:
            raise Unknown

    def log_batch(self, run, *, params=(), metrics=()):
        if self.fails:
            raise ConnectionError
        self.calls.append(("params" if params else "metrics", run))

    def set_terminated(self, run, *, status):
        self.calls.append(("end", status))


@pytest.fixture
def server(monkeypatch):
    """A stand-in for the package."""
    tracking, entities = ModuleType("mlflow.tracking"), ModuleType("mlflow.entities")
    fresh = type("Fresh", (Server,), {"calls": [], "runs": set()})
    tracking.MlflowClient = fresh
    entities.Param = entities.Metric = lambda *parts: parts
    for module in (ModuleType("mlflow"), tracking, entities):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("URI", "USERNAME", "PASSWORD"):  # put back what the client sets
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "")
    return fresh


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path / "run", config_text="seed: 1\n", facts={"origins": {}})


def open_run_there(run, uri=None):
    """MLflow opened on a run as a new process does, and what it says."""
    tracker = MLflow({"mlflow-uri": uri, "mlflow-experiment": None})
    return tracker, tracker.open(read_run_facts(run), load_state(run, "mlflow"))


def test_a_password_in_the_environment_is_neither_shown_nor_stored(run, server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s%21cret@host:5000/x")
    _, note = open_run_there(run)
    assert note == "run r0 at http://host:5000/x"
    assert "cret" not in (run.path / "trackers/mlflow.json").read_text()
    assert server.calls[0] == ("client", "http://host:5000/x")  # its errors show the address
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "s!cret"
    open_run_there(run)
    assert len(server.runs) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    with pytest.raises(ValueError, match="set MLFLOW_TRACKING_URI again"):
        open_run_there(run)


def test_an_option_comes_before_what_is_stored_and_that_before_the_environment(
    run, server, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////first.db")
    tracker, note = open_run_there(run)
    assert note == "run r0 at sqlite:////first.db"
    tracker.state.last_steps["train"] = 7
    tracker.state.save()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other")
    assert open_run_there(run)[1] == note
    tracker, note = open_run_there(run, "http://third")
    assert note == "run r1 at http://third"
    assert tracker.state.last_steps == {}, "there it is told from the first step on"


def test_a_run_is_created_once_and_its_results_are_sent_once(run, server):
    server.fails = True
    for _ in range(2):
        with pytest.raises(ConnectionError):
            open_run_there(run, "http://host")
    server.fails = False
    for _ in range(2):
        tracker, _ = open_run_there(run, "http://host")
        tracker.close("finished", {"result/steps": 9.0, "result/top1": 0.5})
    calls = [call for call, _ in server.calls if call != "client"]
    assert calls == ["create", "params", "metrics", "end", "end"]
