"""Files for schedulers: a batch script for Slurm, a PyTorchJob for Kubernetes."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml

from phalanx.catalog.plugins import format_plugin_flag
from phalanx.errors import EXIT_STOPPED, ConfigError
from phalanx.launch.command_lines import RankCommand, build_srun_args, list_variables
from phalanx.launch.hosts import strip_user

_CORES_PER_GPU = 8  # Slurm's default is one, which cannot read enough images
_SAVE_S = 120  # between the warning and the end, to write a checkpoint
# srun has not taken the number from the job since Slurm 22.05
_PASS_CORES = '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that a scheduler restarts until it is done."""

    command: RankCommand
    name: str
    line: str  # the command that writes the file
    run_dir: str | None = None  # where training continues; None if the job may choose
    resumes: bool = False  # training continues where it stopped
    plugin: str | None = None  # must be given again on resume
    uses_gpus: bool = True
    image: str = "phalanx:latest"


def _format_sbatch(job: Job) -> str:
    """A batch script; training that is preempted saves, is requeued, and continues."""
    layout, name = job.command.layout, _make_job_name(job.name)
    options = {
        "job-name": name,
        "nodes": layout.nodes,
        "ntasks-per-node": layout.ranks_per_host,
        "nodelist": ",".join(map(strip_user, layout.hosts)) or None,
        "gpus-per-node": layout.ranks_per_host if job.uses_gpus else None,
        "cpus-per-task": _CORES_PER_GPU if job.uses_gpus else None,
        "time": "24:00:00",
        "output": f"{name}-%j.log",
    }
    if job.resumes:
        options |= {"signal": f"B:TERM@{_SAVE_S}", "requeue": "", "open-mode": "append"}
    heads = [
        f"#SBATCH --{option}{f'={value}' if value else ''}"
        for option, value in options.items()
        if value is not None
    ]
    # the arguments of train are assembled when the job starts
    command = replace(job.command, args=() if job.resumes else job.command.args)
    srun = shlex.join(build_srun_args(command))
    body = _resume_and_requeue(job, srun, f"runs/{name}-$SLURM_JOB_ID") if job.resumes else [srun]
    folder = f"cd {shlex.quote(str(job.command.folder))} || exit"
    return "\n".join(["#!/bin/bash", *heads, f"# {job.line}", "", folder, _PASS_CORES, *body, ""])


def _resume_and_requeue(job: Job, srun: str, run_dir: str) -> list[str]:
    """The lines that start or resume training, and requeue the job until it is done."""
    run = f'"{run_dir}"' if job.run_dir is None else shlex.quote(job.run_dir)
    return [
        f"run={run}",
        f"words=({_choose_args(job)[0]})",
        f'[ -e "$run/run.json" ] && words=({_choose_args(job)[1]})',
        "",
        "# before preemption and the end of the time: SIGTERM to srun would kill its tasks, so the",
        f"# step gets it, saves and ends with code {EXIT_STOPPED}",
        "asked=",
        "trap 'asked=1; scancel -s TERM \"$SLURM_JOB_ID.0\"' TERM",
        f'{srun} "${{words[@]}}" &',
        "step=$!",
        'wait "$step"',
        "code=$?",
        'while [ -n "$asked" ]; do  # a signal ends the wait, not the step',
        "    asked=",
        '    wait "$step"',
        "    code=$?",
        "done",
        f'[ "$code" -eq {EXIT_STOPPED} ] && scontrol requeue "$SLURM_JOB_ID"',
        'exit "$code"',
    ]


def _choose_args(job: Job) -> tuple[str, str]:
    """The arguments of the first start of training, and of later ones, quoted for a shell."""
    given = shlex.join(job.command.args)
    again = f'train --resume "$run"{format_plugin_flag(job.plugin)}'
    return given if job.run_dir else f'{given} --run-dir "$run"', again


def _format_pytorchjob(job: Job) -> str:
    """A manifest for Kubeflow's training operator: a pod for each host, restarted on failure."""
    layout, name = job.command.layout, _make_job_name(job.name)
    workers = (layout.nodes or 1) - 1
    pods = {"Master": _describe_pods(job, 1)}
    if workers:
        pods["Worker"] = _describe_pods(job, workers)
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "runPolicy": {"backoffLimit": 10, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": pods,
        },
    }
    head = [
        f"# {job.line}",
        "# Fit the image and the claim to your cluster; the claim holds the data and the runs, and",
        "# every pod mounts it. Then: kubectl apply -f FILE",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(manifest, sort_keys=False, width=10_000)


def _describe_pods(job: Job, count: int) -> dict[str, Any]:
    """`count` pods that all run the same command; the operator gives each its rank."""
    command, layout = job.command, job.command.layout
    if command.interface and "/" in command.interface:
        raise ConfigError(
            f"--interface {command.interface}: a pod's interface is known by its name, often eth0; "
            "give that"
        )
    container: dict[str, Any] = {
        "name": "pytorch",  # the name that the operator requires
        "image": job.image,
        "workingDir": str(command.folder),
        "command": ["sh", "-c", _format_pod_script(job)],
        "env": [{"name": name, "value": text} for name, text in list_variables(command).items()],
        "volumeMounts": [
            {"name": "work", "mountPath": str(command.folder)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if job.uses_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": layout.ranks_per_host}}
    volumes = [
        {"name": "work", "persistentVolumeClaim": {"claimName": _make_job_name(job.name)}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # workers pass batches through it
    ]
    pod = {
        "terminationGracePeriodSeconds": _SAVE_S,
        "containers": [container],
        "volumes": volumes,
    }
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _format_pod_script(job: Job) -> str:
    """The script of every pod; training continues where it stopped."""
    layout = job.command.layout
    nodes = f"--nnodes {layout.nodes or 1} --nproc-per-node {layout.ranks_per_host}"
    meeting = '--node-rank "$RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
    torchrun = f"exec torchrun {nodes} {meeting} -m phalanx"
    if not job.resumes:
        return f"{torchrun} {shlex.join(job.command.args)}"
    first, again = _choose_args(job)
    run = shlex.quote(job.run_dir or f"runs/{_make_job_name(job.name)}")
    return (
        f'run={run}; if [ -e "$run/run.json" ]; then set -- {again}; else set -- {first}; fi; '
        f'{torchrun} "$@"'
    )


def _make_job_name(name: str) -> str:
    """A name that Slurm and Kubernetes accept.

    >>> _make_job_name("My_preset.yaml")
    'my-preset-yaml'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "phalanx"


_KINDS: dict[str, Callable[[Job], str]] = {
    "sbatch": _format_sbatch,
    "pytorchjob": _format_pytorchjob,
}
JOB_FILES = tuple(_KINDS)


def format_job_file(kind: str, job: Job) -> str:
    """The text of a file for a scheduler."""
    return _KINDS[kind](job)
