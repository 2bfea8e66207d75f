"""`phalanx plan --network`: a step's use of the links between hosts, and its duration."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.catalog.datasets import DATASETS
from phalanx.cli.command import Argument, ParsedArgs
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.units import align_columns, format_bytes, format_plural

if TYPE_CHECKING:
    from phalanx.assemble.dataset_summary import DatasetSummary
    from phalanx.models.stage_cost import StageCost
    from phalanx.plan.exchange import Exchange, LinkUse, Network, StepTime
    from phalanx.plan.plan import Plan

NETWORK_ARGS = (
    Argument(
        "--network",
        "Predict the step time with this many Gbit/s on each host's link, such as 10 or 0.1.",
        metavar="--network GBIT",
    ),
    Argument("--hosts", "With --network: how many hosts share the devices; else one for each."),
    Argument(
        "--images-per-second",
        "With --network: images/s of one device alone, from a run with the same options, "
        "recomputation included.",
    ),
)
_NAMES = {
    "gradients": "gradients",
    "statistics": "BatchNorm statistics",
    "activations": "activations and their gradients",
}


class NetworkArgs(NamedTuple):
    """The network described by the flags."""

    gbit: float
    hosts: int | None
    images_per_second: float | None


class StepFigures(NamedTuple):
    """The figures of a step that the prediction needs."""

    exchanges: "Sequence[Exchange]"  # by stage
    stages: "Sequence[StageCost]"
    bubble: float


@dataclass(frozen=True, kw_only=True)
class NetworkPrediction:
    """A plan's step over a network."""

    network: "Network"
    use: "LinkUse"
    step: "StepTime | None"  # where it is known what a device trains alone
    image_bytes: float  # of an image that is read in training; 0 where none is
    input_bytes: float  # that each host reads in a step

    @property
    def input_s(self) -> float:
        """Seconds of the host's link that they would take."""
        return self.network.time(self.input_bytes)

    @property
    def shared_s(self) -> float:
        """Seconds of a step whose images come over the same links."""
        assert self.step is not None
        return max(self.step.total_s, self.use.total_s + self.input_s)

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers, for JSON."""
        facts = {**asdict(self.network), **asdict(self.use), "communication_s": self.use.total_s}
        facts |= {"image_bytes": self.image_bytes, "input_bytes": self.input_bytes}
        facts["input_s"] = self.input_s
        facts["step"] = None
        if self.step is not None:
            facts["step"] = {**asdict(self.step), "total_s": self.step.total_s}
            facts["step"]["total_s_with_input"] = self.shared_s
        return facts


def read_network_args(args: ParsedArgs) -> NetworkArgs | None:
    """The network that --network describes, if it is given."""
    if args["--network"] is None:
        for flag in ("--hosts", "--images-per-second"):
            if args[flag] is not None:
                raise ConfigError(f"{flag}: belongs to --network GBIT, which is not given")
        return None
    if args["--no-memory"]:
        raise ConfigError("--network: needs what --no-memory skips; leave one of them out")
    gbit = args.read_positive("--network", "Gbit/s of each host's link, such as 10 or 0.1")
    hosts = args.read_optional_int("--hosts", 1)
    rate = None
    if args["--images-per-second"] is not None:
        rate = args.read_positive("--images-per-second", "a number above zero, such as 2500")
    return NetworkArgs(gbit, hosts, rate)


def predict_network(
    wanted: NetworkArgs,
    plan: "Plan",
    config: Config,
    known: StepFigures,
    dataset: "DatasetSummary",
) -> NetworkPrediction:
    """A step's use of a network, and its duration."""
    from phalanx.assemble.dataset_summary import RANDOM_DATASETS
    from phalanx.plan.exchange import (
        Network,
        count_hosts,
        predict_step_time,
        time_exchange,
        time_stage_waits,
    )

    network = Network(gbit=wanted.gbit, hosts=count_hosts(plan, wanted.hosts))
    use = time_exchange(plan, known.exchanges, network, bucket_mib=config.machine.bucket_mib)
    step = None
    if wanted.images_per_second is not None:
        rate = wanted.images_per_second
        waits = time_stage_waits(
            plan,
            network,
            shares=[stage.share for stage in known.stages],
            received=[stage.received for stage in known.stages],
            images_per_second=rate,
        )
        step = predict_step_time(
            plan,
            use,
            images_per_second=rate,
            bubble=known.bubble if plan.layout.stages > 1 else 0.0,
            stage_waits_s=waits,
        )
    stays = DATASETS[config.data.data].in_memory or config.data.data in RANDOM_DATASETS
    pixels = 3.0 * plan.image_size**2
    size = 0.0 if stays else dataset.image_bytes or pixels
    read = size * plan.global_batch / network.hosts
    return NetworkPrediction(
        network=network, use=use, step=step, image_bytes=size, input_bytes=read
    )


