"""Digests of many tensors of a CUDA device, whose thousands of launches become one."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence

import torch

# A key is not recorded before it has come this often: recording costs more than one computation.
_SEEN_MIN = 2
_GRAPHS_MAX = 2


class DigestGraphs:
    """Computes the digests of the same tensors again and again.

    What is computed for the same tensors, at the same addresses, is recorded as a CUDA graph, and
    then replayed: a step's digests are one launch. Where nothing can be recorded they are computed
    as before. Threads: one at a time.
    """

    def __init__(self, digest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """digest: returns a tensor's digest on its device, with the same kernels each time."""
        self._digest = digest
        self._graphs: collections.OrderedDict[tuple, tuple[torch.cuda.CUDAGraph, torch.Tensor]]
        self._graphs = collections.OrderedDict()
        self._seen: collections.Counter[int] = collections.Counter()
        self._last: torch.cuda.Event | None = None  # the end of the last use of a graph
        self._is_refused = False

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the digests of tensors of one device, one for each."""
        key = _key_of(tensors)
        if key in self._graphs:
            self._graphs.move_to_end(key)
        elif self._may_record(key, tensors):
            self._record(key, tensors)
        if key not in self._graphs:
            return torch.stack([self._digest(each) for each in tensors])
        graph, digests = self._graphs[key]
        current = torch.cuda.current_stream(tensors[0].device)
        if self._last is not None:  # perhaps in another stream
            current.wait_event(self._last)
        graph.replay()
        found = digests.clone()  # the next replay writes there
        self._last = torch.cuda.Event()
        self._last.record(current)
        return found

    def _may_record(self, key: tuple, tensors: Sequence[torch.Tensor]) -> bool:
        if self._is_refused or not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return False
        if len(self._seen) > 8:  # tensors that move all the time
            self._seen.clear()
        self._seen[hash(key)] += 1
        return self._seen[hash(key)] > _SEEN_MIN

    def _record(self, key: tuple, tensors: Sequence[torch.Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(tensors[0].device)
        current = torch.cuda.current_stream(tensors[0].device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    digests = torch.stack([self._digest(each) for each in tensors])
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._is_refused = True
            logging.getLogger("optstate").info("digests are not recorded: %s", error)
            return
        current.wait_stream(stream)
        self._graphs[key] = graph, digests
        while len(self._graphs) > _GRAPHS_MAX:
            self._graphs.popitem(last=False)


def _key_of(tensors: Sequence[torch.Tensor]) -> tuple:
    """Returns what tells tensors in the same memory from others."""
    return tuple((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in tensors)
