"""One run on several ranks: start them here, or be one of them. Without torch until they meet."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.assemble.prepare import PreparedRun
from phalanx.engine.checkpoint_store import newest_checkpoint
from phalanx.errors import Stopped, UserError
from phalanx.parallel.supervisor import supervise
from phalanx.plan.world import World

if TYPE_CHECKING:
    from phalanx.parallel.ranks import Ranks

EXIT_SILENT = 8  # of a rank that has nothing to say: another one has said it
_RUN = "run"  # the key under which rank 0 tells the others the run folder
_DEFAULT_TIMEOUT = 600.0


def train_on_ranks(prepared: PreparedRun, flags: Mapping[str, str]) -> int:
    """Train a run with ranks on this machine; the exit code says how it ended.

    flags: what a resume changes.
    """
    run = prepared.run
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    if prepared.accepts_changed_data:
        words.append("--accept-changed-data")
    plugin = prepared.config.run.plugin
    if plugin and "plugin" not in flags:
        words += ["--plugin", plugin]
    code = supervise(
        [sys.executable, "-m", "phalanx", "train", "--resume", str(run.path), *words],
        prepared.plan.layout.ranks,
        progress=lambda: newest_checkpoint(run.checkpoints),
        say=lambda line: print(line, file=sys.stderr),
    )
    began = newest_checkpoint(run.checkpoints) or (run.path / "metrics.jsonl").exists()
    if prepared.fresh and code not in (0, Stopped.exit_code) and not began:
        run.discard()  # made by this command, which cannot begin it
    return code


class RankFailed(UserError):
    """A rank's own failure, told by that rank; its exit code is that of the failure."""


def train_as_rank(
    world: World,
    prepare: Callable[[], PreparedRun | None],
    train: Callable[[PreparedRun, "Ranks"], Any],
    flags: Mapping[str, str],
) -> PreparedRun | None:
    """Be one rank of a run; gives the run where this rank has its result.

    prepare: what rank 0 opens the run by, None where there is nothing to train. flags: what the
    other ranks open it with.
    """
