"""What each tracker would show of a run, read with its own package."""

from pathlib import Path

from offline_wandb import read_history

Points = dict[str, list[tuple[int, float]]]  # by name, steps with their values, in order


def read_tensorboard(run: Path) -> Points:
    """The numbers in a run's event files, as TensorBoard loads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_wandb(run: Path) -> Points:
    """The numbers in all offline files of a run."""
    points: Points = {}
    for row in read_history(run):
        for name, value in row.items():
            points.setdefault(name, []).append((int(row["step"]), value))
    return points


def read_mlflow(run: Path) -> Points:
    """The numbers in the database that a run's tracker has remembered."""
    import json

    from mlflow.tracking import MlflowClient

    facts = json.loads((run / "trackers/mlflow.json").read_text())
    client = MlflowClient(facts["uri"])
    names = client.get_run(facts["id"]).data.metrics
    histories = {name: client.get_metric_history(facts["id"], name) for name in names}
    return {
        name: sorted((metric.step, metric.value) for metric in history)
        for name, history in histories.items()
    }


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
