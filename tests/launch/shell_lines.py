"""Lines for tests to run: a shell that is a launcher, with a shell that is its rank."""

from pathlib import Path

from phalanx.launch.command_lines import LaunchLine

# it ends with code 1 whatever its rank ended with, and says more in torchrun's words
_LAUNCHER = """
RANK=0 sh -c "$1"
code=$?
[ $code -eq 0 ] && exit
[ $code -gt 128 ] && code=-$((code - 128))
printf 'Traceback (most recent call last):\\n  File /torch/distributed/run.py\\n' >&2
printf 'ChildFailedError:\\n=====\\n  rank      : 0 (l\\n  exitcode  : %s (pid\\n=====\\n' $code >&2
exit 1
"""
SAVES = (
    "trap 'kill $p; echo saving; sleep 0.2; echo saved; exit 75' TERM INT HUP; "
    "sleep 60 & p=$!; echo ready; wait"
)


def line(*words: str, host: str = "here", launcher: str = "torchrun") -> LaunchLine:
    """A line that runs here."""
    return LaunchLine(launcher=launcher, host=host, args=words, folder=Path.cwd())


def ranked(program: str, host: str = "here") -> LaunchLine:
    """A line of the launcher above, whose rank runs a shell's program."""
    return line("sh", "-c", _LAUNCHER, "sh", program, host=host)
