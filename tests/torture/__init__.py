"""Tortures the command line: kills, damaged files, nonsense, hostile names, full disks.

python -m torture [--seconds 600] [--seed N] [--only TRIAL] [--area NAME], with tests/ on the path.
The law of every trial: a command is refused with a code of the table, or what it gives is
identical to what it gives undisturbed. Never a traceback, a hang, a raw control character on the
terminal, a process left behind, or a code outside the table.

__main__.py   trials by the clock; the table at the end
command.py    a command in a forked process that has torch ready: killed, timed, its output kept
law.py        what a command may end with, and whether two runs are the same
material.py   data in every form, for each a whole run and one killed halfway; what a trial has
damage.py     areas: checkpoints, run folders, data
breaks.py     areas: kills and signals, full disks
inputs.py     areas: options, config files, names
"""
