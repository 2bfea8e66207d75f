"""Training and scoring on several ranks: starts them, or is one. No torch until they connect."""

import faulthandler
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from phalanx.assemble.prepare import PreparedRun
from phalanx.engine.checkpoint_store import find_newest_checkpoint
from phalanx.errors import (
    EXIT_LEFT_AT_ONCE,
    Bug,
    CheckpointError,
    DivergedError,
    FailedElsewhere,
    NetworkError,
    RanksLost,
    Stopped,
    UserError,
)
from phalanx.parallel.supervisor import supervise, watch_supervisor
from phalanx.plan.world import World
from phalanx.report.environment import hash_code
from phalanx.report.folder import is_run_folder
from phalanx.signals import Interrupted

if TYPE_CHECKING:
    from phalanx.config.schema import Config
    from phalanx.engine.train import Fit
    from phalanx.parallel.ranks import Ranks, Store
    from phalanx.plan.plan import Plan

_OWN_TO_A_MACHINE = ("data-dir", "run-dir", "device", "plugin", "init-weights", "workers")
_RUN = "run"  # the key in the store under which rank 0 publishes the run folder
_OPTIONS = "options"  # ... its host and the options of its command
_LEFT = "left"  # ... which counts ranks that found nothing to do
_READY = "ready"  # ... which rank 0 sets if it found no problem
_Prepared = TypeVar("_Prepared")
_TIMEOUT, _DAY = 600.0, 86_400.0  # seconds; the default, and the most


def start_ranks(prepared: PreparedRun, flags: Mapping[str, str], *, to_stderr: bool = False) -> int:
    """Train a run with ranks on this machine; returns the exit code.

    flags: options that a resume changes. to_stderr: whether the ranks print to standard error.
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
        progress=lambda: find_newest_checkpoint(run.checkpoints),
        print_line=lambda line: _print_line("train", line),
        way_out=f"continue with: {run.resume_command}",
    )
    if code not in (0, Stopped.exit_code, NetworkError.exit_code):  # these can be resumed
        _discard_unstarted_run(prepared)
    return code


def start_command_ranks(command: str, words: Sequence[str], ranks: int) -> int:
    """Run a command that saves nothing on ranks of this machine; returns its exit code."""
    code = supervise(
        [sys.executable, "-m", "phalanx", *command.split(), *words],
        ranks,
        progress=lambda: None,
        print_line=lambda line: _print_line(command, line),
        max_restarts=0,  # nothing is kept that a restart could continue from
        way_out="run the same command again",
    )
    return EXIT_LEFT_AT_ONCE if code == Stopped.exit_code else code


def _print_line(command: str, line: str) -> None:
    with suppress(OSError):  # the ranks are supervised even if standard error is closed
        os.write(2, f"phalanx {command}: {line}\n".encode())


def open_run_as_rank(
    world: World,
    prepare: Callable[[], PreparedRun | None],
    reopen: Callable[[Path], PreparedRun],
    flags: Mapping[str, str],
) -> "tuple[PreparedRun, Store] | None":
    """The run that the ranks of a world train, and their key-value store; None if no run needs it.

    Rank 0 prepares the run and tells the others, which reopen it. flags: those of the command,
    and its preset.
    """
    _set_up_rank()
    timeout = _read_timeout(flags)
    if world.rank == 0:
        known = _find_restarted_run(world, timeout)
        prepared = reopen(known) if known else prepare()
        from phalanx.parallel.ranks import open_store, wait_for_count

        with discard_on(NetworkError, FailedElsewhere, prepared=prepared):
            store = open_store(world, timeout=timeout)
            store.set(_OPTIONS, json.dumps([socket.gethostname(), dict(flags)]))
            store.set(_RUN, "" if prepared is None else str(prepared.run.path.absolute()))
        if prepared is not None:
            return prepared, store
        # the store ends with rank 0, so the others must have read it
        wait_for_count(store, _LEFT, world.size - 1, timeout=timeout)
        return None
    from phalanx.parallel.ranks import open_store, wait_for_key

    store = open_store(world, timeout=timeout)
    path = wait_for_key(store, _RUN, timeout=timeout)
    if not path:
        store.add(_LEFT, 1)
        return None
    with _report_failure_to_others(world, store):
        host, expected = json.loads(wait_for_key(store, _OPTIONS, timeout=timeout))
        _refuse_other_options(world, flags, host, expected)
        if not is_run_folder(Path(path)):
            raise CheckpointError(
                f"{path}: rank 0 has opened the run there, and this host does not see it; give "
                "--run-dir a folder that all hosts share"
            )
        return reopen(Path(path)), store


def _refuse_other_options(
    world: World, flags: Mapping[str, str], host: str, expected: Mapping[str, str]
) -> None:
    """Raise NetworkError if this rank's command has other options than that of rank 0."""
    others = [
        name
        for name in dict.fromkeys([*expected, *flags])
        if name not in _OWN_TO_A_MACHINE and flags.get(name) != expected.get(name)
    ]
    if others:
        named = ", ".join("preset" if name == "preset" else f"--{name}" for name in others)
        raise NetworkError(
            f"rank {world.rank} on {socket.gethostname()} has different options from rank 0 on "
            f"{host}: {named}; all ranks must have the same"
        )


