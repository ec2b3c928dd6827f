"""Pushes an optimizer's gradients to its session, in step() or as backward() makes them."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Sequence

import torch

from optstate import errors
from optstate._torch.device.backends import backend_of, to_list
from optstate._torch.gradients.gathered import Gradients
from optstate._torch.gradients.on_device import DeviceGradients, runs_of
from optstate._torch.gradients.views import GradientViews
from optstate._torch.parameters.indirect import IndirectCopies
from optstate._torch.shards import has_part, local_gradient, local_of
from optstate._torch.tensors import (
    DTYPES,
    dtype_of,
    equal_bits,
    gradient_of,
    integer_bits,
    layout_of,
    memory_view,
    parts_of,
    shape_of,
)
from optstate._torch.warn import warn
from optstate.session import Piece, Session
from optstate.session_spec import ParameterSpec


class GradientPusher:
    """Pushes the gradients of an optimizer's parameters, in order, to a session.

    The client library copies contiguous gradients in host memory straight from
    their addresses; torch copies those with other strides, and devices copy their own.

    Threads: one at a time, like the optimizer.
    """

    def __init__(
        self,
        session: Session,
        parameters: Sequence[torch.Tensor],
        specs: Sequence[ParameterSpec],
        *,
        copies: IndirectCopies,
        can_take_back: bool,
        views: bool,
    ) -> None:
        """copies: of the parameters, which end before anything is pushed. can_take_back:
        gradients pushed in a step's first micro-step are not yet part of a sum over several
        ranks. views: gradients may be views of the gradient area."""
        self._session = session
        self._can_take_back = can_take_back
        self._parameters = list(parameters)
        self._indices = range(len(self._parameters))
        self._parts = parts_of(len(self._parameters))
        self._specs = specs
        self._shapes = [local_of(parameter).shape for parameter in self._parameters]
        # How to get at a gradient: of a DTensor, at this rank's part.
        has_parts = any(map(has_part, self._parameters))
        self._gradient_of = local_gradient if has_parts else gradient_of
        self._dtypes = [DTYPES[spec.gradient_dtype] for spec in specs]
        self._owned: dict[int, Piece] = {piece.parameter: piece for piece in session.pieces}
        # Gradients in the gradient area; None: they are copied there.
        self.views: GradientViews | None = None
        if views:
            self.views = GradientViews(session, self._parameters, self._dtypes, self._owned)
        self._copies = copies
        self._on_device = DeviceGradients(session, self._owned, self._dtypes, copies)
        # Whether copies that DistributedDataParallel has on a device differ from what was pushed.
        self._doubts: list[torch.Tensor] = []
        # Gradients that were pushed early: the tensor (kept, so that no other tensor gets
        # its address), the address of its values, and its version.
        self._pushed: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._index_of = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        # Whether to say once that backward() runs again without a step() in between.
        self.says_lacking_step = False

    @property
    def area_bytes(self) -> int:
        """Size of this rank's gradient area, without gaps between the pieces."""
        pieces = self._owned.values()
        return sum(piece.numel * self._dtypes[piece.parameter].itemsize for piece in pieces)

    def gather(self, *, anew: bool = False) -> Gradients:
        """Collects all gradients for push(). Raises when one is of a kind that cannot
        be pushed. anew: gradients that push_early() pushed have changed since in a way
        that leaves no trace.
        """
        found = Gradients()
        found.takes_back = bool(self._pushed) and (
            anew or self._has_other_copies() or not all(map(self._is_pushed, self._pushed))
        )
        pushed = () if found.takes_back else self._pushed
        for part in self._parts:
            indices: Sequence[int] = self._indices[part]
            gradients = list(map(self._gradient_of, self._parameters[part]))
            lacks = any(map(operator.is_, gradients, itertools.repeat(None)))
            if lacks:
                missing = [i for i, each in zip(indices, gradients) if each is None]
                self._check_missing(missing)
                found.missing += missing
            if pushed or lacks:
                new = [
                    (index, gradient)
                    for index, gradient in zip(indices, gradients)
                    if gradient is not None and index not in pushed
                ]
                indices = [index for index, _ in new]
                gradients = [gradient for _, gradient in new]
            self._check_gradients(indices, gradients)
            found.add(indices, gradients)
        if self.views is not None:
            self.views.settle(found)
        return found

    def check(self) -> None:
        """Raises what gather() does when a gradient is of a kind that cannot be pushed."""
        for part in self._parts:
            indices: Sequence[int] = self._indices[part]
            gradients = list(map(self._gradient_of, self._parameters[part]))
            self._check_missing([i for i, each in zip(indices, gradients) if each is None])
            found = [(i, each) for i, each in zip(indices, gradients) if each is not None]
            self._check_gradients([i for i, _ in found], [each for _, each in found])

    def leave_views(self) -> None:
        """Makes gradients this process's own memory; see GradientViews.leave()."""
        if self.views is not None:
            self.views.leave()

    def end(self) -> None:
        """Ends views and copies before the session closes. Idempotent."""
        if self.views is not None:
            self.views.end()
        self._on_device.close()

    @property
    def makes_views(self) -> bool:
        """Returns whether some gradients become views when backward() makes them."""
        return self.views is not None and bool(self.views.indices)

    @property
    def view_bytes(self) -> int:
        """Size of the gradients that are views of the gradient area now."""
        return 0 if self.views is None else self.views.size

    def push(self, step: int, micro_step: int, found: Gradients) -> None:
        """Pushes the owned pieces of what was gathered."""
        if found.takes_back:
            self._take_back(step, micro_step)
        self._copies.settle()
        self._on_device.push(step, micro_step, self._push_from_host(step, micro_step, found))

    def push_early(self, step: int, micro_step: int, index: int) -> None:
        """Pushes the gradient of one parameter that backward() has just made."""
        gradient = self._parameters[index].grad
        if gradient is None:
            return
        if index in self._pushed:  # the gradient accumulates further; push() notices
            self._say_lacking_step()
            return
        self._check_gradients([index], [gradient])
        found = Gradients()
        found.add([index], [gradient])
        on_device = self._push_from_host(step, micro_step, found)
        if on_device and not self._on_device.start_early(step, micro_step, on_device):
            return
        if not self._pushed:  # the step's first
            _push_early.add(self)
        self._pushed[index] = (gradient, gradient.data_ptr(), gradient._version)

    def _say_lacking_step(self) -> None:
        if self.says_lacking_step:
            self.says_lacking_step = False
            warn(
                "backward() adds to gradients of the backward() before, and step() was not called"
                " in between: unlike with torch's ZeroRedundancyOptimizer, a step that overlaps"
                " with DistributedDataParallel (overlap_with_ddp=True) is taken when step() is"
                " called. Ignore this if gradients are to be accumulated"
            )

    def finish_early(self, step: int, micro_step: int) -> None:
        """Pushes the rest of what push_early() has started: nothing waits for it later."""
        self._on_device.push(step, micro_step, {})

    @property
    def has_pushed(self) -> bool:
        """Returns whether push_early() has pushed gradients of the open step."""
        return bool(self._pushed)

    def forget_pushed(self) -> None:
        """Forgets what push_early() pushed: the step is over, or the gradients are dropped."""
        self._pushed.clear()
        self._doubts.clear()
        self._on_device.drop()

    def _has_other_copies(self) -> bool:
        return bool(self._doubts) and any(to_list(torch.stack(self._doubts)))

    def _is_pushed(self, index: int) -> bool:
        """Returns whether the gradient that was pushed early is the present one, unchanged."""
        gradient, pointer, version = self._pushed[index]
        return (
            self._parameters[index].grad is gradient
            and gradient.data_ptr() == pointer
            and gradient._version == version
        )

    def _expect_copy(self, parameter: torch.Tensor, copy: torch.Tensor) -> None:
        index = self._index_of.get(id(parameter), -1)
        now = parameter.grad
        if index not in self._pushed or now is None:
            return
        gradient, pointer, version = self._pushed[index]
        if gradient.data_ptr() != pointer or gradient._version != version:
            return  # the gradient was changed otherwise: push() notices
        # The copy may be of another gradient that has replaced the pushed one.
        if backend_of(gradient) is not None:
            self._doubts.append((integer_bits(copy) != integer_bits(gradient)).any())
        elif not equal_bits(copy, gradient):
            return
        if now.data_ptr() == copy.data_ptr():  # a view of the bucket
            self._pushed[index] = (now, now.data_ptr(), now._version)
        elif now is gradient:
            self._pushed[index] = (gradient, pointer, version + 1)

    def _take_back(self, step: int, micro_step: int) -> None:
        if micro_step > 0 or not self._can_take_back:
            raise RuntimeError(
                "gradients changed after backward() had pushed them (overlap=True), and are, or"
                " earlier micro-steps are, in the daemon's sum: call accumulate_step() after each"
                " backward(), and now abort_step() on every rank, and take the step again"
            )
        self._session.abort(step)
        self.forget_pushed()

    def _check_missing(self, indices: Sequence[int]) -> None:
        """Raises for a gradient that is where only some other optimizers look: the parameter would
        not be updated, without a word."""
        for index in indices:
            if getattr(self._parameters[index], "decoupled_grad", None) is not None:
                raise errors.UnimplementedError(
                    f'parameter "{self._specs[index].name}" has its gradient in decoupled_grad, as'
                    " Megatron-LM's precision-aware optimizers do, and none in grad, which is what"
                    " optstate reads: set use_precision_aware_optimizer=False, or give grad the"
                    " gradient (in the parameter's dtype) and set decoupled_grad to None"
                )

    def _check_gradients(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        dtypes = map(self._dtypes.__getitem__, indices)
        shapes = map(self._shapes.__getitem__, indices)
        if (
            all(map(operator.is_, map(layout_of, gradients), itertools.repeat(torch.strided)))
            and all(map(operator.is_, map(dtype_of, gradients), dtypes))
            and all(map(operator.eq, map(shape_of, gradients), shapes))
        ):
            return
        for index, gradient in zip(indices, gradients):
            if (
                gradient.layout is not torch.strided
                or gradient.dtype is not self._dtypes[index]
                or gradient.shape != self._shapes[index]
            ):
                self._raise_gradient(index, gradient)

    def _raise_gradient(self, index: int, gradient: torch.Tensor) -> None:
        name = self._specs[index].name
        if gradient.layout is not torch.strided:
            raise errors.UnimplementedError(
                f'optstate does not support sparse gradients (parameter "{name}"): torch.optim\'s'
                " SGD, Adagrad and SparseAdam do"
            )
        if gradient.is_complex():
            raise RuntimeError(f'optstate does not support complex gradients (parameter "{name}")')
        raise TypeError(
            f'the gradient of parameter "{name}" is {gradient.dtype} {list(gradient.shape)},'
            f" but the job has {self._dtypes[index]} {list(self._shapes[index])}: change the model"
            " before the optimizer is constructed"
        )

    def _push_from_host(
        self, step: int, micro_step: int, found: Gradients
    ) -> dict[int, torch.Tensor]:
        """Pushes the gradients in host memory; returns those on devices."""
        if found.indices:
            self._session.push_gradients(step, micro_step, found.indices, found.pointers)
        on_device = {i: each for i, each in found.others.items() if backend_of(each) is not None}
        if len(on_device) < len(found.others):
            on_host = {i: each for i, each in found.others.items() if i not in on_device}
            self._push_copied(step, micro_step, on_host)
        return on_device

    def _push_copied(self, step: int, micro_step: int, gradients: dict[int, torch.Tensor]) -> None:
        if micro_step > 0:
            self._session.flush()
        addresses = self._session.gradient_addresses()
        for index, gradient in gradients.items():
            piece = self._owned.get(index)
            if piece is None:
                continue
            target = memory_view(addresses[index], piece.numel, self._dtypes[index])
            source = gradient.detach().reshape(-1)
            target.copy_(source[piece.begin : piece.begin + piece.numel])
        for first, count in runs_of([index for index in gradients if index in self._owned]):
            self._session.push(step, micro_step, first, count)


# Pushers whose push_early() was called.
_push_early: weakref.WeakSet[GradientPusher] = weakref.WeakSet()


def expect_copies(parameters: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Tells pushers that DistributedDataParallel has these copies of gradients in its bucket: the
    gradients are views of the bucket now, or will be copied back from it unchanged."""
    for pusher in tuple(_push_early):
        for parameter, copy in zip(parameters, copies):
            pusher._expect_copy(parameter, copy)
