"""`phalanx launch`: what it prints, refuses and writes; and a real launch on this machine."""

import json
import shlex
import sys

import pytest

from phalanx.cli.main import main
from phalanx.report.summary import read_summary
from small_runs import run_phalanx, small_run


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launch(capsys):
    """Runs `phalanx launch` with a line; its exit code, output and standard error."""

    def run(line: str) -> tuple[int, str, str]:
        code = main(["launch", *shlex.split(line)])
        return code, *capsys.readouterr()

    return run


def dry_run(launch, line: str) -> list[list[str]]:
    """The words of the lines that would be started."""
    own, _, inner = line.partition("-- ")
    code, out, _ = launch(f"{own} --dry-run -- {inner}")
    assert code == 0
    return [shlex.split(text) for text in out.splitlines()]


# --- lines ---


def test_one_host_needs_no_ssh_and_has_a_port_of_its_own(launch):
    (words,) = dry_run(launch, "--num-replicas 2 -- train demo")
    port = words[words.index("--master-port") + 1]
    assert words[-6:] == ["-m", "phalanx", "train", "demo", "--replicas", "2"]
    assert "--nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1" in " ".join(words)
    (other,) = dry_run(launch, "--num-replicas 2 --host localhost -- train demo")
    assert port != other[other.index("--master-port") + 1] and port != "29500"


def test_hosts_meet_at_the_first_one(launch):
    first, second = dry_run(launch, "--num-replicas 4 --host me@n1,n2 -- validate runs/x")
    for number, words in enumerate((first, second)):
        assert words[0] == "ssh" and "--master-addr n1 --master-port 29500" in words[-1]
        assert f"--nnodes 2 --nproc-per-node 2 --node-rank {number} " in words[-1]
        assert words[-1].endswith("-m phalanx validate runs/x")
    assert first[-2] == "me@n1"


def test_lines_that_must_run_together_say_so(launch):
    _, out, err = launch("--num-replicas 2 --host n1,n2 --dry-run -- train demo")
    assert len(out.splitlines()) == 2 and err == "note: these lines must run at the same time\n"


@pytest.mark.parametrize(
    ("own", "inner", "added"),
    [
        ("", "train demo", "--replicas 4"),
        ("", "train demo --replicas 16", ""),
        ("", "train --resume runs/x", ""),
        ("", "train --fork runs/x", "--replicas 4"),
        ("", "validate runs/x", ""),
        ("--devices-per-replica 2", "train demo", "--replicas 4 --shards 2"),
        ("--num-devices 8", "train demo", "--replicas 4 --shards 2"),
        ("--devices-per-replica 4", "train tf1-resnet50-bn", "--replicas 4"),
        ("--devices-per-replica 1", "train tf1-resnet50-bn", "--replicas 4 --shards 1"),
        (
            "--devices-per-replica 2",
            "train tf1-resnet50-bn --pipeline-splits none",
            "--replicas 4 --shards 2",
        ),
        ("--vipu-server-timeout=300", "train demo", "--replicas 4 --rank-timeout 300"),
        ("--vipu-server-timeout 300", "train demo --rank-timeout 9", "--replicas 4"),
        ("-x IPUOF_VIPU_API_TIMEOUT=60", "validate runs/x", "--rank-timeout 60"),
    ],
)
def test_the_command_gets_what_launch_knows_unless_it_says_so_itself(launch, own, inner, added):
    (words,) = dry_run(launch, f"--num-replicas 4 {own} -- {inner}")
    assert words[words.index("phalanx") + 1 :] == [*inner.split(), *added.split()]


@pytest.mark.parametrize(
    ("inner", "ranks"),
    [
        ("train tf1-resnet50-bn", 8),  # whose splits make four stages
        ("train demo --shards 3", 6),
        ("train tf1-resnet50-bn --shards 1", 2),
        ("train tf1-resnet50-bn --pipeline-splits none", 2),
    ],
)
def test_a_replica_has_a_device_for_each_stage_of_the_command(launch, inner, ranks):
    (words,) = dry_run(launch, f"--num-replicas 2 -- {inner}")
    assert words[words.index("--nproc-per-node") + 1] == str(ranks)
    assert words[words.index("phalanx") + 1 :] == [*inner.split(), "--replicas", "2"]


