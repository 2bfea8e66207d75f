"""`phalanx launch`: starts a command on ranks of one or several hosts, by another launcher."""

import os
import shlex
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import REGISTERED_COMMANDS, Argument, ParsedArgs, command, parse_args
from phalanx.disk import write_atomically
from phalanx.errors import ConfigError, suggest
from phalanx.launch.arguments import LaunchArguments, parse_launch_arguments
from phalanx.launch.command_lines import (
    LAUNCHERS,
    RankCommand,
    build_launch_lines,
    build_probe_lines,
)
from phalanx.launch.hosts import (
    HostLayout,
    check_instances,
    count_devices_per_replica,
    is_this_host,
    make_host_layout,
    parse_hosts,
    strip_user,
)
from phalanx.launch.job_files import JOB_FILES, Job, format_job_file
from phalanx.launch.run import refuse_missing_programs, refuse_unreachable, run_lines
from phalanx.plan.pipeline import count_stages, plan_pipeline
from phalanx.report.terminal import discard_output, escape_text, raw_stream
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.config.read import Settings

# commands that ranks can run
_INNER = ("train", "validate", "bench train", "bench infer", "bench overhead", "bench determinism")
_TRAIN = ("train", "bench train")
_ALONE = ("bench overhead", "bench determinism")  # which measure one device
_PORT, _HIGHEST_PORT = 29_500, 65_535  # torchrun's own
_MOST = 100_000


@command(
    "launch",
    "Run train, validate, bench train or bench infer on several devices of several hosts: starts "
    "torchrun on every host, by ssh on others, or srun or mpirun, passes on their output and "
    "signals, and ends with the exit code of the ranks.",
    Argument("--num-replicas", "Copies of the model; train gets it as --replicas."),
    Argument(
        "--devices-per-replica",
        "Devices that share a copy; train gets it as --shards.  [one for each of its stages]",
    ),
    Argument(
        "--num-devices", "The same as a total: the number of devices of all replicas together."
    ),
    Argument(
        "--num-instances",
        "What an older launcher called its processes; here every device has a process. Counts as "
        "--num-replicas if that is not given.",
    ),
    Argument("--host", "Names or addresses of hosts, with commas; ranks meet at the first."),
    Argument("--nodes", "How many hosts, if Slurm or Kubernetes chooses them."),
    Argument(
        "-x",
        "Environment variable for the ranks, with its current value or this one.",
        metavar="-x NAME[=VALUE]",
    ),
    Argument("--tag-output", "Begin every line with the host or rank it is from.", switch=True),
    Argument("--launcher", "torchrun, srun or mpirun.  [srun in a Slurm job, else torchrun]"),
    Argument("--interface", "Network interface that ranks use, or a subnet: 10.1.3.0/24."),
    Argument("--master-addr", "torchrun: where ranks meet.  [the first host]"),
    Argument("--master-port", "torchrun: the port there.  [29500; on one host a free one]"),
    Argument("--ssh-args", 'Options for ssh, as one word: "-p 2222 -i KEY".'),
    Argument("--dry-run", "Print the commands that would be started, and stop.", switch=True),
    Argument(
        "--write",
        "Write a job file instead of starting anything: sbatch FILE or pytorchjob FILE.",
        metavar="--write KIND FILE",
        many=True,
    ),
    Argument("--image", "The container image of a PyTorchJob.  [phalanx:latest]"),
    usage="--num-replicas R [--devices-per-replica D] [--host H1,H2] [-x NAME[=VALUE]]... "
    "[--dry-run | --write KIND FILE] -- train|validate|bench ...",
    examples={
        "phalanx launch --num-replicas 4 -- train imagenet-resnet50 --data-dir ~/imagenet": (
            "four GPUs of this machine, by torchrun"
        ),
        "phalanx launch --num-replicas 16 --host node1,node2 -x PYTHONPATH -- train demo": (
            "eight devices on each of two hosts, by ssh"
        ),
        "phalanx launch --num-replicas 4 --host node1,node2 --dry-run -- validate runs/demo": (
            "only the lines, ready to paste"
        ),
        "phalanx launch --num-replicas 4 --launcher mpirun --host node1,node2 -- train demo": (
            "by Open MPI"
        ),
        "phalanx launch --num-replicas 8 --nodes 2 --write sbatch demo.sh -- train demo": (
            "a Slurm job that continues after preemption; sbatch demo.sh submits it"
        ),
    },
    takes_command=True,
)
def _run(args: ParsedArgs) -> int:
    """Check everything, then run the command lines, print them, or write a job file."""
    words = parse_launch_arguments(args.words, os.environ)
    own = parse_args(REGISTERED_COMMANDS["launch"], words.own)
    own.refuse_problems()
    inner = _read_inner(words.command)
    launcher = _choose_launcher(own)
    layout = _read_layout(own, launcher, inner, words.notes)
    rank_command = RankCommand(
        layout=layout,
        args=_complete_inner(inner, layout, words),
        folder=Path.cwd(),
        variables=words.variables,
        interface=own["--interface"] or words.interface,
        tag_output=own["--tag-output"] or words.tag_output,
        ssh_args=tuple(_split_ssh_args(own["--ssh-args"] or "")),
        mpi_args=tuple(words.mpi_args),
        master=_choose_master(own, layout),
    )
    if words.mpi_args and launcher != "mpirun":
        text = shlex.join(words.mpi_args)
        words.notes.append(f"{text}: is for --launcher mpirun and was left out")
    for note in words.notes:
        print(f"note: {note}", file=sys.stderr)
    if own["--write"]:
        _write_file(own["--write"], _describe_job(own, inner, rank_command, args.line))
        return 0
    return _start(launcher, rank_command, dry_run=own["--dry-run"])


