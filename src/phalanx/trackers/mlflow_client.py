"""MLflow: one run of an experiment on a tracking server, or in a database."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.trackers.tracker import END, RunFacts, TrackerState

_STATUSES: dict[END, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_PARAMS_PER_CALL, _METRICS_PER_CALL = 100, 1000  # as many as a server accepts
_LONGEST_VALUE = 500  # characters
_PATIENCE = {  # of its HTTP client, which otherwise tries for many minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


class MLflow:
    """A run of an experiment in MLflow."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._client: Any = None
        self._id = ""
        self._metrics: list[Any] = []  # that wait to be sent

    @property
    def client(self) -> Any:
        """The client, once it is open."""
        assert self._client is not None
        return self._client

    def open(self, facts: RunFacts, state: TrackerState) -> str:
        """Begin the run there, or go on with it."""
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        uri = self._choose_uri(state)
        self._client = MlflowClient(tracking_uri=uri)
        if "id" in state.facts:
            self._id = state.facts["id"]
            self.client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create_run(facts)
            state.facts |= {"id": self._id, "uri": uri}
            state.save()
        return f"run {self._id} at {uri}"

    def _choose_uri(self, state: TrackerState) -> str:
        """Where the runs are; a resume finds them again from any folder."""
        given = self._options["mlflow-uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        default = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
        return str(state.facts.get("uri") or given or default)

    def _create_run(self, facts: RunFacts) -> str:
        """The id of a new run, with its options as parameters."""
        from mlflow.entities import Param

        wanted = self._options["mlflow-experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        name = wanted or "phalanx"
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        tags = {**facts.describe(), **({"sweep": facts.group} if facts.group else {})}
        run = self.client.create_run(experiment, run_name=facts.name, tags=tags)
        params = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in facts.options.items()]
        for begin in range(0, len(params), _PARAMS_PER_CALL):
            part = params[begin : begin + _PARAMS_PER_CALL]
            self.client.log_batch(run.info.run_id, params=part)
        return str(run.info.run_id)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Add the numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(name, value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send all numbers that wait; what fails is sent the next time."""
        while self._metrics:
            self.client.log_batch(self._id, metrics=self._metrics[:_METRICS_PER_CALL])
            del self._metrics[:_METRICS_PER_CALL]

    def close(self, end: END, results: Mapping[str, float]) -> None:
        """Add what came out, and end the run there."""
        if results:
            self.log(results, step=int(results["result/steps"]))
            self.flush()
        self.client.set_terminated(self._id, status=_STATUSES[end])
