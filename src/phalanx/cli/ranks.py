"""Commands that several ranks run together: started here, or as a rank of a launcher."""

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
    """What is to be done, checked without torch."""

    @property
    def plan(self) -> "Plan": ...

    @property
    def config(self) -> "Config": ...

    def run(self, ranks: "Ranks | None" = None) -> int:
        """Do it, and give the exit code; where there are ranks, each does its part."""


def run_on_ranks(args: ParsedArgs, prepare: Callable[[], _Work]) -> int:
    """Do a command's work here, on ranks of our own, or as a launcher's rank; its exit code.

    The ranks are the command itself, once for each: nothing is written that they could go on from.
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
        raise KeyboardInterrupt  # the ranks leave it to us to say so
    return code


def _run_as_rank(args: ParsedArgs, world: World, prepare: Callable[[], _Work]) -> int:
    """Do a part as one of several ranks; only one of them speaks."""
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
