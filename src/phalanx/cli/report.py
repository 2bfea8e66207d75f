"""`phalanx report`: remake a run's page from what its folder holds."""

from pathlib import Path

from phalanx.cli.command import Argument, ParsedArgs, command


@command(
    "report",
    "Remake a run's report.html from what its folder holds.",
    Argument("run", "A run folder.", required=True),
    usage="RUN",
    examples={"phalanx report runs/demo": "also while the run is still training"},
)
def _run(args: ParsedArgs) -> None:
    """Write report.html again; the data need not be there any more."""
    args.refuse_problems()
    from phalanx.report.folder import open_run
    from phalanx.report.page import write_report

    print(f"report: {write_report(open_run(Path(args['run'])))}")
