"""`phalanx report` and `phalanx compare`: a run folder as a page, and two side by side."""

from pathlib import Path

from phalanx.cli.command import JSON_FLAG, Argument, ParsedArgs, command


@command(
    "report",
    "Rebuild a run's report.html from its folder.",
    Argument("run", "A run folder.", required=True),
    usage="RUN",
    examples={"phalanx report runs/demo": "also while the run is still training"},
)
def _write_report(args: ParsedArgs) -> None:
    """Write report.html again; this does not need the data."""
    args.refuse_problems()
    from phalanx.report.folder import open_run
    from phalanx.report.report_page import write_report

    print(f"report: {write_report(open_run(Path(args['run'])))}")


@command(
    "compare",
    "Show where two runs differ: options, data, code, the first step at which "
    "numbers diverge, and scores with a paired test.",
    Argument("first", "A run folder.", metavar="RUN", required=True),
    Argument("second", "Another one.", metavar="RUN", required=True),
    JSON_FLAG,
    usage="RUN RUN [--json]",
    examples={"phalanx compare runs/a runs/b": "why is b better than a?"},
)
def _compare(args: ParsedArgs) -> None:
    """Compare options, data, code, numbers and scores."""
    args.refuse_problems()
    from phalanx.report.compare import compare_runs, render_comparison
    from phalanx.report.folder import open_run

    comparison = compare_runs(open_run(Path(args["first"])), open_run(Path(args["second"])))
    args.print_result(comparison.to_dict(), lambda: print(render_comparison(comparison)))
