"""A forward pass that autograd keeps nothing of but recipes: values are made again when asked for.

Every operation is noted below autograd and autocast, where it is one call on plain tensors. What
autograd would keep becomes a ticket. In the backward pass a ticket is exchanged for its value: the
operations between the nearest values at hand and this one are run again, and no others. Nothing
that changes a buffer is ever one of them, so running statistics move once.

What cannot be run again, because it draws random numbers or writes into its input, is not noted:
its result is at hand like a weight.
"""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_Key = tuple[Any, ...]
_SMALL_BYTES = 16 * 1024  # kept as it is: the recipe would weigh as much
# these move the running statistics, arguments 3 and 4, and their schemas do not say so
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_RUNNING = (3, 4)


class RecordedTensor:
    """One tensor of a forward pass: at hand, or the recipe that makes it again."""

    __slots__ = ("__weakref__", "held", "recipe", "ticket")

    def __init__(self, recipe: "_RecordedOp | None" = None, held: Tensor | None = None):
        self.recipe, self.held = recipe, held
        self.ticket: weakref.ref[_SavedTensorHandle] | None = None

    def at_hand(self) -> Tensor | None:
        """The tensor, if it is stored or was made again for a part of autograd that waits."""
        if self.held is not None:
            return self.held
        ticket = self.ticket and self.ticket()
        return ticket.made if ticket else None

    def give(self, tensor: Tensor) -> None:
        """Leave a tensor that was made again to those that wait for it, while they do."""
        ticket = self.ticket and self.ticket()
        if ticket:
            ticket.made = tensor


class _SavedTensorHandle:
    """What autograd holds in place of a tensor; once it lets go, the tensor is gone too."""

    __slots__ = ("__weakref__", "made", "value")

    def __init__(self, value: RecordedTensor):
        self.value = value
        self.made: Tensor | None = None


class _RecordedOp:
    """One operation, with values in the places of tensors."""

    __slots__ = ("__weakref__", "args", "func", "inputs", "kwargs", "makes")

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: list[RecordedTensor],
    ):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.inputs = inputs  # all values among the arguments
        self.makes: list[weakref.ref[RecordedTensor] | None] = []

    def run(self, tensors: Mapping[RecordedTensor, Tensor]) -> Sequence[Any]:
        """The outputs once more; `tensors` are the inputs that are not at hand."""
        args = _filled(self.args, tensors)
        if _is_batch_norm(self.func):
            for place in _RUNNING:
                args[place] = args[place] if args[place] is None else args[place].clone()
        kwargs = {name: _filled(part, tensors) for name, part in self.kwargs.items()}
        return _as_tuple(self.func(*args, **kwargs))


def _filled(part: Any, tensors: Mapping[RecordedTensor, Tensor]) -> Any:
    """Arguments with tensors in the places of values."""
    if isinstance(part, RecordedTensor):
        held = part.at_hand()
        return tensors[part] if held is None else held
    return [_filled(each, tensors) for each in part] if isinstance(part, list | tuple) else part


