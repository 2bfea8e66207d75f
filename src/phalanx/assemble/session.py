"""The session: everything a run computes with, ready to train or score.

Every command that trains or scores opens one; none builds these parts itself.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.assemble.build import (
    build_network,
    build_normaliser,
    build_state,
    build_step_options,
    describe_other_classes,
    prepare_kernels,
)
from phalanx.assemble.dataset_summary import (
    Preprocessing,
    build_input_spec,
    build_preprocessing,
)
from phalanx.assemble.feed import Feed, LoadedFeed, open_feed
from phalanx.assemble.fork import describe_discarded_state
from phalanx.assemble.memory import MemoryMeter
from phalanx.assemble.prepare import StartingPoint
from phalanx.assemble.rank_context import build_norm_gatherer, build_rank_context, build_step_passes
from phalanx.assemble.torch_setup import find_scoring_device, prepare_torch
from phalanx.config.schema import Config
from phalanx.data.loading.device import Normaliser
from phalanx.data.loading.gpu_decode import find_gpu_decode_problem
from phalanx.data.loading.gpu_share import ImageCheck
from phalanx.data.loading.trained_images import keep_trained_checksums
from phalanx.disk import expand_home
from phalanx.engine.checkpoint import convert_content_errors, load_checkpoint, load_weights
from phalanx.engine.checkpoint_store import AVERAGE_WEIGHTS, FACTS, WEIGHTS, read_files
from phalanx.engine.evaluate import Score, ValidBatch, evaluate
from phalanx.engine.probe import Probe
from phalanx.engine.stages import StagedScoring
from phalanx.engine.state import MetricSums, Throughput, TrainState
from phalanx.engine.step import (
    ForwardBackward,
    GatherNorms,
    MicroBatch,
    compute_logits,
    train_step,
)
from phalanx.errors import DataError
from phalanx.fused.tuning import ChoiceStore, describe_temporary_cache, set_compiler_cache
from phalanx.models.airbench import has_whitening, set_whitening_filters
from phalanx.models.units import UnitModel
from phalanx.parallel.ranks import Ranks
from phalanx.plan.plan import Plan

if TYPE_CHECKING:
    from phalanx.inference.folded_model import FoldedModel

_IMAGES_WHITENED = 2048  # to compute a whitening layer from: two million patches of CIFAR-10


class Session:
    """A model that can train and score, with its optimizer state, its batches and its step.

    Made from Config, Plan and an optional checkpoint. Parts are built when they are first used:
    scoring needs no optimizer, and predicting a few files needs no feed. Use it as a context
    manager: worker processes end with the block.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        *,
        start: StartingPoint | None = None,
        classes: Sequence[str] = (),
        ranks: Ranks | None = None,
        folder: Path | None = None,
        image_check: ImageCheck | None = None,
    ) -> None:
        self.config, self.plan, self.classes = config, plan, tuple(classes)
        self._folder = folder  # of a run, where its choice of kernels is stored
        self._image_check = image_check  # what the run knows of its images, to check the others
        self.rank_context = build_rank_context(
            plan, ranks, scores_in_stages=config.pipeline.pipeline_validation_model
        )
        local_rank = ranks.world.local_rank if ranks else 0
        cache = config.machine.model_cache_path
        self._cache = set_compiler_cache(expand_home(cache) if cache else None)
        self.device = prepare_torch(plan, local_rank=local_rank)
        self.memory = MemoryMeter(self.device)  # created before the first weight
        self.preprocessing = build_preprocessing(config, plan)
        if start is not None and start.weights_only:
            # use the classes and the preprocessing of its training
            self.classes = tuple(start.facts["classes"])
            with convert_content_errors(start.checkpoint / FACTS):
                self.preprocessing = Preprocessing(**start.facts["preprocessing"])
        self.scoring_device = find_scoring_device(config, self.device, local_rank=local_rank)
        self.normaliser = build_normaliser(self.preprocessing, self.device, config)
        self.options = build_step_options(config, plan, self.device)
        self.model = build_network(
            config,
            plan,
            self.device,
            stage=self.rank_context.stage,
            with_init_weights=start is None,
        )
        # what the user should know about how the model trains or scores
        self.notes = describe_other_classes(config, self.classes) if start is None else []
        if cache is None and self.device.type == "cuda":
            self.notes += describe_temporary_cache(self._cache)
        self._start, self._exits = start, ExitStack()
        self._folded_models: dict[nn.Module, FoldedModel | None] = {}
        if start is not None and not start.weights_only:
            self.state  # noqa: B018 - restored now, to report a checkpoint that does not fit
        elif start is not None:
            file = AVERAGE_WEIGHTS if start.use == "score average" else WEIGHTS
            content = read_files(start.checkpoint, file)[file]
            load_weights(self.model, content, where=start.checkpoint / file)

    @cached_property
    def state(self) -> TrainState:
        """The training state at the starting point: fresh, or restored from the checkpoint."""
        start = self._start
        if start is None and self.config.model.init_weights is None and has_whitening(self.model):
            set_whitening_filters(self.model, self.feed.sample_images(_IMAGES_WHITENED))
            # another kind of processor may round differently: all ranks take rank 0's values
            own = {name: buffer.cpu() for name, buffer in self.model.named_buffers()}
            self.model.load_state_dict(self.rank_context.gather(own)[0], strict=False)
        if self.plan.acceleration.own_kernels and isinstance(self.model, UnitModel):
            self._fuse(self.model)
        state = build_state(self.model, self.config, self.plan, self.rank_context)
        if start is not None:
            with_optimizer = not describe_discarded_state(start, self.config)
            load_checkpoint(state, start.checkpoint, with_optimizer=with_optimizer)
            if start.use == "fork":  # keeps the parent's progress, but not its findings
                state.step = start.first_step(self.plan)
                state.scores, state.sums = {}, MetricSums()
                state.bad_images, state.image_check = {}, None
                state.image_checksums = keep_trained_checksums(state.image_checksums)
                state.throughput = Throughput()
                state.restart_counts()
        return state

    def _fuse(self, model: UnitModel) -> None:
        """Make units train with our own kernels, whose code is imported only for a GPU."""
        from phalanx.fused.enable import describe_unfused_units, fuse_units
        from phalanx.fused.half_copies import cast_before_passes

        assert self.options.half is not None
        self.notes += describe_unfused_units(fuse_units(model, self.options.half), model)
        cast_before_passes(model, self.options.half)

    @cached_property
    def _forward_backward(self) -> ForwardBackward:
        if self.plan.acceleration.own_kernels:
            store = ChoiceStore(self._folder, self._cache)
            prepare_kernels(self.model, self.plan, self.rank_context, store)
            self.memory.reset_peak()
        return build_step_passes(
            self.model,
            self.options,
            self.plan,
            self.rank_context,
            bucket_mib=self.config.machine.bucket_mib,
            statistics=lambda: self.state.replica_statistics,
        )

    @cached_property
    def feed(self) -> Feed:
        """The training batches, and the validation images."""
        feed = self._exits.enter_context(self.open_feed(self.plan))
        self.notes += feed.new_notes
        feed.new_notes.clear()
        return feed

    @cached_property
    def valid_feed(self) -> Feed:
        """The validation images of training, on the device that scores."""
        return self.feed if self.scoring_device == self.device else self._open_scoring_feed()

    def open_feed(self, plan: Plan) -> AbstractContextManager[Feed]:
        """The batches of a plan; worker processes end with the block."""
        return open_feed(
            build_input_spec(self.config, plan),
            plan,
            self.normaliser,
            self.config,
            context=self.rank_context,
            check=self._image_check,
        )

    @cached_property
    def scoring_feed(self) -> Feed:
        """Only the validation images, preprocessed as in training, with the model's labels."""
        feed = self._open_scoring_feed(
            order=None,
            image_size=self.preprocessing.image_size,
            transform=self.preprocessing.transform,
            upright=self.preprocessing.exif_orientation,
        )
        if isinstance(feed, LoadedFeed):
            found = feed.loader.source("valid").classes
            if self.config.data.data == "generated":  # noise has no classes to match
                feed.relabel(np.arange(len(found)) % len(self.classes))
            else:
                feed.relabel(_match_classes(found, self.classes))
        return feed

    def _open_scoring_feed(self, **spec_changes: Any) -> Feed:
        """A feed on the device that scores, closed with the session."""
        # a copy of the dataset on the device or in memory pays off only over many epochs
        changes = dict.fromkeys(("keep-on-device", "dataset-cache"), False)
        if self.config.data.gpu_decode and find_gpu_decode_problem(self.scoring_device):
            changes["gpu-decode"] = False
        config = self.config.replace_options(changes)
        spec = replace(build_input_spec(config, self.plan), **spec_changes)
        normaliser = build_normaliser(self.preprocessing, self.scoring_device, config)
        feed = open_feed(spec, self.plan, normaliser, config, context=self.rank_context)
        return self._exits.enter_context(feed)

    def train_step(
        self, passes: Sequence[MicroBatch], lr: float, *, probe: Probe | None = None
    ) -> Tensor:
        """Run one optimizer step; [loss, gradient norm, top-1], still on the device."""
        with probe or nullcontext():
            return train_step(
                self.state,
                passes,
                lr,
                options=self.options,
                forward_backward=self._forward_backward,
                loss_scale=self.plan.loss_scale.at(self.state.step),
                gather_norms=self._gather_norms,
            )

    def _gather_norms(self, norms: Tensor) -> Tensor:
        """The gradient norms of the whole model, from those of this process."""
        return self._norm_gatherer(norms)  # built now: it counts the gradients that a pass leaves

    @cached_property
    def _norm_gatherer(self) -> GatherNorms:
        return build_norm_gatherer(self.rank_context, self.state.optimizer)

    def gather_weights(self) -> dict[str, Tensor]:
        """Weights and buffers of the whole model; if it has stages, all of them must call this."""
        own, links = self.model.state_dict(), self.rank_context.links
        if links is None:
            return own
        host = {name: tensor.detach().cpu() for name, tensor in own.items()}
        return {name: tensor for part in links.gather(host) for name, tensor in part.items()}

    @cached_property
    def _scoring_model(self) -> nn.Module:
        return build_network(self.config, self.plan, self.scoring_device)

    def _find_folded(self, model: nn.Module) -> "FoldedModel | None":
        """The model with its norms folded in, for scoring; None if it scores as it is."""
        if self.plan.determinism == "strict" or self.config.machine.kernels == "torch":
            return None  # folding rounds differently, and cuDNN picks kernels by measuring
        from phalanx.inference.folded_model import fold_model

        folded = self._folded_models.get(model)
        if model not in self._folded_models or (folded is not None and not folded.is_current):
            self._folded_models[model] = fold_model(model, self.options.half)
        return self._folded_models[model]

    def find_scoring_model(self, model: nn.Module | None = None) -> nn.Module:
        """The module that scores for this model, or one of its kind, with its current weights."""
        model = self.model if model is None else model
        folded = self._find_folded(model)
        if folded is None:
            return model.eval()
        folded.refresh()
        return folded

    @cached_property
    def _staged_scoring(self) -> StagedScoring:
        assert self.rank_context.links is not None
        return StagedScoring(self.model, self.rank_context.links, self.rank_context.gather)

    def evaluate(
        self, batches: Iterable[ValidBatch], *, interrupted: Callable[[], bool] = lambda: False
    ) -> Score | None:
        """The score of the current model; None if it was interrupted.

        With several ranks, each scores its share of the batches, and all get the whole score.
        """
        model, options, gather = self.model, self.options, self.rank_context.gather
        if self.rank_context.scores_in_stages:
            staged = self._staged_scoring
            batches = staged.share(iter(batches), interrupted)
            model, interrupted, gather = staged, lambda: staged.interrupted, staged.gather
        elif self.scoring_device != self.device or self.rank_context.links is not None:
            model = self._scoring_model
            model.load_state_dict(self.gather_weights())
            options = build_step_options(self.config, self.plan, self.scoring_device)
        return evaluate(
            self.find_scoring_model(model),
            batches,
            options=options,
            interrupted=interrupted,
            gather=gather,
        )

    def compute_logits(self, pixels: NDArray[np.uint8]) -> Tensor:
        """The logits of images that already have the model's size."""
        images = self._pixel_normaliser(pixels)
        return compute_logits(self.find_scoring_model(), images, self.options)

    @cached_property
    def _pixel_normaliser(self) -> Normaliser:
        return build_normaliser(self.preprocessing, self.device)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *failure: object) -> None:
        self._exits.close()


def _match_classes(found: Sequence[str], known: Sequence[str]) -> NDArray[np.int64]:
    """For each class of the data, its number in the model; DataError for an unknown class."""
    numbers = {name: number for number, name in enumerate(known)}
    unknown = [name for name in found if name not in numbers]
    if unknown:
        raise DataError(
            f"the data has classes that the model was not trained on: {', '.join(unknown[:5])}; "
            f"remove or rename them: it knows {', '.join(known[:10])}{', ...' * (len(known) > 10)}"
        )
    return np.array([numbers[name] for name in found], np.int64)
