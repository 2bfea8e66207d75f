"""Norms of several ranks against torch's norm in one process with all their images.

Four ranks are started once and run every case; the tests compare what they wrote.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from multiprocessing import set_forkserver_preload
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm, OwnVariant, Variant
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.norms import FullBatchNorm, FullOnePassBatchNorm, OnePassBatchNorm
from phalanx.models.recompute import enable_recomputation
from phalanx.parallel.sync_norm import synchronise_norms

RANKS, IMAGES, CHANNELS, PASSES = 4, 2, 6, 2
MANY_CHANNELS = 1100  # so many that a recomputing pass does not store their statistics
OWN = OwnVariant(image_size=16, build="tests:net")
RESNET8 = MODELS["resnet8"]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}
Results = dict[str, Tensor]


def small_net(norm: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.Module:
    """Its tensors are large enough to be computed again, with norms that others depend on."""
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 8, 3, padding=1, bias=False),
        norm(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, CHANNELS, 3, padding=1, bias=False),
        norm(CHANNELS, momentum=0.3),
        nn.Sigmoid(),
    )


def small_resnet(variant: Variant = RESNET8) -> nn.Module:
    model = build_model(variant, num_classes=10)
    initialise_weights(model, 1, zero_residual=False)
    return model


NETS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.BatchNorm2d(CHANNELS),
    "one pass": lambda: OnePassBatchNorm(CHANNELS),
    "full": lambda: FullBatchNorm(CHANNELS),
    "full one pass": lambda: FullOnePassBatchNorm(CHANNELS),
    "bare": lambda: nn.BatchNorm2d(CHANNELS, affine=False, momentum=None),
    "untracked": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "vectors": lambda: nn.BatchNorm1d(CHANNELS),
    "wide": lambda: nn.Sequential(nn.BatchNorm2d(MANY_CHANNELS), nn.Sigmoid()),
    "net": small_net,
    "one-pass net": lambda: small_net(OnePassBatchNorm),
    "resnet": small_resnet,
    "one-pass resnet": lambda: small_resnet(replace(RESNET8, norm=Norm(stable=False))),
}
TORCHS = {  # the same with torch's own norms
    "one pass": "norm",
    "full": "norm",
    "full one pass": "norm",
    "one-pass net": "net",
    "one-pass resnet": "resnet",
}


@dataclass(frozen=True)
class Case:
    """One network on groups of so many ranks."""

    net: str
    group: int = 2
    dtype: torch.dtype = torch.float64
    layout: torch.memory_format = torch.channels_last
    recompute: bool = False

    def __str__(self) -> str:
        words = (self.net, f"{self.group} ranks", str(self.dtype), str(self.layout))
        return ", ".join((*words, *["recomputed"] * self.recompute))

    @property
    def patterns(self) -> list[str]:
        """What a recomputing pass stores: little enough that norms are computed again."""
        return [] if "resnet" in self.net else ["0"]


LAYOUTS = (torch.contiguous_format, torch.channels_last)
CASES = [
    *(Case("norm", *options) for options in product((2, 4), BOUND, LAYOUTS)),
    *(Case("one pass", 2, dtype) for dtype in BOUND),
    Case("full", dtype=torch.float32),  # in evaluation it takes 32 bits only
    Case("bare"),
    Case("untracked"),
    Case("vectors", layout=torch.contiguous_format),
    *(Case("net", group, recompute=again) for group in (2, 4) for again in (False, True)),
    *(Case(net, recompute=again) for net in ("wide", "resnet") for again in (False, True)),
]
MORE_NETS = ("net", "one-pass net", "resnet", "one-pass resnet")
MORE_CASES = [
    *(Case(*options) for options in product(MORE_NETS, (2, 4), BOUND, LAYOUTS, (False, True))),
    *(Case("one pass", *options) for options in product((2, 4), BOUND, LAYOUTS)),
    *(Case("full one pass", group, torch.float32) for group in (2, 4)),
]


# --- what a rank does, and the one process it is compared with ---


def shake(net: nn.Module) -> nn.Module:
    """Give the norms weights that do something."""
    generator = torch.Generator().manual_seed(12)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            module.weight.data.uniform_(0.5, 2, generator=generator)
            module.bias.data.uniform_(-1, 1, generator=generator)
    return net


def draw(case: Case, number: int, *, outputs: bool = False) -> list[Tensor]:
    """The images of each rank in a pass, each rank's with another mean; or the output's pulls."""
    random = torch.Generator().manual_seed(2 * number + outputs)
    shapes = {"vectors": (CHANNELS,), "wide": (MANY_CHANNELS, 2, 2)}
    shape = shapes.get(case.net, (CHANNELS, 16, 16))
    if "resnet" in case.net:
        shape = (10,) if outputs else (3, 32, 32)
    drawn = [torch.randn(IMAGES, *shape, generator=random, dtype=torch.float64) for _ in range(4)]
    moved = [x if outputs else 2 * x + rank for rank, x in enumerate(drawn)]
    layout = case.layout if len(shape) == 3 else torch.contiguous_format
    return [x.to(case.dtype).contiguous(memory_format=layout) for x in moved]


def build(case: Case) -> nn.Module:
    torch.manual_seed(5)
    return shake(NETS[case.net]()).train().to(case.dtype).to(memory_format=case.layout)


def train(net: nn.Module, case: Case, ranks: Iterable[int]) -> Results:
    """What two passes over the images of these ranks give, and a third one in evaluation."""
    found: Results = {}
    for number in range(PASSES):
        x = torch.cat([draw(case, number)[rank] for rank in ranks]).requires_grad_()
        y = net(x)
        (y * torch.cat([draw(case, number, outputs=True)[rank] for rank in ranks])).sum().backward()
        found[f"output {number}"], found[f"input gradient {number}"] = y.detach(), x.grad
    found |= {f"gradient of {name}": weight.grad for name, weight in net.named_parameters()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in net.named_buffers()}
    with torch.no_grad():
        found["evaluation"] = net.eval()(torch.cat([draw(case, 9)[rank] for rank in ranks]))
    return found


def synchronised(case: Case, groups: dict[int, dist.ProcessGroup]) -> nn.Module:
    net = build(case)
    synchronise_norms(net, groups[case.group])
    if case.recompute:
        variant = RESNET8 if "resnet" in case.net else OWN
        enable_recomputation(net, case.patterns, variant=variant)
    return net


def run_rank(rank: int, folder: Path, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    found = {str(case): train(synchronised(case, groups), case, [rank]) for case in cases}
    found["copy"] = run_copy(rank, groups)
    found["half"] = run_half(rank, groups)
    found["far"] = {"output": synchronised(FAR, groups)(far_images()[rank]).detach()}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run_ranks(folder: Path, cases: list[Case]) -> list[dict[str, Results]]:
    """What each rank found, by case."""
    # one process imports what they need, and the ranks are forks of it
    set_forkserver_preload(["pytest", "torch.distributed", "phalanx.models.build"])
    start_processes(run_rank, (folder, cases), RANKS, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Results]]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), CASES)


def check_close(found: Tensor, expected: Tensor, *, bound: float, what: str) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= bound, f"{what}: {difference:.1e}"


# --- the tests ---


def check_case(case: Case, ranks: list[dict[str, Results]], *, bound: float) -> None:
    """Compare each group of ranks with one process that has the images of all of them."""
    torchs = replace(case, net=TORCHS.get(case.net, case.net))
    for first in range(0, RANKS, case.group):
        members = range(first, first + case.group)
        expected = train(build(torchs), torchs, members)
        found = [ranks[rank][str(case)] for rank in members]
        assert all(list(part) == list(expected) for part in found)
        for name, wanted in expected.items():
            parts = [part[name] for part in found]
            if name.startswith("buffer"):
                assert all(torch.equal(part, parts[0]) for part in parts), name
                joined = parts[0]
            elif name.startswith("gradient"):
                joined = torch.stack(parts).sum(0)
            elif name == "evaluation" and case.net == "untracked":
                continue  # it has no statistics but those of the images it is given
            else:
                joined = torch.cat(parts)
            check_close(joined, wanted, bound=bound, what=f"{case}: {name}")
        plain = build(torchs)(draw(torchs, 0)[first])
        assert found[0]["output 0"].stride() == plain.stride()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_have_what_one_process_has_with_all_images(case, ranks):
    check_case(case, ranks, bound=BOUND[case.dtype])


@pytest.mark.slow
def test_more_norms_and_networks(tmp_path):
    ranks = run_ranks(tmp_path, MORE_CASES)
    for case in MORE_CASES:
        # in 32 bits, torch's own network is up to 1.5e-5 away from what it gives in 64
        slack = 30 if case.dtype == torch.float32 and "net" in case.net else 1
        check_case(case, ranks, bound=slack * BOUND[case.dtype])


@pytest.mark.parametrize("case", [case for case in CASES if case.recompute], ids=str)
def test_recomputation_changes_no_bit(case, ranks):
    for found in ranks:
        for name, value in found[str(replace(case, recompute=False))].items():
            assert torch.equal(found[str(case)][name], value), name


PLAIN = Case("net")


def run_copy(rank: int, groups: dict[int, dist.ProcessGroup]) -> Results:
    """A net's state after a copy of it was trained, and what the copy gave."""
    net = build(PLAIN)
    calls: list[str] = []
    net[1].register_forward_hook(lambda *_: calls.append("hook"))
    modules, state = list(net.modules()), net.state_dict(keep_vars=True)
    synchronise_norms(net, groups[2])
    after = net.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[name] is state[name] for name in state)
    assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
    other = copy.deepcopy(net)
    found = train(other, PLAIN, [rank])
    assert calls == ["hook"] * (PASSES + 1)
    return found | {f"state {name}": value for name, value in net.state_dict().items()}


