"""What the forward leaves for the backward, resting elsewhere meanwhile. Knows what is taken, and in which form; not where it rests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.core.errors import OffloadError
from shardwise.devices import torch_private
from shardwise.runtime.flat import FlatState

LEAST_BYTES = 4096
"""What is smaller stays: it would take longer to send than it is worth."""


MOST_STRETCH = 2
"""How much more memory than elements a tensor may span, to be taken with all that lies between."""


class Kept(Protocol):
    """A line of numbers that rests somewhere, for as long as it is held."""

    def bring(self) -> torch.Tensor:
        """The numbers on their device again, in memory of their own.

        Raises:
            OffloadError: They cannot be read.
        """
        ...


class Place(Protocol):
    """Where saved tensors rest."""

    @property
    def is_open(self) -> bool:
        """Whether anything more can be kept."""
        ...

    def suits(self, device: torch.device) -> bool:
        """Whether tensors of a device rest better here."""
        ...

    def keep(self, line: torch.Tensor) -> Kept:
        """Take a dense line in.

        Raises:
            OffloadError: There is no room.
        """
        ...

    def fail(self, error: OffloadError) -> None:
        """Note that something could not be read or written: all ranks stop when they next meet."""
        ...


class Watch(Protocol):
    """Who keeps watch over the memory of a model's device."""

    @property
    def flats(self) -> Sequence[FlatState]:
        """The buffers of the model's parameters."""
        ...

    def note_activations(self) -> None:
        """Look at what is held now: it is about to change."""
        ...


@dataclass(frozen=True)
class _Form:
    """How a tensor lies in the stretch of memory that it spans."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    stretch: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        """That of a tensor which has elements."""
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(size, stride, 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))

    def line(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stretch of memory that a tensor shows."""
        return tensor.as_strided((self.stretch,), (1,))

    def view(self, line: torch.Tensor) -> torch.Tensor:
        """The tensor in such a stretch."""
        return line.as_strided(self.size, self.stride)


class _Shared:
    """Numbers that one or more saved tensors show. Once brought they stay until all of these have them, and are read once.

    While it lives, the identity of the storage that they came from is nobody else's.
    """

    def __init__(self, kept: Kept, source: torch.Tensor) -> None:
        self._kept = kept
        self._source = StorageWeakRef(source.untyped_storage())
        self._back: torch.Tensor | None = None
        self._waiting: set[int] = set()
        self._holders: set[int] = set()

    def add(self, holder: int) -> None:
        """One more saved tensor shows them."""
        self._holders.add(holder)
        self._waiting.add(holder)

    def remove(self, holder: int) -> None:
        """A saved tensor is not needed any more."""
        self._holders.discard(holder)
        self._brought(holder)

    def bring(self, holder: int) -> torch.Tensor:
        """The line on its device."""
        values = self._kept.bring() if self._back is None else self._back
        self._back = values
        self._brought(holder)
        return values

    def _brought(self, holder: int) -> None:
        self._waiting.discard(holder)
        if not self._waiting:
            self._back = None
            self._waiting = set(self._holders)  # A graph that is retained may be gone through again.


class Saved:
    """One saved tensor that rests elsewhere, for as long as autograd may ask for it."""

    def __init__(self, shared: _Shared, form: _Form, dtype: torch.dtype, device: torch.device) -> None:
        self._shared = shared
        self.form = form
        self.dtype = dtype
        self.device = device
        shared.add(id(self))

    def bring(self) -> torch.Tensor:
        """The tensor on its device again.

        Raises:
            OffloadError: It cannot be read.
        """
        return self.form.view(self._shared.bring(id(self)))

    def __del__(self) -> None:
        self._shared.remove(id(self))


class Room:
    """Decides which saved tensors rest elsewhere, takes them in and brings them back. What is saved several times is kept once."""

    def __init__(self, watch: Watch, modules: Iterable[nn.Module], place: Place) -> None:
        self._watch = watch
        self._modules = tuple(modules)
        self._place = place
        self._resident: set[int] = set()
        self._known: WeakValueDictionary[tuple[object, ...], _Shared] = WeakValueDictionary()
        """By memory, version and stretch."""

    _kinds: tuple[type, ...] = (torch.Tensor, nn.Parameter)
    """What is taken of tensors."""

    def look_around(self) -> None:
        """A call begins: note the memory of weights and buffers, which stays in any case."""
        found = [flat.full for flat in self._watch.flats if flat.full is not None]
        for module in self._modules:
            found += torch_private.buffers_of(module)
            found += [param for param in module.parameters(recurse=False) if type(param) is nn.Parameter]
        self._resident = {torch_private.storage_key(tensor) for tensor in found}

    def put(self, tensor: torch.Tensor) -> Saved | None:
        """Take a tensor in; None if it stays."""
        if not self._takes(tensor):
            return None
        self._watch.note_activations()
        with torch.no_grad():
            values, form = tensor.detach(), _Form.of(tensor)
            if form.stretch > MOST_STRETCH * tensor.numel():
                values = values.contiguous()  # It shows but little of its memory.
                form = _Form.of(values)
            # As it lies in memory, so that it comes back in the same form and kernels add in the same order.
            key = (torch_private.storage_key(values), values.storage_offset(), form.stretch, values.dtype, tensor._version)
            shared = self._known.get(key)
            if shared is None:
                try:
                    shared = _Shared(self._place.keep(form.line(values)), values)
                except OffloadError as error:
                    self._place.fail(error)
                    return None
                self._known[key] = shared
        return Saved(shared, form, tensor.dtype, tensor.device)

    def bring(self, saved: Saved) -> torch.Tensor:
        """A tensor again. Where it cannot be read, numbers that are none: peers wait for what is made of it, and are told."""
        try:
            with torch.no_grad():
                values = saved.bring()
        except OffloadError as error:
            self._place.fail(error)
            is_number = saved.dtype.is_floating_point or saved.dtype.is_complex
            values = saved.form.view(
                torch.full((saved.form.stretch,), float("nan") if is_number else 0, dtype=saved.dtype, device=saved.device)
            )
        self._watch.note_activations()
        return values

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Activations of some size: not parameters and buffers, which stay anyway, nor tensors of other libraries' kinds."""
        is_plain = type(tensor) in self._kinds and tensor.layout is torch.strided and not tensor.is_quantized
        return (
            is_plain
            and tensor.nbytes >= LEAST_BYTES
            and not (tensor.is_leaf and tensor.requires_grad)
            and self._place.suits(tensor.device)
            and self._place.is_open
            and torch_private.storage_key(tensor) not in self._resident
        )
