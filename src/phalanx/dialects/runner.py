"""The benchmark runner that the older applications share: python3 -m examples_utils benchmark."""

from phalanx.dialects.table import (
    Dialect,
    OldOption,
    Script,
    count_row,
    elsewhere,
    flag_row,
    kept,
    lost,
    nothing,
    renamed,
    whole_row,
)

_ALL_METRICS = "all metrics are written to the folder of results"
_BENCHMARK = (
    OldOption("spec", kept(), takes="many"),
    OldOption("benchmark", kept(), takes="many"),
    flag_row("allow-wandb", kept()),
    flag_row("include-convergence", kept()),
    flag_row("stop-on-error", kept()),
    count_row("timeout", kept()),
    OldOption("log-dir", renamed("out")),
    flag_row("compile-only", renamed("dry-run", why="nothing is compiled ahead")),
    flag_row("profile", lost("the runner profiles nothing; give --profile in a cmd: line")),
    flag_row("csv-metrics", elsewhere(_ALL_METRICS)),
    OldOption("custom-metrics-files", lost("metrics are found by regexp or key in the file")),
    OldOption("additional-metrics", elsewhere(_ALL_METRICS), takes="many"),
    OldOption("requirements-file", nothing("nothing is installed")),
    flag_row("upload-checkpoints", nothing("checkpoints stay in the folders of their runs")),
    OldOption("logging", nothing("output is kept in full")),
    whole_row("progress-trace-period", nothing("a run prints as it goes")),
    flag_row("gc-monitor", elsewhere("`bench train` reports the device's power and memory")),
)
RUNNER = Dialect(
    name="runner",
    title="the benchmark runner",
    scripts={"-m examples_utils benchmark": Script(kind="benchmark", options=_BENCHMARK)},
    main_script="-m examples_utils benchmark",
)
