"""A run that Slurm takes its hosts from goes on when it gets them back."""

import sys
from pathlib import Path

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


def write_script(words: list[str], run: Path, log: Path) -> str:
    """A batch script that saves when it must make way, and queues itself again."""
    phalanx = f"{sys.executable} -m phalanx"
    return f"""#!/bin/bash
#SBATCH --partition=low --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2
#SBATCH --time=30 --requeue --open-mode=append --output={log}
#SBATCH --signal=B:TERM@60
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
if [ -e {run}/run.json ]; then
    srun {phalanx} train --resume {run} &
else
    srun {phalanx} {" ".join(words)} &
fi
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do  # a signal has ended the wait, not the step
    wait "$step"
    code=$?
done
echo "code $code"
if [ "$code" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def test_a_run_that_makes_way_for_another_ends_the_same(digits, tmp_path):
    straight, run, log = tmp_path / "straight", tmp_path / "run", tmp_path / "log.txt"
    assert main(ranked_run(digits, straight, ranks=4, devices=1, epochs=60)) == 0
    words = ranked_run(digits, run, ranks=4, launched=True, epochs=60)
    (tmp_path / "run.sh").write_text(write_script(words, run, log))
    (tmp_path / "urgent.sh").write_text(URGENT)
    with open_hosts() as hosts, open_slurm(hosts, tmp_path / "slurm") as cluster:
        job = cluster.submit(tmp_path / "run.sh")
        wait_for(lambda: count_steps(run) >= 10 or None, timeout=120)
        urgent = cluster.submit(tmp_path / "urgent.sh")
        assert cluster.wait_for_end(urgent, timeout=180)["JobState"] == "COMPLETED"
        ended = cluster.wait_for_end(job, timeout=240)
    told = log.read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), told
    assert "code 75\n" in told and told.count("resumed at step ") == 1, told
    assert "SIGTERM: finishing this step and saving" in told
    assert_same_result(run, straight)
