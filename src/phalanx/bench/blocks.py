"""Blocks of work and their rates: when the warm-up is over, and how long a block is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf

from phalanx.bench.energy import EnergyMeter

_FEWEST_BLOCKS = 3
_SINGLE_TURNS = 3  # turns timed one by one, the minimum warm-up; then more and more together
_LEAST_S = 1e-9  # for clocks that do not advance


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a benchmark warms up and measures, and in how many blocks.

    Slow work gets fewer blocks, but at least three.
    """

    warmup_s: float
    seconds: float
    blocks: int


@dataclass(kw_only=True)
class BlockClock:
    """Splits work into blocks, and keeps their rates.

    A turn is one step, or one batch of every rank. Call `is_end` after each; if it returns True,
    call `end_block` once the device has finished.
    """

    timing: Timing
    energy: EnergyMeter
    done: Callable[[int, int], None]  # called with the number of blocks measured, and of all blocks
    most_turns: int | None = None  # if the work ends by itself
    next_end: int = 1  # the turn that ends the block
    rates: list[float] = field(default_factory=list)  # images/s of each block
    images: int = 0  # of all blocks
    setup_s: float = 0.0  # the first turn, before which kernels are chosen
    warmup_s: float = 0.0  # the turns from there to the first block
    measured_s: float = 0.0
    first_rate: float | None = None  # of everything before the first block
    energy_j: float | None = None
    _last_end: int = 0  # turn
    _quickest_s: float = inf  # turn
    _turns: int = 0  # of a block; 0 while it warms up
    _blocks: int = 0
    _warm_images: int = 0

    @property
    def is_over(self) -> bool:
        """Whether all blocks are measured."""
        return self._turns > 0 and len(self.rates) == self._blocks

    def is_end(self, turn: int) -> bool:
        """Whether a block ends with this turn, counted from 1."""
        return turn == self.next_end

    def end_block(self, turn: int, images: int, busy_s: float) -> None:
        """End a block of so many images in so many seconds; all ranks pass the same figures."""
        took_s, turns, self._last_end = max(busy_s, _LEAST_S), turn - self._last_end, turn
        if self._turns:
            self.rates.append(images / took_s)
            self.images += images
            self.measured_s += took_s
            self.energy_j = self.energy.read()
            self.done(len(self.rates), self._blocks)
        elif turn == 1:
            self.setup_s = took_s
        else:
            self.warmup_s += took_s
            self._quickest_s = min(self._quickest_s, took_s / turns)
        if not self._turns:
            self._warm_up(turn, images)
        self.next_end = turn + (self._turns or max(1, turn - _SINGLE_TURNS))

    def _warm_up(self, turn: int, images: int) -> None:
        """Count the turns before the first block, and start that block after the warm-up."""
        self._warm_images += images
        if turn < _SINGLE_TURNS or self.warmup_s < self.timing.warmup_s:
            return
        seconds, turn_s = self.timing.seconds, self._quickest_s
        left = inf if self.most_turns is None else self.most_turns - turn
        if left < 1:
            return
        blocks = max(_FEWEST_BLOCKS, min(self.timing.blocks, ceil(seconds / turn_s)))
        self._blocks = int(min(blocks, left))
        self._turns = int(max(1, min(round(seconds / self._blocks / turn_s), left // self._blocks)))
        self.first_rate = self._warm_images / (self.setup_s + self.warmup_s)
        self.energy.start()
