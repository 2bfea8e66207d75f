"""Runs a command on several ranks: starts them, or is one that a launcher has started."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from phalanx.cli.command import ParsedArgs
from phalanx.cli.crash import report_rank_errors
from phalanx.errors import EXIT_LEFT_AT_ONCE, FailedElsewhere
from phalanx.plan.world import World, read_world
from phalanx.signals import Interrupted

if TYPE_CHECKING:
    from phalanx.config.schema import Config
    from phalanx.parallel.ranks import Ranks
    from phalanx.plan.plan import Plan


class _Work(Protocol):
    """The work of a command, checked without torch."""

    @property
    def plan(self) -> "Plan": ...

    @property
    def config(self) -> "Config": ...

    def run(self, ranks: "Ranks | None" = None) -> int:
        """Do it, or this rank's part of it; returns the exit code."""


def run_on_ranks(args: ParsedArgs, prepare: Callable[[], _Work]) -> int:
    """Do a command's work in this process, on new ranks or as a rank; returns the exit code.

    New ranks run the whole command again, because nothing is on disk that they could start from.
    """
    world = read_world()
    if world is not None:
        return _run_as_rank(args, world, prepare)
    work = prepare()
    ranks = work.plan.layout.ranks
    if ranks == 1:
        return work.run()
    from phalanx.assemble.rank_launch import start_command_ranks

    code = start_command_ranks(args.command, args.words, ranks)
    if code == EXIT_LEFT_AT_ONCE:
        raise KeyboardInterrupt  # the ranks do not print it
    return code


def _run_as_rank(args: ParsedArgs, world: World, prepare: Callable[[], _Work]) -> int:
    """Do a part of the work as one of several ranks, of which only the first prints."""
    from phalanx.assemble.rank_launch import join_ranks, prepare_as_rank

    try:
        with report_rank_errors(world, None) if world.rank else nullcontext():
            work, store = prepare_as_rank(world, prepare, args.flags)
        plan, timeout = work.plan, work.config.machine.rank_timeout
        with report_rank_errors(world, None), join_ranks(world, store, plan, timeout) as ranks:
            return work.run(ranks)
    except FailedElsewhere as end:
        return end.exit_code
    except Interrupted:
        if world.rank or world.supervised:
            return EXIT_LEFT_AT_ONCE
        raise
