"""`phalanx compare`: say where two runs differ."""

from pathlib import Path

from phalanx.cli.command import Argument, ParsedArgs, command


@command(
    "compare",
    "Say where two runs differ: options, data, code, the first step at which "
    "numbers diverge, and scores with a paired test.",
    Argument("first", "A run folder.", metavar="RUN", required=True),
    Argument("second", "Another one.", metavar="RUN", required=True),
    Argument("--json", "Print a JSON object.", switch=True),
    usage="RUN RUN [--json]",
    examples={"phalanx compare runs/a runs/b": "why is b better than a?"},
)
def _run(args: ParsedArgs) -> None:
    """Compare options, data, code, numbers and scores."""
    args.refuse_problems()
    from phalanx.report.compare import compare_runs, render_comparison
    from phalanx.report.folder import open_run

    comparison = compare_runs(open_run(Path(args["first"])), open_run(Path(args["second"])))
    args.print_result(comparison.as_json(), lambda: print(render_comparison(comparison)))
