"""Recomputation: the outputs of some modules are stored, everything between is recomputed.

Why not torch.utils.checkpoint? It calls a module's forward a second time. Batch norm would then
update its running statistics twice, dropout would have to be drawn again, and everything inside a
segment would be in memory at once, needed or not. The recorder here works below modules, on single
operations:

- During the forward pass it sees every operation below autograd and autocast, as one call on plain
  tensors, and records which operation made which tensor from which (`_ForwardRecorder`).
- Where autograd would save a tensor, the hooks of torch.autograd.graph.saved_tensors_hooks save a
  small handle instead (`_pack`). The tensor itself is freed as soon as the network drops it.
- When the backward pass needs the tensor of a handle (`_unpack`), only the operations between the
  nearest available tensors and this one are run again. Operations that change a buffer are never
  among them, so running statistics are updated once.

Three kinds of tensors are always available: those that `store` was called for, inputs from outside
the pass (images, weights), and results that cannot be recomputed because they are random or were
written in place.

Lifetimes need no bookkeeping. Autograd holds handles; a handle holds its tensor's record; a record
holds the operation that makes it; an operation holds the records of its inputs. References in the
other direction are weak, so anything that no handle leads to is freed at once.
"""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.catalog.variant import Variant
from phalanx.models.units import ModelPart, UnitModel
from phalanx.plan.recompute import find_kept_modules, match_modules

_Key = tuple[Any, ...]
_SMALL_BYTES = 16 * 1024  # tensors up to this size are stored: recording would cost as much
# these update the running statistics, arguments 3 and 4, although their schemas do not say so
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_RUNNING_STATISTICS = (3, 4)


def enable_recomputation(
    model: nn.Module, patterns: Sequence[str], *, variant: Variant
) -> tuple[str, ...]:
    """Make training passes store only the outputs of these modules; returns their paths.

    Without patterns the output of every unit is stored. Names, weights, results and gradients
    do not change, and passes without gradients run as before.
    """
    paths = find_kept_modules(variant, patterns, model="the model") or _find_paths(model, patterns)
    if isinstance(model, ModelPart):
        there = {path.replace(".", "/") for path, _ in model.named_modules()}
        paths = tuple(path for path in paths if path in there)
    recorder = _ForwardRecorder()
    model.register_forward_pre_hook(recorder.start)
    for path in paths:
        module = model.get_submodule(path.replace("/", "."))
        module.register_forward_hook(recorder.store)
    # last, so that an output of the whole model can be stored while the recorder is still active
    model.register_forward_hook(recorder.stop, always_call=True)
    return paths