class ForwardRecorder(TorchDispatchMode):
    """Notes the operations of one forward pass; `store` says which values stay."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[_Key, RecordedTensor] = {}
        self._addresses: dict[int, StorageWeakRef] = {}  # none is given out twice while noted
        self._at: dict[int, list[RecordedTensor]] = {}  # by address
        self._hooks: saved_tensors_hooks | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call us without a wrapper that costs more than half of what we do."""
        return False

    def __enter__(self) -> "ForwardRecorder":
        self._hooks = saved_tensors_hooks(self._exchange, _made_again)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        if self._hooks is not None:
            self._hooks.__exit__(*failure)
        # autograd holds the hooks, and with them this tape, as long as it holds any ticket
        self._hooks, self._known, self._addresses, self._at = None, {}, {}, {}

    def store(self, tensor: Tensor) -> None:
        """Keep this tensor in memory: nothing before it is run again for its sake."""
        value = self._known.get(_key_of(tensor))
        if value is not None and value.held is None:
            value.held = tensor.detach()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note it where it can be run again."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._overwrite(func, args, kwargs)
        recipe = self._recipe(func, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in _as_tuple(out):
            self._note(recipe, tensor)
        return out

    def _overwrite(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that writes into its first argument, as x.relu_() does."""
        target: Any = args[0] if args else None
        old = self._known.get(_key_of(target)) if isinstance(target, Tensor) else None
        was_stored = old is not None and old.held is not None
        if isinstance(target, Tensor):
            self._let_go(target.untyped_storage()._cdata)
        twin = _twin_of(func)
        if old is None or old.recipe is None or twin is None:
            return func(*args, **kwargs)
        key = _key_of(target, version=target._version + 1)
        recipe = self._recipe(twin, args, kwargs)
        out = func(*args, **kwargs)
        value = self._note(recipe, target, key=key)
        # what was stored is overwritten: the memory holds the new value instead
        value.held = target.detach() if was_stored else None
        return out

    def _let_go(self, address: int) -> None:
        """Before memory is written to: no value may count on what it holds now."""
        for value in self._at.get(address, ()):
            if value.held is not None:
                value.held = value.held.clone() if value.recipe is None else None

    def _recipe(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _RecordedOp:
        inputs: list[RecordedTensor] = []
        named = {name: self._noted(part, inputs) for name, part in kwargs.items()}
        return _RecordedOp(func, self._noted(args, inputs), named, inputs)

    def _noted(self, part: Any, inputs: list[RecordedTensor]) -> Any:
        """The same arguments with values for tensors; a tensor from outside is at hand."""
        if isinstance(part, Tensor):
            key = _key_of(part)
            value = self._known.get(key) or self._add(key, part, RecordedTensor(held=part.detach()))
            inputs.append(value)
            return value
        if isinstance(part, list | tuple):
            return [self._noted(each, inputs) for each in part]
        return part

    def _note(self, recipe: _RecordedOp, tensor: Any, *, key: _Key | None = None) -> RecordedTensor:
        """Remember what made a tensor."""
        value = RecordedTensor(recipe)
        recipe.makes.append(weakref.ref(value) if isinstance(tensor, Tensor) else None)
        if isinstance(tensor, Tensor):
            self._add(key or _key_of(tensor), tensor, value)
        return value

    def _add(self, key: _Key, tensor: Tensor, value: RecordedTensor) -> RecordedTensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._addresses:
            self._addresses[storage._cdata] = StorageWeakRef(storage)
        self._at.setdefault(storage._cdata, []).append(value)
        return self._known.setdefault(key, value)  # an alias of a known tensor is that tensor

    def _exchange(self, tensor: Tensor) -> _SavedTensorHandle:
        """A ticket for a tensor that autograd wants to keep."""
        key = _key_of(tensor)
        value = self._known.get(key) or self._add(
            key, tensor, RecordedTensor(held=_without_past(tensor))
        )
        if value.held is None and tensor.untyped_storage().nbytes() <= _SMALL_BYTES:
            value.held = _without_past(tensor)
        ticket = value.ticket and value.ticket()
        if not ticket:
            ticket = _SavedTensorHandle(value)
            value.ticket = weakref.ref(ticket)
        return ticket


def _key_of(tensor: Tensor, *, version: int | None = None) -> _Key:
    """What tells a value from all others of its pass: its memory, its shape and its age."""
    return (
        tensor.untyped_storage()._cdata,
        tensor._version if version is None else version,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def _without_past(tensor: Tensor) -> Tensor:
    """The tensor alone; where it has none anyway, an operation less that the tape would note."""
    return tensor if tensor.is_leaf else tensor.detach()


def _as_tuple(out: Any) -> tuple[Any, ...]:
    """The outputs of an operation, one or many."""
    return tuple(out) if isinstance(out, list | tuple) else (out,)


@lru_cache(maxsize=256)
def _is_batch_norm(func: Any) -> bool:
    """Whether an operation moves running statistics."""
    return func._schema.name.removeprefix("aten::") in _BATCH_NORMS


@lru_cache(maxsize=256)
def _twin_of(func: Any) -> Any:
    """The operation that gives what this one writes: relu of relu_. None where there is none."""
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or func._overloadname not in packet.overloads():
        return None
    return getattr(packet, func._overloadname)


def _made_again(ticket: _SavedTensorHandle) -> Tensor:
    """The tensor of a ticket."""
    found = ticket.value.at_hand()
    if found is not None:
        return found
    with torch.no_grad(), torch._C._DisableAutocast():
        return _run_again(ticket.value)


def _run_again(wanted: RecordedTensor) -> Tensor:
    """A value by the recipes that lead to it; each value is dropped after its last use."""
    recipes = _recipes_for(wanted)
    uses = Counter(value for recipe in recipes for value in recipe.inputs)
    uses[wanted] += 1
    made: dict[RecordedTensor, Tensor] = {}
    for recipe in recipes:
        for place, out in zip(recipe.makes, recipe.run(made), strict=True):
            value = place() if place else None
            if value is not None:
                value.give(out)
                made |= {value: out} if uses[value] else {}
        for value in recipe.inputs:
            uses[value] -= 1
            if not uses[value]:
                made.pop(value, None)
    return made[wanted]


def _recipes_for(wanted: RecordedTensor) -> list[_RecordedOp]:
    """The recipes to run, those that others need first."""
    order: list[_RecordedOp] = []
    seen: set[_RecordedOp] = set()
    waiting = [(wanted.recipe, False)]
    while waiting:
        recipe, ready = waiting.pop()
        assert recipe is not None, "a value without a recipe is at hand"
        if ready:
            order.append(recipe)
        elif recipe not in seen:
            seen.add(recipe)
            missing = [value.recipe for value in recipe.inputs if value.at_hand() is None]
            waiting += [(recipe, True), *((need, False) for need in missing)]
    return order
