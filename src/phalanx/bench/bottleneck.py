"""Three kinds of data side by side, and what limits the rate: the data, or the model.

synthetic   noise that is on the device already: the model alone
generated   noise made on the host, batch by batch: with loading, augmenting and copying
real        the data itself: with reading and decoding, too
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.bench.result import BenchResult
from phalanx.units import format_count

INPUT_KINDS = ("synthetic", "generated", "real")
_AS_FAST = 0.95  # of the rate of the model alone; below that, it waits for data


def find_bottlenecks(results: Sequence[BenchResult]) -> list[BenchResult]:
    """The results with what limits each of them, if synthetic data was measured too.

    Unreliable results are not compared.
    """
    believed = [one for one in results if one.is_trusted]
    alone = {one.micro_batch: one.median for one in believed if one.data == "synthetic"}
    kinds = Counter(one.micro_batch for one in results)

    def find_limit(one: BenchResult) -> str | None:
        model, reached = alone.get(one.micro_batch), one.median
        if kinds[one.micro_batch] < 2 or model is None or reached is None or not one.is_trusted:
            return None
        return "data" if reached < _AS_FAST * model else "model"

    return [replace(one, limit=find_limit(one)) for one in results]


def describe_bottlenecks(results: Sequence[BenchResult]) -> list[str]:
    """What limits the rate, and what would help: a line for each batch size that is compared."""
    sizes = dict.fromkeys(one.micro_batch for one in results)
    lines = []
    for size in sizes:
        limited = {one.data: one for one in results if one.micro_batch == size and one.limit}
        if len(limited) > 1:
            head = f"batch {size:,}: " if len(sizes) > 1 else ""
            lines.append(head + _describe_bottleneck(limited))
    return lines


def _describe_bottleneck(by_kind: Mapping[str, BenchResult]) -> str:
    """What limits the rate, from kinds of data that were measured with the same batches."""
    rates = {kind: format_count(result.median or 0.0) for kind, result in by_kind.items()}
    slow = [kind for kind in INPUT_KINDS if kind in by_kind and by_kind[kind].limit == "data"]
    alone = f"the {rates['synthetic']} images/s of the model alone"
    if not slow:
        *_, last = (kind for kind in INPUT_KINDS if kind in by_kind)
        return f"the model is the limit: with {last} data it reaches {rates[last]} of {alone}"
    reached = " and ".join(f"with {kind} data it reaches {rates[kind]}" for kind in slow)
    advice = (
        "even noise comes too slowly from the host: more --workers, or fewer augmentations"
        if "generated" in slow
        else "reading or decoding is too slow: `phalanx data bench` times each stage"
    )
    return f"the data is the limit: {reached} of {alone}; {advice}"