@dataclass(frozen=True)
class _InnerCommand:
    """The command after --, parsed."""

    name: str
    args: ParsedArgs
    settings: "Settings | None"  # if they are known before it starts

    @property
    def stages(self) -> int:
        """The devices of each replica, by its settings."""
        trains = self.name in _TRAIN and self.settings is not None
        return count_stages(self.settings.config) if trains and self.settings else 1

    @property
    def device(self) -> str:
        """The device in its settings or flags."""
        return (
            self.settings.config.machine.device if self.settings else self.flags.get("device", "")
        )

    @property
    def flags(self) -> Mapping[str, str]:
        """The options of a run among its words."""
        return self.args.flags


def _read_inner(words: Sequence[str]) -> _InnerCommand:
    """The command after --, parsed and checked as it would parse and check itself."""
    pair, first = " ".join(words[:2]), words[0] if words else ""
    name = next((known for known in (pair, first) if known in _INNER), None)
    if name is None:
        what = (
            f"{first!r} is not a command for launch" if first else "a command is missing after --"
        )
        raise ConfigError(f"{what}; {suggest(first, _INNER)}")
    from phalanx.cli.main import load_command

    args = parse_args(load_command(name), words[len(name.split()) :])
    settings = None
    if name in ("bench determinism", "bench train") or (
        name == "train" and not (args["--resume"] or args["--fork"])
    ):
        settings = args.read_settings()
    else:
        args.refuse_problems()
    return _InnerCommand(name, args, settings)


def _complete_inner(
    inner: _InnerCommand, layout: HostLayout, words: LaunchArguments
) -> tuple[str, ...]:
    """The command's words, with the options that follow from those of launch."""
    added: dict[str, str] = {}
    is_resumed = inner.name == "train" and inner.args["--resume"]
    if inner.name in _TRAIN and not is_resumed:  # a run keeps its replicas
        added["replicas"] = str(layout.replicas)
        if layout.devices_per_replica != inner.stages:
            added["shards"] = str(layout.devices_per_replica)
    if words.timeout is not None and inner.name not in _ALONE:
        added["rank-timeout"] = words.timeout
    more = [(f"--{name}", text) for name, text in added.items() if name not in inner.flags]
    return (*words.command, *(word for pair in more for word in pair))


def _choose_launcher(own: ParsedArgs) -> str:
    """The launcher that was asked for, else srun in a Slurm job, else torchrun."""
    asked = own["--launcher"]
    if asked is None:
        return "srun" if "SLURM_JOB_ID" in os.environ else "torchrun"
    if asked not in LAUNCHERS:
        raise ConfigError(f"--launcher {asked}: no such launcher; {suggest(asked, LAUNCHERS)}")
    return str(asked)


def _choose_devices(asked: int | None, option: str, inner: _InnerCommand) -> int:
    """The devices of a replica: as asked, if its stages fit, else one for each stage."""
    if inner.settings is None or inner.name not in _TRAIN:
        return asked or 1
    pipeline = plan_pipeline(inner.settings.config, accumulation=None)
    if asked in (None, inner.stages):
        return inner.stages
    assert asked is not None
    if "shards" in inner.flags:
        raise ConfigError(
            f"{option}: the command has --shards {inner.stages}; leave one of the two out"
        )
    if pipeline and asked not in (1, pipeline.stages):
        raise ConfigError(
            f"{option}: the command's splits make {pipeline.stages} stages; give "
            f"--devices-per-replica {pipeline.stages}, or 1 to run all stages on one device, or "
            f"--pipeline-splits none after -- for {asked} stages of about the same cost"
        )
    return asked


