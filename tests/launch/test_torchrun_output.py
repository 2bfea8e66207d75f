"""What torchrun says when ranks end, as torch 2.13 says it."""

from phalanx.launch.torchrun_output import RankEnd, TorchrunOutput

NOISE = """\
W1116 12:21:44.077000 3345 torch/distributed/run.py:803]
W1116 12:21:44.077000 3345 torch/distributed/run.py:803] Setting OMP_NUM_THREADS
W1116 12:21:44.077000 3345 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process
E1116 12:21:44.078000 3345 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode
"""
OWN = """\
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 1019, in run
    elastic_launch(
"""
TABLE = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
phalanx FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-16_12:21:44
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 3348)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 3348
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-16_12:21:44
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 75 (pid: 3347)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def read(text: str) -> tuple[TorchrunOutput, list[str]]:
    output = TorchrunOutput()
    shown = [line for given in text.splitlines() for line in output.read(given)]
    return output, shown + output.close()


def test_the_codes_of_ranks_are_read_and_the_rest_is_not_shown():
    output, shown = read(f"rank 0 says\n{NOISE}{OWN}{TABLE}after it\n")
    assert shown == ["rank 0 says", "after it"]
    assert output.ends == [RankEnd(1, -15), RankEnd(0, 75)] and not output.failure


def test_a_failure_of_torchrun_itself_is_kept_in_one_line():
    output, shown = read(f"{OWN}torch.distributed.DistNetworkError: port in use\n")
    assert shown == [] and output.ends == []
    assert output.failure == "torch.distributed.DistNetworkError: port in use"


def test_a_traceback_of_somebody_else_is_shown():
    text = 'Traceback (most recent call last):\n  File "mine.py", line 1\n\nValueError: mine\nmore'
    output, shown = read(text)
    assert shown == text.splitlines() and not output.failure
    _, shown = read('Traceback (most recent call last):\n  File "mine.py", line 1')
    assert len(shown) == 2, "what is held back at the end is shown"
