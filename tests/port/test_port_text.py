"""The printed answer: a command that can be pasted, and columns that line up at any width."""

import re

import pytest
from small_ports import port, read_old_commands

from phalanx.cli.main import main

COMMANDS = read_old_commands()
POD128 = next(text for text in COMMANDS["tf1"] if "128ipus" in text)
POD16 = next(t for t in COMMANDS["tf1-benchmarks"] if t.startswith("poprun") and "RMSprop" in t)
QUOTED = "poprun --host a,b --num-replicas 2 --mpi-local-args=\"-x 'F=-a -b -c -d -e -f -g'\" "
QUOTED += "python train.py --model resnet --dataset imagenet --batch-size 4 --seed 3 --epochs 9"


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("text", [POD128, POD16, QUOTED], ids=["POD128", "POD16", "quoted"])
def test_the_answer_fits_its_terminal(text, width, capsys, monkeypatch):
    line = port(capsys, text)["line"]
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["port", text]) == 0
    printed = capsys.readouterr().out
    command, _, rest = printed.partition("\n\n")
    assert re.sub(r" \\\n +", " ", command) == line
    for row in rest.splitlines():
        longest = max(map(len, row.split()), default=0)
        assert len(row) <= width or longest > width - 52, row  # a word alone in its column


def test_no_word_is_broken(capsys, monkeypatch):
    words = {word for row in port(capsys, POD16)["options"] for word in row["new"].split()}
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["port", POD16]) == 0
    printed = capsys.readouterr().out.partition("\n\n")[2].replace(":", " ").split()
    assert words <= set(printed)
