"""How step() reduces gradients with reduction="collective", as a user writes it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence

import torch

_COMMUNICATION: dict[object, torch.dtype] = {
    None: torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    "int8": torch.int8,
    torch.int8: torch.int8,
}
_BUCKET_BYTES_MIN = 4096


@dataclasses.dataclass(frozen=True)
class Reducing:
    """How gradients are put together; all ranks have the same.

    A bucket of gradients is converted to the communication dtype, added up by the process group,
    and converted back, rounded to nearest even each time:

        result = (sum over ranks of g / predivide) * predivide / W

    where W is the number of ranks for a mean, else 1. The factors are applied in double. This is
    what the C++ client's GradientReducer does.
    """

    # int8: a scale for each block of elements, and sums in float32; see quantized.py.
    communication: torch.dtype = torch.float32
    # Bytes of the communication dtype that are added up together; a larger gradient is cut. None:
    # about 25 MiB of gradients, and none is cut; of int8 that many sums, cut at any block.
    bucket_bytes: int | None = None
    predivide_factor: float = 1.0
    is_sum: bool = False

    def __str__(self) -> str:
        dtype = str(self.communication).removeprefix("torch.")
        said = [f'communication_dtype="{dtype}"']
        if self.bucket_bytes is not None:
            said.append(f"bucket_cap_mb={self.bucket_bytes / (1 << 20):g}")
        said.append(f"gradient_predivide_factor={self.predivide_factor:g}")
        said.append(f'reduction_op="{"sum" if self.is_sum else "mean"}"')
        return ", ".join(said)

    @property
    def is_quantized(self) -> bool:
        """Whether a rank sends a byte an element, and keeps what that leaves out."""
        return self.communication is torch.int8

    @property
    def bucket_elements(self) -> int | None:
        """Elements of a bucket; None: gradients are not cut."""
        size = self.communication.itemsize
        return None if self.bucket_bytes is None else self.bucket_bytes // size

    def to_send(self, gradients: torch.Tensor) -> torch.Tensor:
        """Returns float32 gradients as the ranks add them up, perhaps the tensor itself."""
        if self.predivide_factor != 1:
            gradients = gradients.double().div_(self.predivide_factor).float()
        return gradients.to(self.communication)

    def result(self, sums: torch.Tensor, world_size: int) -> torch.Tensor:
        """Returns the float32 result of the ranks' sums, perhaps in the same tensor."""
        sums = sums.float()
        divisor = 1 if self.is_sum else world_size
        if self.predivide_factor == 1:
            return sums if divisor == 1 else sums.div_(divisor)
        return sums.double().mul_(self.predivide_factor).div_(divisor).float()


def reducing(
    communication_dtype: torch.dtype | str | None,
    bucket_cap_mb: float | None,
    gradient_predivide_factor: float | None,
    reduction_op: str | None,
    *,
    reduction: str,
) -> Reducing:
    """Converts the keyword arguments of an optimizer; None: as it is without them.

    ValueError or TypeError names the wrong one. ValueError: step() reduces no gradients, because
    of `reduction`.
    """
    given = {
        "communication_dtype": communication_dtype,
        "bucket_cap_mb": bucket_cap_mb,
        "gradient_predivide_factor": gradient_predivide_factor,
        "reduction_op": reduction_op,
    }
    for name, value in given.items():
        if value is not None and reduction != "collective":
            raise ValueError(
                f'{name}= says how step() reduces gradients with reduction="collective". With'
                f' reduction="{reduction}" it reduces none: '
                + (
                    "the daemon averages them in float32"
                    if reduction == "daemon"
                    else "give it to what does (DistributedDataParallel, or its comm hook)"
                )
            )
    if communication_dtype not in _COMMUNICATION:
        raise ValueError(
            f"Invalid communication_dtype: {communication_dtype!r} (float32, bfloat16 or int8)"
        )
    if reduction_op not in (None, "mean", "sum"):
        raise ValueError(f"Invalid reduction_op: {reduction_op!r} (mean or sum)")
    bucket_bytes = None
    if bucket_cap_mb is not None:
        bucket_bytes = int(_positive("bucket_cap_mb", bucket_cap_mb) * (1 << 20))
        if bucket_bytes < _BUCKET_BYTES_MIN:
            raise ValueError(
                f"Invalid bucket_cap_mb: {bucket_cap_mb} MiB are {bucket_bytes} bytes (at least"
                f" {_BUCKET_BYTES_MIN})"
            )
    factor = gradient_predivide_factor
    return Reducing(
        communication=_COMMUNICATION[communication_dtype],
        bucket_bytes=bucket_bytes,
        predivide_factor=1.0 if factor is None else _positive("gradient_predivide_factor", factor),
        is_sum=reduction_op == "sum",
    )


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, not a number")
    if not 0 < value < math.inf:
        raise ValueError(f"Invalid {name}: {value} (finite, above 0)")
    return float(value)


def check_same_reducing(asked: Sequence[Reducing]) -> None:
    """Raises ValueError, on every rank alike, when ranks would reduce gradients otherwise."""
    for rank, each in enumerate(asked):
        if each != asked[0]:
            raise ValueError(
                f"rank {rank} reduces gradients with {each}, rank 0 with {asked[0]}: give all ranks"
                " the same"
            )
