"""A program is plain data, so that its text is all one needs to run it again."""

from __future__ import annotations

import dataclasses
import pprint
from typing import Any

Operation = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of the model.

    layout: "contiguous", "transposed" (column-major) or "strided" (with gaps).
    group: number of its param group.
    uses: how often the loss has it, under as many names of the module.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    group: int = 0
    uses: int = 1
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, how its optimizer is made, and what is then done, in order.

    options: torch's, of the constructor. group_options: of each group's own.
    served: keyword arguments that ours has beyond torch's.
    names: "pairs" (name, parameter), "model" (ours is given model=) or "none".
    scaler: None, "trainer" (a GradScaler) or "daemon" (a LossScaler).
    """

    optimizer: str
    weights: tuple[Weight, ...]
    options: dict[str, Any]
    operations: tuple[Operation, ...]
    group_options: tuple[dict[str, Any], ...] = ({},)
    served: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: str = "none"
    has_job: bool = False
    wire: str = "shm"
    scaler: str | None = None
    seed: int = 0

    def text(self) -> str:
        """Python that makes this program."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is not dataclasses.MISSING and value == field.default:
                continue
            if field.name in ("weights", "operations"):
                body = "".join(f"        {each!r},\n" for each in value)
                parts.append(f"    {field.name}=(\n{body}    ),\n")
            else:
                parts.append(f"    {field.name}={pprint.pformat(value, width=200)},\n")
        return "Program(\n" + "".join(parts) + ")"


def program_of(text: str) -> Program:
    """The program that text() said."""
    return eval(text, {"Program": Program, "Weight": Weight})
