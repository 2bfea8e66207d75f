"""Runs the lines of a launcher, which start together and end together.

how a line ends                    what happens to the others
0                                  they continue: they are about to end, too
75, asked to stop                  they get the time they need to save
no connection to its host          they are asked to stop at once; then killed
any other way                      they get a moment to end by themselves; then the same

The first exit code that is not 0, 8 or 75 decides, then 75, then 8, as among ranks.
"""

import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO

from phalanx.errors import EXIT_STOPPED, ConfigError, NetworkError
from phalanx.launch.command_lines import CONNECT_S, LaunchLine, build_probe
from phalanx.launch.torchrun_output import RankEnd, TorchrunOutput
from phalanx.parallel.supervisor import collect_signals, find_precedence

_POLL_S = 0.05
_GRACE_S = 15.0  # for other hosts to notice by themselves, and report it
_LEAVE_S = 10.0  # from a request to stop to SIGKILL
_LAST_LINES_S = 2.0
_LOST = 255  # ssh's own exit code
_NETWORK = NetworkError.exit_code
# the ranks are signalled, not their launcher: torchrun gives them 30 s to save and loses their exit
# codes, mpirun 1 s; a launcher that has no ranks here, or none yet, gets the signal itself
_TO_RANKS = (
    "k=; for c in $(cat /proc/$$/task/*/children); do grep -q RANK= /proc/$c/environ && "
    'k="$k $c"; done; kill -s "$s" ${k:-$$}'
)
_SEND = {"torchrun": _TO_RANKS, "mpirun": _TO_RANKS}
_SEND["srun"] = (  # which would kill its tasks
    'if [ -n "$SLURM_JOB_ID" ]; then scancel -s "$s" "$SLURM_JOB_ID"; else kill -s "$s" $$; fi'
)
# signal names arrive on standard input; end of file means that no sender is left
_LISTEN = (
    "exec 3<&0; ( {{ while read -r s; do {send}; done; s=TERM; {send}; }} <&3 3<&- "
    '>/dev/null 2>&1 & ); exec "$@" 3<&- </dev/null'
)
_Show = Callable[[str, str, bool], None]  # host, line, whether it is from standard error


def refuse_missing_programs(lines: Sequence[LaunchLine]) -> None:
    """Raise if the program that starts a line is not installed."""
    for line in lines:
        program = "ssh" if line.ssh else line.launcher
        if program != "torchrun" and shutil.which(program) is None:  # torchrun comes with torch
            way_out = "install it" if line.ssh else "install it, or give --launcher torchrun"
            raise ConfigError(f"{program}: there is no such program on this machine; {way_out}")


def refuse_unreachable(lines: Sequence[LaunchLine]) -> None:
    """Raise if ssh cannot reach a host; all are checked at once, before anything starts."""
    remote = [line for line in lines if line.ssh]
    with ThreadPoolExecutor(max_workers=max(1, len(remote))) as pool:
        problems = [problem for problem in pool.map(_probe, remote) if problem]
    if problems:
        raise NetworkError("\n".join(problems))