def test_a_copy_trains_by_itself_and_names_modules_and_hooks_stay(ranks):
    for found in ranks:
        for name, value in found[str(PLAIN)].items():
            assert torch.equal(found["copy"][name], value), name
        for name, value in build(PLAIN).state_dict().items():
            assert torch.equal(found["copy"][f"state {name}"], value), name


def run_half(rank: int, groups: dict[int, dist.ProcessGroup]) -> Results:
    """Output and gradients of a norm under autocast, and of the same in 32 bits."""
    case, found = Case("norm", dtype=torch.float32), {}
    for dtype in (torch.bfloat16, torch.float32):
        norm = synchronised(case, groups)
        x = draw(case, 0)[rank].bfloat16().to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(x)
        y.backward(draw(case, 0, outputs=True)[rank].bfloat16().to(dtype))
        found |= {f"output {dtype}": y.detach(), f"input {dtype}": x.grad}
        found |= {f"weight {dtype}": norm.weight.grad, f"mean {dtype}": norm.running_mean}
    return found


def test_half_precision_gives_the_32_bit_result_rounded(ranks):
    for rank in ranks:
        found = rank["half"]
        for name in ("output", "input"):
            wanted = found[f"{name} torch.float32"]
            assert wanted.dtype == torch.float32
            assert torch.equal(found[f"{name} torch.bfloat16"], wanted.bfloat16()), name
        for name in ("weight", "mean"):
            wanted = found[f"{name} torch.float32"]
            assert torch.equal(found[f"{name} torch.bfloat16"], wanted), name


