"""Options of trackers: programs that compare the metrics of many runs."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator

from phalanx.config.fields import Section, option


def _check_uri(text: str) -> str:
    """The text; ValueError if it contains a password, which must not be stored in config.yaml."""
    try:
        has_password = urlsplit(text).password is not None
    except ValueError:
        raise ValueError(f"{text!r} is not an address; write it as http://host:5000") from None
    if has_password:
        raise ValueError(
            "has a password in it, which would be stored with the run; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
        )
    return text


_UriText = Annotated[str, AfterValidator(_check_uri)]


class TrackerConfig(Section):
    """Trackers: where else the numbers of a run are shown."""

    tensorboard: bool = option(
        False, "Write TensorBoard's event files into the run folder.", resumable=True
    )
    wandb: bool = option(
        False, "Send the run to Weights & Biases, or record it offline.", resumable=True
    )
    wandb_mode: Literal["auto", "online", "offline"] = option(
        "auto",
        "online, offline (for `wandb sync` later), or auto.",
        resumable=True,
        auto="WANDB_MODE, else online with an API key and offline without one",
    )
    wandb_project: str | None = option(
        None, "Project of the run in wandb.", resumable=True, auto="WANDB_PROJECT, or phalanx"
    )
    wandb_run_name: str | None = option(
        None,
        "Name of the run in wandb.",
        resumable=True,
        aliases=("wandb-name",),
        auto="the name of the run folder",
    )
    wandb_tags: str | None = option(
        None, "Tags of the run in wandb, separated by commas.", resumable=True
    )
    mlflow: bool = option(False, "Send the run to MLflow.", resumable=True)
    mlflow_uri: _UriText | None = option(
        None,
        "Address of the MLflow server or database, such as http://host:5000.",
        resumable=True,
        aliases=("mlflow-tracking-uri",),
        auto="MLFLOW_TRACKING_URI, or mlflow.db in the current folder",
    )
    mlflow_experiment: str | None = option(
        None,
        "Experiment of the run in MLflow.",
        resumable=True,
        auto="MLFLOW_EXPERIMENT_NAME, or phalanx",
    )
