"""Files for schedulers: the script is run by bash with programs that stand for Slurm's."""

import shlex
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from phalanx.errors import ConfigError
from phalanx.launch.command_lines import RankCommand
from phalanx.launch.hosts import make_host_layout
from phalanx.launch.job_files import Job, format_job_file


def make_job(folder: Path = Path("/work"), **more: object) -> Job:
    layout = make_host_layout(hosts=(), nodes=2, replicas=4, devices_per_replica=2)
    words = ("train", "demo", "--data-dir", "my data")
    command = RankCommand(layout=layout, args=words, folder=folder, variables={"A": "it's"})
    given: dict = {"command": command, "name": "phalanx-demo", "line": "phalanx launch ..."}
    return Job(**{**given, "resumes": True, **more})


# --- Slurm ---


def test_the_script_asks_slurm_for_what_the_ranks_need():
    heads = [
        text for text in format_job_file("sbatch", make_job()).splitlines() if "#SBATCH" in text
    ]
    assert heads == [
        f"#SBATCH --{option}"
        for option in (
            *("job-name=phalanx-demo", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4"),
            *(
                "cpus-per-task=8",
                "time=24:00:00",
                "output=phalanx-demo-%j.log",
                "signal=B:TERM@120",
                "requeue",
            ),
            "open-mode=append",
        )
    ]
    on_cpus = format_job_file("sbatch", make_job(uses_gpus=False))
    assert "gpus" not in on_cpus and "--cpus" not in on_cpus


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("run_dir", [None, "runs/it's mine"])
def test_bash_can_read_the_script(tmp_path, resumes, run_dir):
    script = tmp_path / "job.sh"
    script.write_text(format_job_file("sbatch", make_job(resumes=resumes, run_dir=run_dir)))
    subprocess.run(["bash", "-n", script], check=True)


class Slurm:
    """Programs of Slurm's names that note how they were called."""

    def __init__(self, folder: Path, srun: str) -> None:
        self.folder, self.calls = folder, folder / "calls"
        programs = {
            # the words end with the first start's or the resume's; scancel signals it by its pid
            "srun": f"echo $$ > {folder}/step; {srun}",
            "scancel": f'kill -s "$2" "$(cat {folder}/step)"',
            "scontrol": "true",
        }
        for name, text in programs.items():
            path = folder / name
            note = f'printf "%s " {name} "$@" >> {self.calls}; echo >> {self.calls}'
            path.write_text(f"#!/bin/bash\n{note}\n{text}\n")
            path.chmod(0o700)

    def start(self, script: str, **variables: str) -> "subprocess.Popen[bytes]":
        (self.folder / "job.sh").write_text(script)
        own = {"PATH": f"{self.folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        return subprocess.Popen(["bash", self.folder / "job.sh"], env=own | variables)

    def read_calls(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


def test_a_preempted_job_saves_and_is_requeued(tmp_path):
    saves = "trap 'kill $p; sleep 0.2; exit 75' TERM; sleep 60 & p=$!; touch ready; wait"
    slurm = Slurm(tmp_path, saves)
    job = slurm.start(format_job_file("sbatch", make_job(tmp_path)))
    deadline = time.monotonic() + 10
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.terminate()
    assert job.wait(timeout=10) == 75
    srun, scancel, scontrol = slurm.read_calls()
    assert srun.endswith("train demo --data-dir my data --run-dir runs/phalanx-demo-7 ")
    assert " --ntasks 8 " in srun and " --ntasks-per-node 4 " in srun and " env A=it's " in srun
    assert scancel == "scancel -s TERM 7.0 " and scontrol == "scontrol requeue 7 "


def test_the_requeued_job_resumes_its_run_and_ends(tmp_path):
    run = tmp_path / "runs" / "phalanx-demo-7"
    run.mkdir(parents=True)
    (run / "run.json").touch()
    slurm = Slurm(tmp_path, "exit 0")
    assert slurm.start(format_job_file("sbatch", make_job(tmp_path))).wait(timeout=10) == 0
    (srun,) = slurm.read_calls()
    assert srun.endswith(" -m phalanx train --resume runs/phalanx-demo-7 ")


@pytest.mark.parametrize("cores", ["16", ""])
def test_tasks_get_the_cores_that_the_job_has(tmp_path, cores):
    slurm = Slurm(tmp_path, f'echo "${{SRUN_CPUS_PER_TASK-none}}" > {tmp_path}/cores')
    given = {"SLURM_CPUS_PER_TASK": cores} if cores else {}
    assert slurm.start(format_job_file("sbatch", make_job()), **given).wait(timeout=10) == 0
    assert (tmp_path / "cores").read_text() == f"{cores or 'none'}\n"


def test_the_user_of_ssh_is_no_part_of_a_node_of_slurm():
    layout = make_host_layout(hosts=("al@n1", "n2"), nodes=2, replicas=4, devices_per_replica=1)
    command = RankCommand(layout=layout, args=("train",), folder=Path("/work"))
    text = format_job_file("sbatch", make_job(command=command))
    assert "#SBATCH --nodelist=n1,n2\n" in text and "al@" not in text


def test_a_plugin_is_named_again_at_every_resume(tmp_path):
    job = make_job(tmp_path, plugin="mine,theirs")
    for run in ("phalanx-demo-7", "phalanx-demo"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "run.json").touch()
    slurm = Slurm(tmp_path, "exit 0")
    assert slurm.start(format_job_file("sbatch", job)).wait(timeout=10) == 0
    (srun,) = slurm.read_calls()
    assert srun.endswith(" train --resume runs/phalanx-demo-7 --plugin mine,theirs ")
    pod = ["train", "--resume", "runs/phalanx-demo", "--plugin", "mine,theirs"]
    assert run_pod(job, tmp_path)[-5:] == pod


@pytest.mark.parametrize("code", [2, 8])
def test_a_job_that_fails_is_not_requeued(tmp_path, code):
    slurm = Slurm(tmp_path, f"exit {code}")
    assert slurm.start(format_job_file("sbatch", make_job(tmp_path))).wait(timeout=10) == code
    assert len(slurm.read_calls()) == 1


# --- Kubernetes ---


def test_the_manifest_has_a_pod_for_each_host():
    manifest = yaml.safe_load(format_job_file("pytorchjob", make_job(image="mine:1")))
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert manifest["metadata"]["name"] == "phalanx-demo"
    pods = manifest["spec"]["pytorchReplicaSpecs"]
    assert {name: pod["replicas"] for name, pod in pods.items()} == {"Master": 1, "Worker": 1}
    for pod in pods.values():
        assert pod["restartPolicy"] == "OnFailure"
        (container,) = pod["template"]["spec"]["containers"]
        assert (container["name"], container["image"]) == ("pytorch", "mine:1")
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
        assert container["env"] == [{"name": "A", "value": "it's"}]
        assert container["command"][:2] == ["sh", "-c"] and len(container["command"]) == 3


def run_pod(job: Job, folder: Path) -> list[str]:
    """The words that torchrun gets in a pod."""
    manifest = yaml.safe_load(format_job_file("pytorchjob", job))
    pod = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (folder / "torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / "torchrun").chmod(0o700)
    told = {"RANK": "0", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
    done = subprocess.run(
        pod["containers"][0]["command"],
        env={"PATH": f"{folder}:/usr/bin:/bin", **told},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_pod_starts_torchrun_and_resumes_what_is_there(tmp_path):
    options = "--nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr pod-0 --master-port 23456"
    begin = [*options.split(), "-m", "phalanx"]
    train = ["train", "demo", "--data-dir", "my data"]
    given = [*train, "--run-dir", "runs/phalanx-demo"]
    assert run_pod(make_job(), tmp_path) == [*begin, *given]
    run = tmp_path / "runs" / "phalanx-demo"
    run.mkdir(parents=True)
    (run / "run.json").touch()
    assert run_pod(make_job(), tmp_path) == [*begin, "train", "--resume", "runs/phalanx-demo"]
    assert run_pod(make_job(resumes=False), tmp_path) == [*begin, *train]


def test_a_pod_does_not_look_for_subnets():
    job = make_job()
    command = RankCommand(**{**vars(job.command), "interface": "10.1.3.0/24"})
    with pytest.raises(ConfigError, match="a pod's interface is known by its name"):
        format_job_file("pytorchjob", make_job(command=command))


def test_the_line_that_wrote_the_file_is_in_it():
    line = shlex.join(["phalanx", "launch", "--", "train"])
    for kind in ("sbatch", "pytorchjob"):
        assert f"# {line}\n" in format_job_file(kind, make_job(line=line))
