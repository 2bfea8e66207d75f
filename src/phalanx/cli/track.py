"""`phalanx track`: sends the records of a run to a tracker, except what it already has."""

from pathlib import Path

from phalanx.cli.command import Argument, ParsedArgs, command
from phalanx.config.schema import OPTIONS
from phalanx.errors import ConfigError, NetworkError

_PATIENCE_S = 86_400.0  # a day: the user sees the command wait, and can stop it


@command(
    "track",
    "Send the records of a run to TensorBoard, Weights & Biases or MLflow, except "
    "what they already have.",
    Argument("run", "The run folder.", required=True),
    usage="RUN [--tensorboard] [--wandb] [--mlflow] [--option value]...",
    options=tuple(name for name, option in OPTIONS.items() if option.section == "trackers"),
    examples={
        "phalanx track runs/short --tensorboard": "event files for an earlier run",
        "phalanx track runs/short --wandb --wandb-project mine": "the same for wandb",
    },
)
def _run(args: ParsedArgs) -> None:
    """Send the records, and wait until all of them have arrived."""
    args.refuse_problems()
    from phalanx.assemble.prepare import read_stored_options
    from phalanx.config.read import read_stored_settings
    from phalanx.report.folder import open_run
    from phalanx.trackers.choice import check_trackers, choose_trackers
    from phalanx.trackers.processes import Trackers
    from phalanx.trackers.tracker import END

    run = open_run(Path(args["run"]))
    flags = {**args.flags, **{"plugin": "null"}}  # no code of the run is needed
    stored = {name: value for name, value in read_stored_options(run).items() if name in OPTIONS}
    settings = read_stored_settings(stored, flags=flags, where=str(run.config), name=run.path.name)
    chosen = choose_trackers(settings.config)
    named = {name: options for name, options in chosen.items() if name in args.flags} or chosen
    if not chosen:
        raise ConfigError("name a tracker: --tensorboard, --wandb or --mlflow")
    check_trackers(named)  # others that the run once had are not needed
    with run.lock():
        trackers = Trackers()
        has_started = trackers.start(run, named, print)
        end: END = "finished" if run.summary.exists() else "stopped"
        has_arrived = trackers.end(end, patience_s=_PATIENCE_S)
    if not (has_started and has_arrived):
        raise NetworkError(f"{run.path}: not everything has arrived; see above, and try again")