def describe_exchange(plan: "Plan", exchange: "Exchange") -> str:
    """What each rank sends and receives in a step."""
    sizes = {name: getattr(exchange, kind) for kind, name in _NAMES.items()}
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    total = f"{'up to ' * (plan.layout.stages > 1)}{format_bytes(exchange.total)}"
    return f"each rank sends and receives {total} per step: {text}"


def describe_network(prediction: NetworkPrediction, plan: "Plan") -> list[tuple[str, str]]:
    """The rows of a plan about the network."""
    hosts = prediction.network.hosts
    each = format_plural(plan.layout.ranks // hosts, "device")
    where = f"each of {hosts:,} hosts, {each} on each" if hosts > 1 else f"the only host, {each}"
    rows = [("network", f"{prediction.network.gbit:g} Gbit/s for {where}")]
    rows += [("", line) for line in _list_uses(prediction, plan)]
    return [*rows, *_describe_step(prediction, plan)]


def _list_uses(prediction: NetworkPrediction, plan: "Plan") -> list[str]:
    """A line for each kind of bytes on a host's link."""
    use = prediction.use
    way = "gathered from all" if plan.determinism == "strict" else "ring all-reduce"
    notes = {"gradients": way, "activations": "on their way while stages compute"}
    cells = [
        (_NAMES[kind], format_bytes(size), _format_time(use.seconds[kind]), notes.get(kind, ""))
        for kind, size in use.sizes.items()
        if size
    ]
    if use.tree_s:
        cells.insert(1, ("", "", _format_time(use.tree_s), "instead, if a tree added them up"))
    if prediction.input_bytes:
        note = "only if they come over the same link"
        size = format_bytes(prediction.input_bytes)
        cells.append(("images", size, _format_time(prediction.input_s), note))
    if not cells:
        return ["nothing goes over it"]
    cells.insert(0, ("each way, in a step", "bytes", "time", ""))
    return align_columns(cells, left=[0, 3])


def _describe_step(prediction: NetworkPrediction, plan: "Plan") -> list[tuple[str, str]]:
    """The duration of a step, if a measurement gives the speed of one device."""
    step = prediction.step
    if step is None:
        way = "give --images-per-second, what one device trains alone"
        return [("step time", f"needs a measurement: {way}")]
    parts = f"compute {_format_time(step.compute_s)} + communication "
    parts += _format_time(step.communication_s)
    if step.hidden_s:
        parts += f" - {_format_time(step.hidden_s)} of it behind the backward pass"
    if step.host_s:
        parts += f" + copies and sums {_format_time(step.host_s)}"
    rate, ranks = plan.global_batch / step.total_s, plan.layout.ranks
    speed = f"{rate:,.0f} images/s"
    if ranks > 1:
        speed += f", {step.compute_s / step.total_s:.2f} of {ranks:,} devices without a network"
    rows = [("step time", f"{_format_time(step.total_s)} = {parts}"), ("", speed)]
    if prediction.image_bytes:
        each = rate / prediction.network.hosts
        text = (
            f"each host reads {each:,.0f} images/s, {format_bytes(each * prediction.image_bytes)}/s"
        )
        rows.append(("input", f"{text}, to keep up"))
    if prediction.shared_s > step.total_s:
        rows.append(("", f"over the same links a step takes {_format_time(prediction.shared_s)}"))
    return rows


def _format_time(seconds: float) -> str:
    """A time in a unit that suits it.

    >>> _format_time(12.34), _format_time(0.01234), _format_time(0.0000123)
    ('12.3 s', '12.3 ms', '0.0123 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