FAR = Case("one pass", 4, torch.float32, torch.contiguous_format)


def far_images() -> list[Tensor]:
    """Images whose mean is a million times their spread."""
    return [(draw(FAR, 0)[rank].double() * 1e-2 + 1e4).float() for rank in range(RANKS)]


def test_a_mean_far_larger_than_the_spread_costs_no_digits(ranks):
    exact = torch.cat(far_images()).double()
    norm = shake(nn.BatchNorm2d(CHANNELS)).double()
    found = torch.cat([rank["far"]["output"] for rank in ranks])
    check_close(found.double(), norm(exact).detach(), bound=0.05, what="output")


gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu_only])])
def test_a_rank_alone_has_torchs_norm_on_every_device(device, layout, tmp_path):
    case = Case("norm", layout=layout)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{tmp_path}/rendezvous",
        rank=0,
        world_size=1,
    )
    try:
        norm, plain = build(case).to(device), build(case).to(device)
        synchronise_norms(norm, dist.group.WORLD)
        pull = draw(case, 0, outputs=True)[0].to(device)
        parts = []
        for each in (norm, plain):
            x = draw(case, 0)[0].to(device).requires_grad_()
            y = each(x)
            y.backward(pull)
            parts.append((y, x.grad, each.weight.grad, each.bias.grad, each.running_var))
        for found, expected in zip(*parts, strict=True):
            check_close(found.detach(), expected.detach(), bound=1e-12, what=str(case))
    finally:
        dist.destroy_process_group()