def test_bench_runs_on_one_rank(launch):
    for inner in ("bench overhead", "bench determinism demo"):
        (words,) = dry_run(launch, f"--num-replicas 1 -- {inner}")
        assert words[words.index("phalanx") + 1 :] == inner.split()


@pytest.mark.parametrize(
    ("inner", "added"), [("bench train demo", "--replicas 2"), ("bench infer resnet8", "")]
)
def test_training_and_inference_are_measured_on_all_ranks(launch, inner, added):
    (words,) = dry_run(launch, f"--num-replicas 2 --vipu-server-timeout 90 -- {inner}")
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("phalanx") + 1 :] == [
        *inner.split(),
        *added.split(),
        "--rank-timeout",
        "90",
    ]


def test_a_slurm_job_uses_srun_on_all_its_nodes(launch, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    (words,) = dry_run(launch, "--num-replicas 4 -- train demo")
    options = "--ntasks 4 --kill-on-bad-exit=0 --nodes 2 --ntasks-per-node 2"
    assert words[:8] == ["srun", *options.split()]
    code, _, err = launch("--num-replicas 3 -- train demo")
    assert code == 2 and "give --num-replicas 2 or 4" in err
    (words,) = dry_run(launch, "--num-replicas 2 --launcher torchrun -- train demo")
    assert words[0].endswith("torchrun")


def test_a_line_of_the_older_launcher_can_be_pasted(launch):
    older = (
        "-v --numa-aware 1 --num-instances 8 --num-replicas 16 --ipus-per-replica 1 "
        '--mpi-local-args="--tag-output --allow-run-as-root"'
    )
    code, out, err = launch(f"{older} --dry-run -- train demo")
    assert code == 0 and "--nproc-per-node 16" in out
    assert err.splitlines() == [
        "note: -v: has no meaning here and was left out (there is nothing more to print)",
        "note: --numa-aware 1: has no meaning here and was left out (the operating system places "
        "the processes)",
        "note: --num-instances 8: every device has a process here: 16 ranks start",
        "note: --allow-run-as-root: is for --launcher mpirun and was left out",
    ]


# --- mistakes ---


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--num-replicas 2 train demo", "`--` is missing: write it and a phalanx command"),
        ("--num-replicas 2 --", "a command is missing after --; choose from train, validate"),
        ("--num-replicas 2 -- trian", "'trian' is not a command for launch; did you mean 'train'?"),
        (
            "--num-replicas 2 -- bench",
            "'bench' is not a command for launch; did you mean 'bench train'?",
        ),
        ("-- train demo", "--num-replicas: say how many copies"),
        ("--num-replicas two -- train demo", "--num-replicas: expected a whole number from 1"),
        ("--num-replica 2 -- train", "no such option; did you mean '--num-replicas'?"),
        ("--num-replicas 2 --lancher srun -- train", "did you mean '--launcher'?"),
        ("--num-replicas 2 --launcher sun -- train", "no such launcher; did you mean 'srun'?"),
        ("--num-replicas 3 --host a,b -- train", "give --num-replicas 2 or 4"),
        ("--num-replicas 4 --num-devices 6 -- train", "a multiple of the replication factor"),
        ("--num-replicas 4 --ipus-per-replica --numa-aware 1 -- train", "expected one argument"),
        ("--num-replicas 2 --nodes 2 -- train", "must know the hosts; name them with --host"),
        ("--num-replicas 2 --nodes 3 --host a,b -- train", "--host names 2; leave --nodes out"),
        ("--num-replicas 2 --ssh-args \"-i 'a\" -- train", "--ssh-args: No closing quotation"),
        ("--num-replicas 2 --master-port 0 -- train", "--master-port: expected a port from 1 to"),
        ("--num-replicas 2 --write slurm x -- train", "expected sbatch or pytorchjob and the name"),
        ("--num-replicas 2 -- train demo --epohcs 2", "--epohcs: no such option; did you mean"),
        ("--num-replicas 2 -- train demo --lr much", "--lr: expected a number, got 'much'"),
        ("--num-replicas 2 -- bench overhead", "measures one device; give --num-replicas 1"),
        ("--num-replicas 2 --devices-per-replica 2 -- train tf1-resnet50-bn", "--devices-per-replica 2: the command's splits make 4 stages; give --devices-per-replica 4,"),  # noqa: E501
        ("--num-replicas 2 --num-devices 4 -- train tf1-resnet50-bn", "or --pipeline-splits none after --"),  # noqa: E501
        ("--num-replicas 2 --devices-per-replica 2 -- train demo --shards 4", "--devices-per-replica 2: the command has --shards 4; leave one of the two out"),  # noqa: E501
        ("--num-replicas 2 -- train tf1-resnet50-bn --shards 3", "--shards 3: needs 2 splits"),
        ("--num-replicas 2 -- validate runs/x --repaet 2", "--repaet: no such option"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_anything_starts(launch, line, words):
    code, out, err = launch(line)
    assert (code, out) == (2, "") and err.startswith("phalanx launch: ") and words in err


# --- files ---


def test_a_file_is_written_once(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "--num-replicas 4 --nodes 2 --write sbatch job.sh -- train demo --device cpu"
    assert launch(line)[:2] == (0, "wrote job.sh; submit it with: sbatch job.sh\n")
    text = (tmp_path / "job.sh").read_text()
    assert (
        "#SBATCH --nodes=2\n" in text
        and "--gpus" not in text
        and f"# phalanx launch {line}" in text
    )
    code, _, err = launch(line)
    assert code == 2 and "job.sh: exists already; remove it, or name another file" in err
    assert (tmp_path / "job.sh").read_text() == text
    assert launch(line.replace("sbatch job.sh", "pytorchjob job.yaml"))[0] == 0
    assert "kind: PyTorchJob" in (tmp_path / "job.yaml").read_text()


def test_a_job_asks_for_no_gpus_where_a_file_says_cpu(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: demo\ndevice: cpu\n")
    for command, asks in (
        ("train mine.yaml", False),
        ("train mine.yaml --device cuda", True),
        ("bench determinism mine.yaml", False),
    ):
        assert launch(f"--num-replicas 1 --write sbatch job.sh -- {command}")[0] == 0
        text = (tmp_path / "job.sh").read_text()
        assert ("--gpus-per-node" in text) == asks, command
        (tmp_path / "job.sh").unlink()


def test_a_job_names_its_plugin_whenever_it_starts(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("phalanx.catalog.plugins._LOADED", {})
    line = "--num-replicas 2 --write sbatch job.sh -- train demo --plugin json"
    assert launch(line)[0] == 0
    assert 'words=(train --resume "$run" --plugin json)\n' in (tmp_path / "job.sh").read_text()


# --- a real launch ---


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_what_two_of_our_own_do(digits, tmp_path):
    given = {"batch_size": 8, "threads": 1, "determinism": "strict", "epochs": 1}
    own = small_run(digits, tmp_path / "own", replicas=2, devices=2, **given)
    assert run_phalanx(*own).returncode == 0
    launched = small_run(digits, tmp_path / "launched", **given)
    done = run_phalanx("launch", "--num-replicas", 2, "--tag-output", "--", *launched, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line.removeprefix("[localhost] "))
    assert summary["weights_sha256"] == read_summary(tmp_path / "own").weights_sha256
    assert "Traceback" not in done.stderr and "torch/distributed" not in done.stderr


@pytest.mark.slow
def test_the_ranks_own_words_and_code_are_all_that_is_seen_of_a_mistake(digits, tmp_path):
    words = small_run(digits, tmp_path / "run", epochs=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    done = run_phalanx("launch", "--num-replicas", 2, "--", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"phalanx train: --run-dir {tmp_path / 'run'}: is not empty; choose another --run-dir\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127/8 is this machine")
def test_a_host_that_cannot_be_reached_is_named_with_the_time_it_took(launch):
    options = "-F none -p 1 -o ConnectTimeout=3"
    code, out, err = launch(
        f'--num-replicas 2 --host localhost,127.0.0.9 --ssh-args "{options}" -- train demo'
    )
    assert (code, out) == (8, "")
    assert err.startswith("phalanx launch: host 127.0.0.9: cannot be reached, tried for 0.")
    assert "Connection refused); make `ssh 127.0.0.9` work without a password" in err
