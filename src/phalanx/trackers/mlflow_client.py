"""MLflow: one run of an experiment on a tracking server, or in a database."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from phalanx.trackers.tracker import END, RunFacts, TrackerState

_STATUSES: dict[END, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_PARAMS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # limits of the server
_LONGEST_VALUE = 500  # characters
_PATIENCE = {  # for its HTTP client, which otherwise retries for many minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


class MLflow:
    """A run of an experiment in MLflow."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._client: Any = None  # until it is open, like the state
        self._state: TrackerState | None = None
        self._id = ""
        self._metrics: list[Any] = []  # waiting to be sent

    @property
    def state(self) -> TrackerState:
        """The stored state, once it is open."""
        assert self._state is not None
        return self._state

    def open(self, facts: RunFacts, state: TrackerState) -> str:
        """Start the run in MLflow, or continue it."""
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        uri = self._choose_uri(state)
        self._state = state
        self._client = MlflowClient(tracking_uri=_move_password_to_environment(uri))
        if "id" in state.facts and not self._is_elsewhere(uri):
            self._id = state.facts["id"]
        else:
            self._id = state.facts["id"] = self._create_run(facts)
        if _has_password(uri):
            state.facts.pop("uri", None)
        else:
            state.facts["uri"] = uri
        state.save()  # before anything else can fail: a second attempt must find this run
        if "has_options" not in state.facts:
            self._log_options(facts)
            state.facts["has_options"] = "yes"
            state.save()
        return f"run {self._id} at {_hide_user(uri).partition('?')[0]}"

    def _choose_uri(self, state: TrackerState) -> str:
        """The address of the runs; a resume finds them from any folder."""
        stored = state.facts.get("uri")
        given = self._options["mlflow-uri"] or stored or os.environ.get("MLFLOW_TRACKING_URI")
        if not given and "id" in state.facts:
            raise ValueError("set MLFLOW_TRACKING_URI again: its password was not stored")
        return str(given or f"sqlite:///{Path.cwd() / 'mlflow.db'}")

    def _is_elsewhere(self, uri: str) -> bool:
        """Whether the known run is not at this address, because the address has changed."""
        try:
            self._client.update_run(self.state.facts["id"], status="RUNNING")
        except Exception as failure:
            is_unknown = getattr(failure, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"
            if not is_unknown or self.state.facts.get("uri", uri) == uri:
                raise
            self.state.facts.clear()
            self.state.last_steps.clear()
            return True
        return False

    def _create_run(self, facts: RunFacts) -> str:
        """The id of a new run."""
        wanted = self._options["mlflow-experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        name = wanted or "phalanx"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        tags = {**facts.describe(), **({"sweep": facts.group} if facts.group else {})}
        run = self._client.create_run(experiment, run_name=facts.name, tags=tags)
        return str(run.info.run_id)

    def _log_options(self, facts: RunFacts) -> None:
        """Add all options as parameters."""
        from mlflow.entities import Param

        params = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in facts.options.items()]
        for begin in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[begin : begin + _PARAMS_PER_CALL])

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Add the numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(name, value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send all waiting numbers; those that fail are sent the next time."""
        while self._metrics:
            self._client.log_batch(self._id, metrics=self._metrics[:_METRICS_PER_CALL])
            del self._metrics[:_METRICS_PER_CALL]

    def close(self, end: END, results: Mapping[str, float]) -> None:
        """Add the results, and end the run in MLflow."""
        steps = str(results.get("result/steps"))
        if results and self.state.facts.get("results") != steps:
            self.log(results, step=int(results["result/steps"]))
            self.flush()
            self.state.facts["results"] = steps  # `phalanx track` may be called again
            self.state.save()
        self._client.set_terminated(self._id, status=_STATUSES[end])


def _has_password(uri: str) -> bool:
    parts = urlsplit(uri)
    return parts.password is not None or "password=" in parts.query


def _hide_user(uri: str) -> str:
    """An address without its user name and password."""
    return re.sub(r"(?<=://)[^/?#]*@", "", uri)


def _move_password_to_environment(uri: str) -> str:
    """The address for the client, which repeats it in its messages.

    A server's password is passed through the environment instead; a database needs it in there.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.password is None:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
    return _hide_user(uri)