@contextmanager
def _report_failure_to_others(world: World, store: "Store") -> Iterator[None]:
    """Context that reports a failure of this rank to the others, which would wait forever."""
    from phalanx.parallel.ranks import register_failure

    try:
        yield
    except UserError as failure:
        if register_failure(world, store, failure.exit_code) is not None:
            raise FailedElsewhere from failure
        raise


def _set_up_rank() -> None:
    """Set up what every rank needs first."""
    watch_supervisor()
    faulthandler.enable(2)  # prints all stacks if a signal such as SIGABRT ends the process
    # when a rank ends, torch's C++ code warns on every other one, which would bury the reason
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def discard_on(*failures: type[Exception], prepared: PreparedRun | None) -> Iterator[None]:
    """Context that removes the folder of a new run that such a failure keeps from starting."""
    try:
        yield
    except failures:
        if prepared is not None:  # the same --run-dir must be free for the next attempt
            _discard_unstarted_run(prepared)
        raise


def _discard_unstarted_run(prepared: PreparedRun) -> None:
    """Remove the folder of a run that this command could not start, unless it has a traceback."""
    run = prepared.run
    has_more = find_newest_checkpoint(run.checkpoints) or any(run.path.glob("phalanx-traceback*"))
    if prepared.is_new and not run.has_steps and not has_more:
        run.discard()


def _find_restarted_run(world: World, timeout: float) -> Path | None:
    """The run that a world trained before its launcher restarted all its ranks."""
    if not world.restart or world.supervised:
        return None
    from phalanx.parallel.ranks import find_in_earlier_store

    path = find_in_earlier_store(world, _RUN, timeout=timeout)
    # it is gone if the ranks could not connect
    return Path(path) if path and is_run_folder(Path(path)) else None


def train_as_rank(
    world: World,
    prepared: PreparedRun,
    store: "Store",
    *,
    stream: TextIO | None,
    choose_fit: "Callable[[Config], Fit]",
) -> bool:
    """Train as one of the ranks; returns whether this one has the result."""
    from phalanx.assemble.train import train

    plan, timeout = prepared.plan, prepared.config.machine.rank_timeout
    joined = join_ranks(world, store, plan, timeout, lambda: find_resume_command(world, prepared))
    discards = discard_on(NetworkError, FailedElsewhere, prepared=prepared)
    with discards, _explain_interruption(store, prepared), joined as ranks:
        fit = choose_fit(prepared.config)
        return train(prepared, stream=stream, ranks=ranks, fit=fit) is not None


@contextmanager
def _explain_interruption(store: "Store", prepared: PreparedRun) -> Iterator[None]:
    """Context of an unstarted run whose interruption may be due to a rank that failed.

    torchrun ends all other ranks then, perhaps before they notice the failure themselves.
    """
    from phalanx.parallel.ranks import has_failure

    try:
        yield
    except Interrupted as stop:
        if not prepared.run.has_steps and has_failure(store):
            raise FailedElsewhere from stop
        raise