def _probe(line: LaunchLine) -> str:
    """What is wrong with a host; empty if nothing is."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            build_probe(line),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=6 * CONNECT_S,
            check=False,
        )
        code, said = done.returncode, done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        code, said = _LOST, ["no answer"]
    if code == _LOST:
        why = said[-1].strip() if said else "no reason given"
        return (
            f"host {line.host}: cannot be reached, tried for {time.monotonic() - began:.1f} s "
            f"({why}); make `ssh {line.host}` work without a password, or leave it out of --host"
        )
    missing = {3: f"no folder {line.folder}", 4: "no such Python as the one that runs here"}
    if code in missing:
        return f"host {line.host}: has {missing[code]}; every host needs the same files"
    return ""


def run_lines(
    lines: Sequence[LaunchLine], *, show: _Show, print_line: Callable[[str], None]
) -> int:
    """Run all lines until they have ended; returns the exit code of their ranks.

    show: called with the output of ranks. print_line: called with messages of the launcher itself.
    """
    with collect_signals() as signals, _start_lines(lines, show) as started:
        return _wait_for_end(started, signals, print_line)


class _RunningLine:
    """A line that has been started."""

    def __init__(self, line: LaunchLine, show: _Show) -> None:
        self.line, self.output = line, TorchrunOutput()
        self._began = time.monotonic()
        listen = _LISTEN.format(send=_SEND[line.launcher])
        self.process = subprocess.Popen(
            line.build_host_args(["sh", "-c", listen, "sh", *line.args]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only us, and we forward it once
        )
        assert self.process.stdout and self.process.stderr
        self._readers = [
            threading.Thread(target=self._read, args=(stream, show, is_error), daemon=True)
            for stream, is_error in ((self.process.stdout, False), (self.process.stderr, True))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[bytes], show: _Show, is_error: bool) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\r\n")
                for shown in self.output.read(line) if is_error else [line]:
                    show(self.line.host, shown, is_error)
        for shown in self.output.close() if is_error else []:
            show(self.line.host, shown, True)

    def send(self, name: str) -> None:
        """Send a signal to the ranks; TERM means SIGTERM."""
        assert self.process.stdin
        with suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(f"{name}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """Ask remaining ranks to stop, by closing the pipe through which signals are sent."""
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill its remaining processes on this machine."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):  # it has just ended
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def has_ended(self) -> bool:
        """Whether it has ended; all its output has been shown then."""
        if self.process.poll() is None:
            return False
        for reader in self._readers:
            reader.join(_LAST_LINES_S)  # a process that outlives it may hold its pipe open
        return True

    @property
    def is_lost(self) -> bool:
        """Whether ssh lost its host."""
        return bool(self.line.ssh) and self.process.returncode == _LOST and not self.output.ends

    @property
    def killed_rank(self) -> RankEnd | None:
        """The rank that was killed, if one was, other than by torchrun after another rank ended."""
        ends = self.output.ends
        by_others = [end for end in ends[:-1] if end.code < 0 and end.code != -signal.SIGTERM]
        return next((end for end in (*ends[-1:], *reversed(by_others)) if end.code < 0), None)

    def find_exit_code(self, *, stop_requested: bool) -> int:
        """The exit code of its ranks. stop_requested: whether they were asked to stop."""
        ended = self.process.returncode
        codes = [end.code for end in self.output.ends if end.code > 0]
        if codes or not ended:
            return max(codes, key=find_precedence, default=0)
        if ended in (1, _LOST) or ended < 0 or ended > 125:  # neither our code nor a rank's
            known = ended == 128 + signal.SIGINT
            return ended if known else EXIT_STOPPED if stop_requested else _NETWORK
        return ended

    def describe_end(self) -> str:
        """How it ended, as far as its ranks have not reported it themselves; else empty."""
        where = f"host {self.line.host}" if self.line.host else self.line.launcher
        if self.is_lost:
            elapsed = time.monotonic() - self._began
            return f"{where}: the connection was lost after {elapsed:.1f} s; all ranks are stopped"
        if self.killed_rank:
            name = signal.Signals(-self.killed_rank.code).name
            return f"{where}: rank {self.killed_rank.rank} was killed by {name}"
        if self.output.failure:
            return f"{where}: torchrun failed: {self.output.failure}"
        return ""


@contextmanager
def _start_lines(lines: Sequence[LaunchLine], show: _Show) -> Iterator[list[_RunningLine]]:
    """All lines, running; whatever still runs when the block ends is killed."""
    started: list[_RunningLine] = []
    try:
        for line in lines:
            started.append(_RunningLine(line, show))
        yield started
    finally:
        for one in started:
            one.close()
        for one in started:
            one.kill()


def _wait_for_end(
    started: Sequence[_RunningLine], signals: list[int], print_line: Callable[[str], None]
) -> int:
    """The exit code of all lines; signals that arrive are forwarded to their ranks."""
    living, codes, passed_on = list(started), [0], 0
    stop_at = kill_at = math.inf
    while living and time.monotonic() < kill_at + _LEAVE_S:
        time.sleep(_POLL_S)
        names = [signal.Signals(number).name.removeprefix("SIG") for number in signals[passed_on:]]
        passed_on += len(names)
        now = time.monotonic()
        if passed_on > 1 and "INT" in names:  # a second Ctrl-C ends ranks at once
            kill_at = min(kill_at, now + _LAST_LINES_S)
        if now >= stop_at:
            names.append("TERM")
            stop_at = math.inf
        if now >= kill_at:
            names.append("KILL")
        for name in names:
            for one in living:
                one.send(name)
        for one in [one for one in living if one.has_ended()]:
            living.remove(one)
            codes.append(one.find_exit_code(stop_requested=bool(signals)))
            failed, stops = codes[-1] not in (0, EXIT_STOPPED), min(stop_at, kill_at) < math.inf
            if not stops and (failed or (one.killed_rank and not signals)):
                print_line(one.describe_end())
            if not stops and failed:
                stop_at = now + _GRACE_S * (not one.is_lost)
                kill_at = stop_at + _LEAVE_S
    return max(codes, key=find_precedence)
