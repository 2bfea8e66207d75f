"""The batch script that `phalanx launch --write sbatch` writes, in the hands of a real Slurm."""

import pytest
from launched_runs import assert_same_result, count_steps, ranked_run, wait_for

from hosts import open_hosts
from phalanx.cli.main import main
from slurm_cluster import open_slurm

pytestmark = pytest.mark.slow
URGENT = """#!/bin/sh
#SBATCH --partition=high --nodes=2 --ntasks=8 --time=5 --output=/dev/null
sleep 3
"""


def test_the_written_script_makes_way_for_another_and_ends_the_same(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert main(ranked_run(digits, straight, ranks=4, devices=1, epochs=60)) == 0
    words = ranked_run(digits, run, ranks=4, launched=True, epochs=60)
    launch = ["launch", "--num-replicas", "4", "--nodes", "2", "--write", "sbatch", "job.sh"]
    assert main([*launch, "--", *words]) == 0
    script = tmp_path / "job.sh"
    # what a user fits to the cluster: how long a job of this partition may run
    script.write_text(script.read_text().replace("24:00:00", "30"))
    (tmp_path / "urgent.sh").write_text(URGENT)
    with open_hosts() as hosts, open_slurm(hosts, tmp_path / "slurm") as cluster:
        job = cluster.submit(script)
        wait_for(lambda: count_steps(run) >= 10 or None, timeout=120)
        urgent = cluster.submit(tmp_path / "urgent.sh")
        assert cluster.wait_for_end(urgent, timeout=180)["JobState"] == "COMPLETED"
        ended = cluster.wait_for_end(job, timeout=240)
    (log,) = tmp_path.glob("phalanx-train-*.log")
    told = log.read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), told
    assert told.count("resumed at step ") == 1, told
    assert "SIGTERM: finishing this step and saving" in told
    assert_same_result(run, straight)
