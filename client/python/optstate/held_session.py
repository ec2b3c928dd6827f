"""A session that addresses the parameters of its layout which this rank holds."""

from __future__ import annotations

import array
import bisect
from collections.abc import Sequence

from optstate import _native
from optstate.session import Piece, Session, fetch_numbers
from optstate.session_spec import SessionSpec


class HeldSession(Session):
    """A session of a job whose layout has shards of other ranks too.

    The parameters of its methods, and of `pieces` and `load_required_from`, count what this rank
    holds, in the order of SessionSpec.held. Shards that another rank owns are only read.

    Threads, memory: as Session.
    Size: one method for each method of Session that names parameters.
    """

    _held: array.array

    @classmethod
    def open(cls, spec: SessionSpec) -> HeldSession:
        session = super().open(spec)
        assert isinstance(session, HeldSession) and spec.held is not None
        session._hold(spec.held)
        return session

    def _hold(self, held: Sequence[int]) -> None:
        self._held = array.array("I", held)
        self._position_of = {index: position for position, index in enumerate(held)}
        self.pieces = [
            Piece(self._position_of[piece.parameter], piece.begin, piece.numel)
            for piece in self.pieces
            if piece.parameter in self._position_of
        ]
        self.load_required_from = bisect.bisect_left(self._held, self.load_required_from)

    def _in_layout(self, positions: Sequence[int]) -> array.array:
        return array.array("I", map(self._held.__getitem__, positions))

    def _positions(self, indices: Sequence[int]) -> list[int]:
        return [self._position_of[index] for index in indices]

    def gradient_addresses(self) -> dict[int, int]:
        known = self._gradient_addresses
        if known is None:
            of_layout = super().gradient_addresses()
            known = {
                self._position_of[index]: at
                for index, at in of_layout.items()
                if index in self._position_of
            }
            self._gradient_addresses = known
        return known

    def parameter(self, parameter: int) -> tuple[int, int]:
        return super().parameter(self._held[parameter])

    def push(self, step: int, micro_step: int, first: int, count: int) -> None:
        for index in self._held[first : first + count]:
            super().push(step, micro_step, index, 1)

    def push_gradients(
        self, step: int, micro_step: int, parameters: array.array, gradients: array.array
    ) -> None:
        super().push_gradients(step, micro_step, self._in_layout(parameters), gradients)

    def read_parameters(self, parameters: array.array, destinations: array.array) -> None:
        super().read_parameters(self._in_layout(parameters), destinations)

    def find_changed(self, parameters: array.array, copies: array.array) -> list[int]:
        return self._positions(super().find_changed(self._in_layout(parameters), copies))

    def note_copies(self, parameters: array.array) -> None:
        super().note_copies(self._in_layout(parameters))

    def begin_load(self, *, same: bool = False) -> None:
        """Begins a load, in which each rank sends its own shards."""
        super().begin_load(same=False)

    def load(self, state_array: int, parameter: int, dtype: int, address: int) -> None:
        super().load(state_array, self._held[parameter], dtype, address)

    def load_many(
        self,
        state_arrays: array.array,
        parameters: array.array,
        dtypes: array.array,
        addresses: array.array,
    ) -> None:
        super().load_many(state_arrays, self._in_layout(parameters), dtypes, addresses)

    def fetch(self, state_array: int, parameter: int, address: int, size: int) -> None:
        super().fetch(state_array, self._held[parameter], address, size)

    def fetch_many(
        self, state_arrays: array.array, parameters: array.array, addresses: array.array
    ) -> None:
        super().fetch_many(state_arrays, self._in_layout(parameters), addresses)

    def gradient_norms(self, count: int) -> list[float]:
        """Returns the norms of all ranks' shards, in the order of the layout; -1: no gradient."""
        return fetch_numbers(self, _native.GRADIENT_NORM, count)
