"""DeepSpeed's NVMe swappers in a whole engine: ZeRO-3 of one process on the CPU.

PartitionedOptimizerSwapper, or PipelinedOptimizerSwapper where a pipeline is asked for, with
DeepSpeedCPUAdam. Each parameter is a sub-group. Its asynchronous I/O (libaio) is compiled when it
is first used, in some minutes; the headers are Debian's libaio-dev.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import peers  # noqa: F401  DeepSpeed shall not look for a GPU: before it is imported
import torch


@dataclasses.dataclass(frozen=True)
class Settings:
    """The part of DeepSpeed's configuration that a user writes."""

    offload: Mapping[str, object]  # of offload_optimizer
    aio: Mapping[str, object]


DEFAULTS = Settings({}, {})
# 12 buffers: a sub-group's master, moments and gradient are read, updated and written at a time.
# The former thread_count of aio is intra_op_parallelism.
PIPELINED = Settings(
    {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
    {
        "block_size": 1 << 20,
        "queue_depth": 32,
        "intra_op_parallelism": 2,
        "single_submit": False,
        "overlap_events": True,
    },
)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A group of one rank, which DeepSpeed needs, and none of what it would compile besides."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # An all-reduce for several ranks.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


class _Layer(torch.nn.Module):
    """A parameter whose gradient is `gradient`."""

    def __init__(self, value: torch.Tensor, gradient: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)
        self.gradient = gradient

    def forward(self) -> torch.Tensor:
        return torch.dot(self.weight, self.gradient)


class _Model(torch.nn.Module):
    def __init__(self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(map(_Layer, values, gradients))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return sum(layer() for layer in self.layers) * factor


class SwappedEngine:
    """`values` and `gradients` are of one size, a sub-group's, and of the training's dtype."""

    def __init__(
        self,
        settings: Settings,
        folder: pathlib.Path,
        values: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        options: Mapping[str, object],
    ) -> None:
        import deepspeed

        self._dtype, numel = values[0].dtype, values[0].numel()
        self._engine, *_ = deepspeed.initialize(
            model=_Model([value.clone() for value in values], gradients),
            config={
                "train_batch_size": 1,
                "gradient_clipping": 0.0,  # 1.0 by default
                "bf16": {"enabled": self._dtype == torch.bfloat16},
                "optimizer": {"type": "AdamW", "params": dict(options)},
                "zero_optimization": {
                    "stage": 3,
                    "sub_group_size": numel,
                    "reduce_bucket_size": numel,
                    "stage3_prefetch_bucket_size": numel,
                    "stage3_param_persistence_threshold": 0,
                    "offload_optimizer": {
                        "device": "nvme",
                        "nvme_path": str(folder),
                        **settings.offload,
                    },
                },
                "aio": dict(settings.aio),
            },
            dist_init_required=False,
        )

    @property
    def swapper(self) -> str:
        """Name of DeepSpeed's class."""
        return type(self._engine.optimizer.optimizer_swapper).__name__

    @property
    def memory_bytes(self) -> int:
        """Page-locked buffers that the state passes through."""
        buffers = self._engine.optimizer.optimizer_swapper.swap_buffer_manager.all_buffers
        return sum(buffer.nbytes for buffer in buffers)

    def step(self, factor: float) -> float:
        """Seconds of engine.step() alone, with the gradients times `factor`.

        backward() makes them, and writes them to disk but for the last, which step() waits for.
        """
        self._engine.backward(self._engine(torch.tensor(factor, dtype=self._dtype)))
        begin = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - begin

    def masters(self) -> Iterator[torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        for layer in self._engine.module.layers:
            yield safe_get_full_fp32_param(layer.weight)
