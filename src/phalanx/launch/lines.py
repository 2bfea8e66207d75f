"""Command lines of torchrun, srun and mpirun that start the ranks of a command."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.launch.hosts import HostLayout, is_this_host, strip_user

CONNECT_S = 10
_SSH = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=15")
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_MCA_INTERFACES = ("btl_tcp_if_include", "oob_tcp_if_include")
# interface names differ between hosts, so each host finds its own
_FIND_INTERFACE = (
    'i=$(ip -o addr show to {subnet} | {{ read -r _ i _; echo "$i"; }}); [ -n "$i" ] || '
    '{{ echo "phalanx launch: $(uname -n) has no address in {subnet}" >&2; exit 8; }}; '
    f'exec env {_GLOO}="$i" {_NCCL}="$i" "$@"'
)


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """A phalanx command that ranks run, and the settings of the launcher."""

    layout: HostLayout
    words: tuple[str, ...]  # after phalanx: train demo ...
    folder: Path  # on every host
    variables: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None  # a name, or a subnet such as 10.1.3.0/24
    tag_output: bool = False
    ssh_args: tuple[str, ...] = ()
    mpi_args: tuple[str, ...] = ()
    master: tuple[str, int] = ("127.0.0.1", 29_500)


@dataclass(frozen=True, kw_only=True)
class LaunchLine:
    """One command of a launcher, on this host or, through ssh, on another one."""

    launcher: str
    host: str
    words: tuple[str, ...]
    ssh: tuple[str, ...] = ()  # ssh and its options, for another host
    folder: Path

    @property
    def text(self) -> str:
        """The line, ready to paste."""
        return shlex.join(self.start_words(self.words))

    def start_words(self, words: Sequence[str]) -> list[str]:
        """The arguments that run a command on the host of this line."""
        if not self.ssh:
            return list(words)
        there = f"cd {shlex.quote(str(self.folder))} && exec {shlex.join(words)}"
        return [*self.ssh, self.host, there]


def _find_torchrun() -> list[str]:
    """The arguments that run the torchrun of our own Python.

    An ssh session has no activated environment, so the full path is given.
    """
    script = Path(sys.executable).with_name("torchrun")
    return [str(script)] if script.exists() else [sys.executable, "-m", "torch.distributed.run"]


def _write_torchrun_words(command: RankCommand, node: int) -> list[str]:
    """The torchrun command of one host."""
    address, port = command.master
    words = _find_torchrun()
    words += ["--nnodes", str(command.layout.nodes or 1)]
    words += ["--nproc-per-node", str(command.layout.ranks_per_host)]
    words += ["--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
    return [*words, "-m", "phalanx", *command.words]


def _write_torchrun(command: RankCommand) -> list[LaunchLine]:
    """A line for each host."""
    ssh = ("ssh", *command.ssh_args, *_SSH)  # if an option is given twice, ssh uses the first
    hosts = command.layout.hosts or ("localhost",)
    return [
        LaunchLine(
            launcher="torchrun",
            host=host,
            words=tuple(_with_environment(command, _write_torchrun_words(command, node))),
            ssh=() if is_this_host(host) else ssh,
            folder=command.folder,
        )
        for node, host in enumerate(hosts)
    ]


def write_srun_words(command: RankCommand) -> list[str]:
    """The srun command for all hosts; srun itself forwards the environment."""
    layout = command.layout
    words = ["srun", "--ntasks", str(layout.ranks), "--kill-on-bad-exit=0"]
    if layout.nodes:
        words += ["--nodes", str(layout.nodes), "--ntasks-per-node", str(layout.ranks_per_host)]
    if layout.hosts:
        words += ["--nodelist", ",".join(map(strip_user, layout.hosts))]
    words += ["--label"] * command.tag_output
    return [*words, *_with_environment(command, _write_rank(command))]


def _write_srun(command: RankCommand) -> list[LaunchLine]:
    words = tuple(write_srun_words(command))
    return [LaunchLine(launcher="srun", host="", words=words, folder=command.folder)]


def _write_mpirun(command: RankCommand) -> list[LaunchLine]:
    """One line for all hosts, with Open MPI's options."""
    layout = command.layout
    hosts = layout.hosts or ("localhost",)
    slots = ",".join(f"{strip_user(host)}:{layout.ranks_per_host}" for host in hosts)
    # by default each rank is bound to one core, and so limited to one thread
    words = ["mpirun", "-np", str(layout.ranks), "--host", slots, "--bind-to", "none"]
    words += ["--wdir", str(command.folder)]
    is_root = os.geteuid() == 0 and "--allow-run-as-root" not in command.mpi_args
    words += ["--allow-run-as-root"] * is_root + ["--tag-output"] * command.tag_output
    if not all(map(is_this_host, hosts)):
        ssh = [*command.ssh_args, *_write_user(hosts), *_SSH]
        words += ["--mca", "plm_rsh_args", shlex.join(ssh)]
    if command.interface:
        words += [word for key in _MCA_INTERFACES for word in ("--mca", key, command.interface)]
    # mpirun gives ranks a terminal, but nobody watches a progress bar there
    for name, value in {"TERM": "dumb", **list_variables(command)}.items():
        words += ["-x", f"{name}={value}"]
    words = [*words, *command.mpi_args, *_with_interface(command, _write_rank(command))]
    return [LaunchLine(launcher="mpirun", host="", words=tuple(words), folder=command.folder)]


