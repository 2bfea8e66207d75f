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
    args: tuple[str, ...]  # after phalanx: train demo ...
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
    args: tuple[str, ...]
    ssh: tuple[str, ...] = ()  # ssh and its options, for another host
    folder: Path

    @property
    def text(self) -> str:
        """The line, ready to paste."""
        return shlex.join(self.build_host_args(self.args))

    def build_host_args(self, args: Sequence[str]) -> list[str]:
        """The arguments that run a command on the host of this line."""
        if not self.ssh:
            return list(args)
        there = f"cd {shlex.quote(str(self.folder))} && exec {shlex.join(args)}"
        return [*self.ssh, self.host, there]


def _find_torchrun() -> list[str]:
    """The arguments that run the torchrun of our own Python.

    An ssh session has no activated environment, so the full path is given.
    """
    script = Path(sys.executable).with_name("torchrun")
    return [str(script)] if script.exists() else [sys.executable, "-m", "torch.distributed.run"]


def _build_torchrun_args(command: RankCommand, node: int) -> list[str]:
    """The torchrun command of one host."""
    address, port = command.master
    args = _find_torchrun()
    args += ["--nnodes", str(command.layout.nodes or 1)]
    args += ["--nproc-per-node", str(command.layout.ranks_per_host)]
    args += ["--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
    return [*args, "-m", "phalanx", *command.args]


def _build_torchrun_lines(command: RankCommand) -> list[LaunchLine]:
    """A line for each host."""
    ssh = ("ssh", *command.ssh_args, *_SSH)  # if an option is given twice, ssh uses the first
    hosts = command.layout.hosts or ("localhost",)
    return [
        LaunchLine(
            launcher="torchrun",
            host=host,
            args=tuple(_with_environment(command, _build_torchrun_args(command, node))),
            ssh=() if is_this_host(host) else ssh,
            folder=command.folder,
        )
        for node, host in enumerate(hosts)
    ]


def build_srun_args(command: RankCommand) -> list[str]:
    """The srun command for all hosts; srun itself forwards the environment."""
    layout = command.layout
    args = ["srun", "--ntasks", str(layout.ranks), "--kill-on-bad-exit=0"]
    if layout.nodes:
        args += ["--nodes", str(layout.nodes), "--ntasks-per-node", str(layout.ranks_per_host)]
    if layout.hosts:
        args += ["--nodelist", ",".join(map(strip_user, layout.hosts))]
    args += ["--label"] * command.tag_output
    return [*args, *_with_environment(command, _build_rank_args(command))]


def _build_srun_lines(command: RankCommand) -> list[LaunchLine]:
    srun, *args = build_srun_args(command)
    # srun has not taken it from the allocation since Slurm 22.05
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    words = (srun, *(("--cpus-per-task", cores) if cores else ()), *args)
    return [LaunchLine(launcher="srun", host="", args=words, folder=command.folder)]


def _build_mpirun_lines(command: RankCommand) -> list[LaunchLine]:
    """One line for all hosts, with Open MPI's options."""
    layout = command.layout
    hosts = layout.hosts or ("localhost",)
    slots = ",".join(f"{strip_user(host)}:{layout.ranks_per_host}" for host in hosts)
    # by default each rank is bound to one core, and so limited to one thread
    args = ["mpirun", "-np", str(layout.ranks), "--host", slots, "--bind-to", "none"]
    args += ["--wdir", str(command.folder)]
    is_root = os.geteuid() == 0 and "--allow-run-as-root" not in command.mpi_args
    args += ["--allow-run-as-root"] * is_root + ["--tag-output"] * command.tag_output
    if not all(map(is_this_host, hosts)):
        ssh = [*command.ssh_args, *_build_user_args(hosts), *_SSH]
        args += ["--mca", "plm_rsh_args", shlex.join(ssh)]
    if command.interface:
        args += [word for key in _MCA_INTERFACES for word in ("--mca", key, command.interface)]
    # mpirun gives ranks a terminal, but nobody watches a progress bar there
    for name, value in {"TERM": "dumb", **list_variables(command)}.items():
        args += ["-x", f"{name}={value}"]
    args = [*args, *command.mpi_args, *_with_interface(command, _build_rank_args(command))]
    return [LaunchLine(launcher="mpirun", host="", args=tuple(args), folder=command.folder)]


def _build_user_args(hosts: Sequence[str]) -> list[str]:
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
    "torchrun": _build_torchrun_lines,
    "srun": _build_srun_lines,
    "mpirun": _build_mpirun_lines,
}
LAUNCHERS = tuple(_LAUNCHERS)


def build_launch_lines(launcher: str, command: RankCommand) -> list[LaunchLine]:
    """The lines that start all ranks; they must run at the same time."""
    return _LAUNCHERS[launcher](command)


def build_probe(line: LaunchLine) -> list[str]:
    """The arguments that check whether another host has our folder and our Python."""
    folder, python = shlex.quote(str(line.folder)), shlex.quote(sys.executable)
    return [*line.ssh, line.host, f"cd {folder} || exit 3; test -x {python} || exit 4"]


def build_probe_lines(command: RankCommand) -> list[LaunchLine]:
    """Lines that check the hosts which mpirun reaches through ssh."""
    return [line for line in _build_torchrun_lines(command) if line.ssh]


def _build_rank_args(command: RankCommand) -> list[str]:
    return [sys.executable, "-m", "phalanx", *command.args]


def list_variables(command: RankCommand) -> dict[str, str]:
    """The environment variables of the ranks; two of them name the interface."""
    named = command.interface is not None and "/" not in command.interface
    interface = dict.fromkeys((_GLOO, _NCCL), command.interface or "") if named else {}
    return {**interface, **command.variables}


def _with_environment(command: RankCommand, args: Sequence[str]) -> list[str]:
    """The arguments, preceded by the variables of -x."""
    pairs = [f"{name}={value}" for name, value in list_variables(command).items()]
    return [*(["env", *pairs] if pairs else []), *_with_interface(command, args)]


def _with_interface(command: RankCommand, args: Sequence[str]) -> list[str]:
    """The arguments; if the interface is given as a subnet, preceded by a lookup of its name."""
    if command.interface is None or "/" not in command.interface:
        return list(args)
    script = _FIND_INTERFACE.format(subnet=shlex.quote(command.interface))
    return ["sh", "-c", script, "sh", *args]