def find_resume_command(world: World, prepared: PreparedRun) -> str:
    """The command that continues a run whose ranks lost connection; empty if there is none.

    If this start saved nothing there is none: the next might fail in the same way, and a
    scheduler would restart it forever. Our own supervisor prints the command itself.
    """
    run, start = prepared.run, prepared.start
    newest, began = find_newest_checkpoint(run.checkpoints), start.checkpoint if start else None
    has_saved = newest is not None and (not began or newest.absolute() != began.absolute())
    return run.resume_command if has_saved and not world.supervised else ""


def prepare_as_rank(
    world: World, prepare: Callable[[], _Prepared], flags: Mapping[str, str]
) -> "tuple[_Prepared, Store]":
    """What `prepare` returns in each rank, and the ranks' key-value store.

    Rank 0 goes first, so that a problem that all of them have is reported once.
    """
    _set_up_rank()
    prepared = prepare() if world.rank == 0 else None
    from phalanx.parallel.ranks import open_store, wait_for_key

    timeout = _read_timeout(flags)
    store = open_store(world, timeout=timeout)
    if prepared is not None:
        store.set(_READY, "")
        return prepared, store
    wait_for_key(store, _READY, timeout=timeout)
    with _report_failure_to_others(world, store):
        return prepare(), store


def _read_timeout(flags: Mapping[str, str]) -> float:
    """Seconds to wait for other ranks; rank 0 reports a problem with the option."""
    with suppress(ValueError):
        return min(max(1.0, float(flags.get("rank-timeout", _TIMEOUT))), _DAY)
    return _TIMEOUT


@contextmanager
def join_ranks(
    world: World,
    store: "Store",
    plan: "Plan",
    timeout: float,
    find_resume_command: Callable[[], str] = str,
) -> Iterator["Ranks"]:
    """Context in which this process works with the other ranks of its world.

    A failure of this rank is raised as it is; one that another rank reports is raised as
    FailedElsewhere. find_resume_command: returns the command that continues the run, or "".
    """
    from phalanx.assemble.torch_setup import prepare_torch
    from phalanx.parallel.ranks import (
        PeersLost,
        Ranks,
        convert_peer_errors,
        find_failure,
        leave_store,
        register_failure,
    )

    find_command: Callable[[], str] = str
    try:
        device = prepare_torch(plan, local_rank=world.local_rank)
        with convert_peer_errors(world), Ranks(world, store, device, timeout=timeout) as ranks:
            find_command = find_resume_command  # ranks that cannot even start would fail again
            yield ranks
    except PeersLost as lost:
        command, other_code = find_command(), None
        code = RanksLost.exit_code if command else NetworkError.exit_code
        with suppress(Interrupted):  # the launcher stops all ranks, and reports why
            other_code = find_failure(world, store)
            other_code = register_failure(world, store, code) if other_code is None else other_code
            leave_store(world, store)
        if other_code is not None:
            is_kept = other_code == RanksLost.exit_code
            raise FailedElsewhere(other_code if is_kept else NetworkError.exit_code) from lost
        if command:
            raise RanksLost(f"{lost}; continue with: {command}") from lost
        raise
    except FailedElsewhere:
        raise
    except (DivergedError, Stopped) as end:  # agreed by all
        if world.rank:
            raise FailedElsewhere(end.exit_code) from end
        raise
    except Exception as failure:
        other_code = register_failure(world, store, getattr(failure, "exit_code", Bug.exit_code))
        leave_store(world, store)
        if other_code is not None:
            raise FailedElsewhere from failure
        raise


def digest_run(prepared: PreparedRun) -> dict[str, str]:
    """Digests, by name, of what must be the same on all ranks of a run."""
    start, data = prepared.start, prepared.dataset.fingerprints
    weights = None if start is None else [start.use, start.facts["weights_sha256"]]
    return digest_values(prepared.config, {"data": data, "weights to start from": weights})


def digest_values(config: "Config", values: Mapping[str, Any]) -> dict[str, str]:
    """Digests of these values, of the code, and of the options."""
    # paths and devices may differ between machines
    options = {n: v for n, v in config.flat().items() if n not in _OWN_TO_A_MACHINE}
    values = {"options": options, "code": hash_code(), **values}
    return {
        name: sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
        for name, value in values.items()
    }
