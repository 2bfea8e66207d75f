"""CPU seconds that --help and mistakes take, each in its own process: the best of five."""

import resource
import subprocess
import sys

COMMANDS = {
    "phalanx --help": ["--help"],
    "phalanx train --help": ["train", "--help"],
    "phalanx train --epochz 3": ["train", "--epochz", "3"],
    "phalanx train demo --lr fast --keep 0": ["train", "demo", "--lr", "fast", "--keep", "0"],
    "phalanx plan dmeo": ["plan", "dmeo"],
}
REPEATS = 5


def cpu_seconds(words: list[str]) -> float:
    """User and system time of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "phalanx", *words], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    for line, words in COMMANDS.items():
        taken = sorted(cpu_seconds(words) for _ in range(REPEATS))
        print(f"{line:<40} {taken[0]:.2f} s  ({taken[0]:.2f} to {taken[-1]:.2f}, n={REPEATS})")