def _write_user(hosts: Sequence[str]) -> list[str]:
    """The ssh user of the hosts: mpirun does not accept one in a host name."""
    users = {host.rpartition("@")[0] for host in hosts if not is_this_host(host)}
    if len(users) > 1:
        raise ConfigError(
            f"--host {','.join(hosts)}: mpirun logs in to all hosts as one user; give every host "
            "the same one, or name the users in ~/.ssh/config"
        )
    return ["-l", *users] if any(users) else []


_Writer = Callable[[RankCommand], list[LaunchLine]]
_LAUNCHERS: dict[str, _Writer] = {
    "torchrun": _write_torchrun,
    "srun": _write_srun,
    "mpirun": _write_mpirun,
}
LAUNCHERS = tuple(_LAUNCHERS)


def write_lines(launcher: str, command: RankCommand) -> list[LaunchLine]:
    """The lines that start all ranks; they must run at the same time."""
    return _LAUNCHERS[launcher](command)


def write_probe(line: LaunchLine) -> list[str]:
    """The arguments that check whether another host has our folder and our Python."""
    folder, python = shlex.quote(str(line.folder)), shlex.quote(sys.executable)
    return [*line.ssh, line.host, f"cd {folder} || exit 3; test -x {python} || exit 4"]


def write_probe_lines(command: RankCommand) -> list[LaunchLine]:
    """Lines that check the hosts which mpirun reaches through ssh."""
    return [line for line in _write_torchrun(command) if line.ssh]


def _write_rank(command: RankCommand) -> list[str]:
    return [sys.executable, "-m", "phalanx", *command.words]


def list_variables(command: RankCommand) -> dict[str, str]:
    """The environment variables of the ranks; two of them name the interface."""
    named = command.interface is not None and "/" not in command.interface
    interface = dict.fromkeys((_GLOO, _NCCL), command.interface or "") if named else {}
    return {**interface, **command.variables}


def _with_environment(command: RankCommand, words: Sequence[str]) -> list[str]:
    """The arguments, preceded by the variables of -x."""
    pairs = [f"{name}={value}" for name, value in list_variables(command).items()]
    return [*(["env", *pairs] if pairs else []), *_with_interface(command, words)]


def _with_interface(command: RankCommand, words: Sequence[str]) -> list[str]:
    """The arguments; if the interface is given as a subnet, preceded by a lookup of its name."""
    if command.interface is None or "/" not in command.interface:
        return list(words)
    script = _FIND_INTERFACE.format(subnet=shlex.quote(command.interface))
    return ["sh", "-c", script, "sh", *words]
