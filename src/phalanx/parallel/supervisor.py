"""Starts, restarts and ends the ranks of a run on one machine together.

how a rank ends                  what happens to the others
0                                they continue: they are about to end, too
killed by a signal               killed at once; then all are restarted from the last checkpoint
75, asked to stop                asked, too; they take the time they need to save
8, no peers or no progress       get a moment to end otherwise; those that hang print their stack
any other exit code              get a moment to end by themselves; then they are killed

The first rank of the last kind determines the exit code; without one, 75 does, then 8: a rank that
lost its peers is seldom the cause.
"""

import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from phalanx.errors import EXIT_LEFT_AT_ONCE, EXIT_STOPPED, NetworkError
from phalanx.parent_process import watch_parent
from phalanx.signals import find_stop_signals
from phalanx.units import format_plural

_POLL_S = 0.05
_GRACE_S = 5.0  # for the others to end by themselves; longer than a watchdog waits for peers
_LEAVE_S = 2.0  # after a second SIGINT
_STACK_S = 1.0  # for a rank to show its stack
_LOST_PEERS = NetworkError.exit_code
_PIPE = "PHALANX_SUPERVISOR_PIPE"
_Ranks = dict[int, "subprocess.Popen[bytes]"]


def supervise(
    command: Sequence[str],
    ranks: int,
    *,
    progress: Callable[[], object],
    print_line: Callable[[str], None],
    max_restarts: int = 3,
    way_out: str = "run the same command again to continue",
) -> int:
    """Run the command once for each rank, until all have ended; returns the common exit code.

    progress: compared after each restart; a new value resets the count of restarts. way_out: what
    to do when no restarts are left, for the end of the message.
    """
    reached, in_a_row, restart = progress(), 0, 0
    with _open_pipe() as pipe, collect_signals() as signals:
        while True:
            world = _describe_world(ranks, restart)
            variables = {**os.environ, **world, _PIPE: str(pipe)}
            with _start_ranks(command, variables, pipe) as living:
                rank, code = _wait_for_end(living, signals)
                _show_stacks(living if code == _LOST_PEERS else {}, print_line)
            if code == _LOST_PEERS:
                print_line(f"the ranks lost contact with each other; {way_out}")
            if code >= 0:
                return code
            killed = f"rank {rank} was killed by {_name_signal(-code)}"
            before, reached = reached, progress()
            if signals:
                print_line(f"{killed} while all were asked to stop; {way_out}")
                return EXIT_STOPPED
            in_a_row = in_a_row + 1 if reached == before else 1
            if in_a_row > max_restarts:
                tried = f" after {format_plural(max_restarts, 'restart')} without a new checkpoint"
                print_line(f"{killed}{tried if max_restarts else ''}; {way_out}")
                return _LOST_PEERS
            print_line(f"{killed}; all {ranks} ranks start again from the last checkpoint")
            restart += 1


def watch_supervisor() -> None:
    """Make this rank end at once when its supervisor ends, for whatever reason."""
    pipe = os.environ.pop(_PIPE, None)  # it means nothing to the processes we start
    if pipe is not None:
        watch_parent(int(pipe), lambda: os._exit(_LOST_PEERS))


def _describe_world(ranks: int, restart: int) -> dict[str, str]:
    """The variables that all ranks share; with a new port, as the last may still be in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PHALANX_RESTART": str(restart),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 keeps the store, whoever started us
    }


@contextmanager
def _open_pipe() -> Iterator[int]:
    """Context with the end of a pipe that ranks watch; only this process has the other one."""
    watched, held = os.pipe()
    try:
        yield watched
    finally:
        os.close(watched)
        os.close(held)


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Context in which signals that ask for a stop are only appended to the list that it yields."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread can handle signals
        return

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in find_stop_signals()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _start_ranks(
    command: Sequence[str], variables: Mapping[str, str], pipe: int
) -> Iterator[_Ranks]:
    """Context with the ranks' processes; those that are alive at its end are killed."""
    living: _Ranks = {}
    try:
        for rank in range(int(variables["WORLD_SIZE"])):
            living[rank] = subprocess.Popen(
                command,
                stdin=None if rank == 0 else subprocess.DEVNULL,
                env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                pass_fds=(pipe,),
                start_new_session=True,  # Ctrl-C is for us, and we pass it on once
            )
        yield living
    finally:
        left = [process for process in living.values() if process.poll() is None]
        for process in left:
            with suppress(ProcessLookupError, PermissionError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)  # including its child processes
        for process in left:
            process.wait()


def _wait_for_end(living: _Ranks, signals: list[int]) -> tuple[int, int]:
    """The rank that determines the result, and its exit code, negative for a signal.

    Ranks are removed from `living` as they end. Those that are left did not end in time.
    """
    decisive, exit_code, deadline, passed_on = 0, 0, math.inf, 0
    while living and time.monotonic() < deadline and exit_code >= 0:
        time.sleep(_POLL_S)
        for number in signals[passed_on:]:
            for process in living.values():
                process.send_signal(number)
            passed_on += 1
            if passed_on > 1 and number == signal.SIGINT:
                exit_code, deadline = EXIT_LEFT_AT_ONCE, time.monotonic() + _LEAVE_S
        ended = [(p.returncode, rank) for rank, p in living.items() if p.poll() is not None]
        for code, rank in sorted(ended):  # those killed by a signal first
            del living[rank]
            if find_precedence(code) > find_precedence(exit_code):
                decisive, exit_code = rank, code
                deadline = math.inf if code == EXIT_STOPPED else time.monotonic() + _GRACE_S
        if exit_code == EXIT_STOPPED and not signals:
            signals.append(signal.SIGTERM)  # only this rank was asked to stop
    return decisive, exit_code


def find_precedence(code: int) -> int:
    """The precedence of an exit code: how much it explains."""
    return {0: 0, _LOST_PEERS: 1, EXIT_STOPPED: 2}.get(code, 3)


def _show_stacks(hung: _Ranks, print_line: Callable[[str], None]) -> None:
    """Abort ranks that hang or are stopped; faulthandler then prints their stacks."""
    for rank, process in hung.items():  # one after the other, so that their lines do not mix
        print_line(f"rank {rank} is not responding and will be aborted; it hangs here:")
        process.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STACK_S)


def _name_signal(number: int) -> str:
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")