def _read_layout(
    own: ParsedArgs, launcher: str, inner: _InnerCommand, notes: list[str]
) -> HostLayout:
    """The number of ranks, and their hosts."""

    def number(flag: str) -> int | None:
        return own.read_optional_int(flag, 1, _MOST)

    hosts = parse_hosts(own["--host"]) if own["--host"] is not None else ()
    instances, replicas = number("--num-instances"), number("--num-replicas")
    replicas = replicas or instances
    if replicas is None:
        raise ConfigError(
            "--num-replicas: say how many copies of the model to run, one per device; "
            "--devices-per-replica spreads each over several"
        )
    devices, total = number("--devices-per-replica"), number("--num-devices")
    if devices and total and devices * replicas != total:
        raise ConfigError(
            f"--num-devices {total}: {replicas} replicas of {devices} devices make "
            f"{replicas * devices}; leave one of the two out"
        )
    option = f"--devices-per-replica {devices}" if devices else f"--num-devices {total}"
    devices = devices or (count_devices_per_replica(total, replicas) if total else None)
    devices = _choose_devices(devices, option, inner)
    if inner.name in _ALONE and replicas * devices > 1:
        raise ConfigError(
            f"{inner.name}: measures one device; give --num-replicas 1, or measure several with "
            "bench train"
        )
    nodes = number("--nodes")
    if hosts and nodes not in (None, len(hosts)):
        raise ConfigError(f"--nodes {nodes}: --host names {len(hosts)}; leave --nodes out")
    layout = make_host_layout(
        hosts=hosts,
        nodes=len(hosts) or nodes or _count_nodes(own, launcher),
        replicas=replicas,
        devices_per_replica=devices,
    )
    if instances is not None:
        check_instances(instances, replicas)
        if instances != layout.ranks:
            ranks = format_plural(layout.ranks, "rank")
            notes.append(
                f"--num-instances {instances}: every device has a process here: {ranks} start"
            )
    if (layout.nodes or 1) > 1 and not (hosts or own["--write"] or launcher == "srun"):
        raise ConfigError(f"--nodes {nodes}: {launcher} must know the hosts; name them with --host")
    return layout


def _count_nodes(own: ParsedArgs, launcher: str) -> int | None:
    """The number of hosts if no option gives it; None outside of a Slurm job that knows it."""
    if launcher != "srun" or own["--write"]:
        return 1
    text = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdecimal() else None


def _split_ssh_args(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--ssh-args: {error} in {text!r}") from None


def _choose_master(own: ParsedArgs, layout: HostLayout) -> tuple[str, int]:
    """The address and port where torchrun's ranks meet: a name that the other hosts know."""
    first = strip_user(layout.hosts[0]) if layout.hosts else "127.0.0.1"
    alone = (layout.nodes or 1) == 1
    if own["--master-addr"]:
        first = own["--master-addr"]
    elif alone and is_this_host(first):
        first = "127.0.0.1"
    elif not alone and first in ("localhost", "127.0.0.1"):
        first = socket.gethostname()
    if own["--master-port"] is not None:
        return first, own.read_int("--master-port", 1, _HIGHEST_PORT, noun="a port")
    if not alone or first != "127.0.0.1":
        return first, _PORT
    with socket.create_server(("127.0.0.1", 0)) as server:  # another run may use torchrun's own
        return first, int(server.getsockname()[1])


def _start(launcher: str, rank_command: RankCommand, *, dry_run: bool) -> int:
    """Print the command lines, or run them to their end."""
    lines = build_launch_lines(launcher, rank_command)
    if dry_run:
        for line in lines:
            print(line.text)
        if len(lines) > 1:
            print("note: these lines must run at the same time", file=sys.stderr)
        return 0
    refuse_missing_programs(lines)
    refuse_unreachable(build_probe_lines(rank_command) if launcher == "mpirun" else lines)
    lock = threading.Lock()
    tags = rank_command.tag_output and launcher == "torchrun"  # the others have an option for it

    def show(host: str, text: str, is_error: bool) -> None:
        stream = raw_stream(sys.stderr if is_error else sys.stdout)
        with lock:
            try:
                print(escape_text(f"[{host}] {text}" if tags else text), file=stream, flush=True)
            except OSError:  # the output was closed: the ranks continue silently
                discard_output(stream)

    def print_line(text: str) -> None:
        if text:
            show("launch", f"phalanx launch: {text}", True)

    return run_lines(lines, show=show, print_line=print_line)


def _describe_job(
    own: ParsedArgs, inner: _InnerCommand, rank_command: RankCommand, line: str
) -> Job:
    """The job to write to a file for a scheduler."""
    kind = own["--write"][0]
    if len(own["--write"]) != 2 or kind not in JOB_FILES:
        raise ConfigError(
            f"--write {' '.join(own['--write'])}: expected {' or '.join(JOB_FILES)} and the name "
            "of a file, as in: --write sbatch job.sh"
        )
    trains = inner.name == "train"
    resumed = trains and inner.args["--resume"]
    preset = inner.args.preset_name if trains else None
    return Job(
        command=rank_command,
        name=f"phalanx-{Path(preset or inner.name).stem}",
        line=escape_text(line).replace("\n", " "),
        run_dir=inner.flags.get("run-dir"),
        resumes=trains and not resumed,
        plugin=inner.flags.get("plugin"),
        uses_gpus=not inner.device.startswith("cpu"),
        image=own["--image"] or "phalanx:latest",
    )


def _write_file(write: Sequence[str], job: Job) -> None:
    """Write the file, unless it exists, and print the command that submits it."""
    kind, path = write[0], Path(write[1])
    if path.exists():
        raise ConfigError(f"--write {kind} {path}: exists already; remove it, or name another file")
    write_atomically(path, format_job_file(kind, job))
    submit = {"sbatch": "sbatch", "pytorchjob": "kubectl apply -f"}[kind]
    print(f"wrote {path}; submit it with: {submit} {shlex.quote(str(path))}")