def _find_paths(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The paths in a plugin's network; without patterns, of its units or its children."""
    if patterns:
        names = [path.replace(".", "/") for path, _ in model.named_modules() if path]
        return match_modules(patterns, {name: (name,) for name in names}, model="the network")
    if isinstance(model, UnitModel):
        return tuple(parts[-1].replace(".", "/") for parts in model.units.values())
    return tuple(name for name, _ in model.named_children())


# --- the recorder ---


@dataclass(eq=False, slots=True, weakref_slot=True)
class RecordedTensor:
    """A tensor of a forward pass: stored, or with the operation that makes it."""

    op: "_RecordedOp | None" = None
    stored: Tensor | None = None
    handle: "weakref.ref[_SavedTensorHandle] | None" = None

    def find(self) -> Tensor | None:
        """The tensor, if it is stored, or was recomputed and is still held by a handle."""
        if self.stored is not None:
            return self.stored
        handle = self.handle and self.handle()
        return handle.recomputed if handle else None


@dataclass(eq=False, slots=True, weakref_slot=True)
class _SavedTensorHandle:
    """What autograd saves instead of a tensor; when freed, it frees the recomputed tensor, too."""

    recorded: RecordedTensor
    recomputed: Tensor | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class _RecordedOp:
    """One operation, with records instead of tensors in its arguments."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    inputs: list[RecordedTensor]  # all records among the arguments
    outputs: list[weakref.ref[RecordedTensor] | None] = field(default_factory=list)

    def run(self, tensors: Mapping[RecordedTensor, Tensor]) -> Sequence[Any]:
        """Recompute the outputs; `tensors` has the inputs that are not otherwise available."""
        args = _with_tensors(self.args, tensors)
        if _is_batch_norm(self.func):  # update copies of the statistics, which are then dropped
            for place in _RUNNING_STATISTICS:
                args[place] = args[place] if args[place] is None else args[place].clone()
        kwargs = {name: _with_tensors(part, tensors) for name, part in self.kwargs.items()}
        return _as_tuple(self.func(*args, **kwargs))


def _with_tensors(part: Any, tensors: Mapping[RecordedTensor, Tensor]) -> Any:
    """An argument with its records replaced by tensors."""
    if isinstance(part, RecordedTensor):
        found = part.find()
        return tensors[part] if found is None else found
    if isinstance(part, list | tuple):
        return [_with_tensors(each, tensors) for each in part]
    return part


class _ForwardRecorder(TorchDispatchMode):
    """Records the operations of a model's training passes; `store` keeps a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._records: dict[_Key, RecordedTensor] = {}
        self._by_storage: dict[int, list[RecordedTensor]] = {}  # by address
        # an address is not reused for another storage while a weak reference to it exists
        self._storages: dict[int, StorageWeakRef] = {}
        self._hooks: saved_tensors_hooks | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid torch's wrapper, which would cost more than half as much as the recorder itself."""
        return False

    def start(self, model: nn.Module, _inputs: Any) -> None:
        """A hook: start recording, if the pass is one with gradients."""
        if model.training and torch.is_grad_enabled():
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()
            self.__enter__()

    def store(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        """A hook: store a module's output, so that it need not be recomputed."""
        recorded = self._records.get(_identify(output)) if self._hooks else None
        if recorded is not None and recorded.stored is None:
            recorded.stored = output.detach()

    def stop(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        """A hook: stop recording, also after a failure."""
        if self._hooks is not None:
            self.__exit__(None, None, None)
            self._hooks.__exit__(None, None, None)
        # autograd holds the hooks, and with them this recorder, as long as it holds any handle
        self._hooks, self._records, self._by_storage, self._storages = None, {}, {}, {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and record it if it can be run again."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._run_in_place(func, args, kwargs)
        op = self._record_op(func, args, kwargs)
        # autograd makes a view share the version of its base only after we return
        versions = {t.untyped_storage()._cdata: t._version for t in args if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        for tensor in _as_tuple(out):
            if isinstance(tensor, Tensor):
                version = versions.get(tensor.untyped_storage()._cdata)
                self._record_output(op, tensor, _identify(tensor, version=version))
            else:
                op.outputs.append(None)
        return out

    def _run_in_place(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that writes into its first argument, as x.relu_() does.

        It is recorded as its out-of-place equivalent.
        """
        target: Any = args[0] if args else None
        old = self._records.get(_identify(target)) if isinstance(target, Tensor) else None
        was_stored = old is not None and old.stored is not None
        if isinstance(target, Tensor):
            self._prepare_overwrite(target.untyped_storage()._cdata)
        out_of_place = _find_out_of_place(func)
        if old is None or old.op is None or out_of_place is None:
            return func(*args, **kwargs)
        # autograd increments the version only after we return
        key = _identify(target, version=target._version + 1)
        op = self._record_op(out_of_place, args, kwargs)
        out = func(*args, **kwargs)
        recorded = self._record_output(op, target, key)
        # the stored tensor was overwritten: its memory now stores the new one
        recorded.stored = target.detach() if was_stored else None
        return out

    def _prepare_overwrite(self, address: int) -> None:
        """Before memory is overwritten: make sure that no record depends on its contents."""
        for recorded in self._by_storage.get(address, ()):
            if recorded.stored is not None:
                recorded.stored = recorded.stored.clone() if recorded.op is None else None

    def _record_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _RecordedOp:
        inputs: list[RecordedTensor] = []
        named = {name: self._with_records(part, inputs) for name, part in kwargs.items()}
        return _RecordedOp(func, self._with_records(args, inputs), named, inputs)

    def _with_records(self, part: Any, inputs: list[RecordedTensor]) -> Any:
        """An argument with its tensors replaced by records, which are added to `inputs`."""
        if isinstance(part, Tensor):
            key = _identify(part)
            recorded = self._records.get(key)
            if recorded is None:  # an input from outside the pass
                recorded = self._add(key, part, RecordedTensor(stored=part.detach()))
            inputs.append(recorded)
            return recorded
        if isinstance(part, list | tuple):
            return [self._with_records(each, inputs) for each in part]
        return part

    def _record_output(self, op: _RecordedOp, tensor: Tensor, key: _Key) -> RecordedTensor:
        """Record which operation made a tensor."""
        recorded = RecordedTensor(op)
        op.outputs.append(weakref.ref(recorded))
        self._add(key, tensor, recorded)
        return recorded

    def _add(self, key: _Key, tensor: Tensor, recorded: RecordedTensor) -> RecordedTensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)
        self._by_storage.setdefault(storage._cdata, []).append(recorded)
        return self._records.setdefault(key, recorded)  # an alias of a known tensor is that tensor

    def _pack(self, tensor: Tensor) -> _SavedTensorHandle:
        """The handle for a tensor that autograd wants to save; one per tensor."""
        key = _identify(tensor)
        recorded = self._records.get(key) or self._add(key, tensor, RecordedTensor())
        if recorded.stored is None and (
            recorded.op is None or tensor.untyped_storage().nbytes() <= _SMALL_BYTES
        ):
            # a leaf has no graph to be detached from, and detaching would be recorded, too
            recorded.stored = tensor if tensor.is_leaf else tensor.detach()
        handle = recorded.handle and recorded.handle()
        if not handle:
            handle = _SavedTensorHandle(recorded)
            recorded.handle = weakref.ref(handle)
        return handle


def _identify(tensor: Tensor, *, version: int | None = None) -> _Key:
    """A key that identifies a tensor within its pass: its memory, shape and version."""
    return (
        tensor.untyped_storage()._cdata,
        tensor._version if version is None else version,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def _as_tuple(out: Any) -> tuple[Any, ...]:
    """The outputs of an operation, one or many."""
    return tuple(out) if isinstance(out, list | tuple) else (out,)


@lru_cache(maxsize=256)
def _is_batch_norm(func: Any) -> bool:
    """Whether an operation updates running statistics."""
    return func._schema.name.removeprefix("aten::") in _BATCH_NORMS


@lru_cache(maxsize=256)
def _find_out_of_place(func: Any) -> Any:
    """The out-of-place equivalent of an operation, relu for relu_; None if there is none."""
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or func._overloadname not in packet.overloads():
        return None
    return getattr(packet, func._overloadname)


def _unpack(handle: _SavedTensorHandle) -> Tensor:
    """The tensor of a handle, recomputed if necessary."""
    found = handle.recorded.find()
    if found is not None:
        return found
    # casts were recorded as separate operations: autocast must not add more
    with torch.no_grad(), torch._C._DisableAutocast():
        return _recompute(handle.recorded)


def _recompute(wanted: RecordedTensor) -> Tensor:
    """Run the operations that lead to a tensor; each result is freed after its last use.

    A result that has a handle is kept there: it will be needed soon.
    """
    ops = _find_ops(wanted)
    uses = Counter(recorded for op in ops for recorded in op.inputs)
    uses[wanted] += 1
    results: dict[RecordedTensor, Tensor] = {}
    for op in ops:
        for output, tensor in zip(op.outputs, op.run(results), strict=True):
            recorded = output() if output else None
            if recorded is None:
                continue
            handle = recorded.handle and recorded.handle()
            if handle:
                handle.recomputed = tensor
            if uses[recorded]:
                results[recorded] = tensor
        for recorded in op.inputs:
            uses[recorded] -= 1
            if not uses[recorded]:
                results.pop(recorded, None)
    return results[wanted]


def _find_ops(wanted: RecordedTensor) -> list[_RecordedOp]:
    """The operations to run, each after those whose results it needs."""
    order: list[_RecordedOp] = []
    seen: set[_RecordedOp] = set()
    stack = [(wanted.op, False)]
    while stack:
        op, inputs_done = stack.pop()
        assert op is not None, "a tensor without an operation is stored"
        if inputs_done:
            order.append(op)
        elif op not in seen:
            seen.add(op)
            missing = [recorded.op for recorded in op.inputs if recorded.find() is None]
            stack += [(op, True), *((need, False) for need in missing)]
    return order
