"""One run on several ranks: start them here, or be one of them. Without torch until they meet."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phalanx.assemble.prepare import PreparedRun, prepare_resume
from phalanx.engine.checkpoint_store import newest_checkpoint
from phalanx.errors import DivergedError, FailedElsewhere, NetworkError, Stopped
from phalanx.parallel.supervisor import supervise, watch_supervisor
from phalanx.parallel.watchdog import enable_stack_dumps
from phalanx.plan.world import World
from phalanx.report.folder import is_run_folder
from phalanx.signals import Interrupted

if TYPE_CHECKING:
    from phalanx.parallel.ranks import Store

_RUN = "run"  # the key under which rank 0 tells the others the run folder


def start_ranks(prepared: PreparedRun, flags: Mapping[str, str], *, to_stderr: bool = False) -> int:
    """Train a run with ranks on this machine; the exit code says how it ended.

    flags: what a resume changes. to_stderr: where the ranks speak to.
    """
    run, plugin = prepared.run, prepared.config.run.plugin
    given = {**({"plugin": plugin} if plugin else {}), **flags}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    code = supervise(
        [
            *(sys.executable, "-m", "phalanx", "train", "--resume", str(run.path), *words),
            *["--accept-changed-data"] * prepared.accepts_changed_data,
            *["--json"] * to_stderr,
        ],
        prepared.plan.layout.ranks,
        progress=lambda: newest_checkpoint(run.checkpoints),
        say=_say,
        way_out=f"continue with: phalanx train --resume {run.path}{run.plugin_flag}",
    )
    trained = newest_checkpoint(run.checkpoints) or (run.path / "metrics.jsonl").exists()
    goes_on = (0, Stopped.exit_code, NetworkError.exit_code)
    if prepared.fresh and code not in goes_on and not trained:
        run.discard()  # made by this command, which cannot begin it
    return code


def _say(line: str) -> None:
    os.write(2, f"phalanx train: {line}\n".encode())


def open_as_rank(
    world: World,
    prepare: Callable[[], PreparedRun | None],
    flags: Mapping[str, str],
    *,
    timeout: float,
    accept_changed_data: bool,
) -> "tuple[PreparedRun, Store] | None":
    """The run that the ranks of a world train, and the store they meet at; None if there is none.

    Rank 0 prepares it and tells the others. flags: what they open it with. timeout: how long, in
    seconds, a rank waits for those.
    """
    watch_supervisor()
    enable_stack_dumps()
    # what torch's C++ warns of when a rank ends, on every other one, would bury the reason
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if world.rank == 0:
        prepared = _find_restarted(world, flags, timeout) or prepare()
        from phalanx.parallel.ranks import open_store

        with _discarding(prepared):
            store = open_store(world, timeout=timeout)
            store.set(_RUN, "" if prepared is None else str(prepared.run.path.absolute()))
        return None if prepared is None else (prepared, store)
    from phalanx.parallel.ranks import open_store, wait_for_key

    store = open_store(world, timeout=timeout)
    path = wait_for_key(store, _RUN, timeout=timeout)
    if not path:
        return None
    return prepare_resume(Path(path), flags, accept_changed_data=accept_changed_data), store


@contextmanager
def _discarding(prepared: PreparedRun | None) -> Iterator[None]:
    """A block that a new run does not outlive if its ranks cannot meet."""
    try:
        yield
    except NetworkError:
        if prepared is not None and prepared.fresh:
            prepared.run.discard()
        raise


def _find_restarted(world: World, flags: Mapping[str, str], timeout: float) -> PreparedRun | None:
    """The run that a world trained before its launcher started all its ranks again."""
    if not world.restart or world.supervised:
        return None
    from phalanx.parallel.ranks import find_in_earlier_store

    path = find_in_earlier_store(world, _RUN, timeout=timeout)
    # it is gone where the ranks could not meet
    return prepare_resume(Path(path), flags) if path and is_run_folder(Path(path)) else None


def train_as_rank(
    world: World, prepared: PreparedRun, store: "Store", stream: TextIO | None = None
) -> bool:
    """Train as one of the ranks; whether this one has the result.

    A failure of this rank's own is raised, with its number; one that another rank tells is
    raised as FailedElsewhere.
    """
    from phalanx.assemble.torch_setup import prepare_torch
    from phalanx.assemble.train import train
    from phalanx.parallel.ranks import PeersLost, Ranks, peer_errors

    device = prepare_torch(prepared.plan, local_rank=world.local_rank)
    with _discarding(prepared):
        ranks = Ranks(world, store, device, timeout=prepared.config.machine.rank_timeout)
    try:
        with peer_errors(ranks):
            return train(prepared, stream=stream, ranks=ranks) is not None
    except FailedElsewhere:
        raise  # it must not sign before the rank that has failed does
    except PeersLost as lost:
        with suppress(Interrupted):  # the launcher asks all to leave, and tells why
            if world.supervised or ranks.has_other_failed():
                raise FailedElsewhere from lost
        raise
    except (DivergedError, Stopped) as end:  # agreed by all
        if world.rank:
            raise FailedElsewhere(end.exit_code) from end
        raise
    except Exception as failure:
        if not ranks.sign_failure():
            raise FailedElsewhere from failure
        raise
    finally:
        ranks.close()
