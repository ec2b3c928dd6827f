"""The King James Bible as characters, and the batch of every step."""

from __future__ import annotations

import pathlib
import re
import subprocess

import torch
from gpt import CONTEXT
from torch import Tensor


def write_text(path: pathlib.Path) -> None:
    """Writes the whole text, one verse a line, as the `bible` command prints it."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    verses = [re.sub(r"^\S+ ", "", line) for line in printed.splitlines()]
    path.write_text("\n".join(verses) + "\n")


class Text:
    """The characters as indices, and batches that follow from the step alone."""

    def __init__(self, path: pathlib.Path) -> None:
        text = path.read_text()
        self.characters = sorted(set(text))
        self._index = {character: index for index, character in enumerate(self.characters)}
        self._data = self.encode(text)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self._index[character] for character in text])

    def decode(self, indices: Tensor) -> str:
        return "".join(self.characters[index] for index in indices.tolist())

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """(characters, the ones after them), each [size, CONTEXT].

        A trainer that starts again at a step sees what it would have seen.
        """
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        starts = torch.randint(len(self._data) - CONTEXT - 1, (size,), generator=generator)
        places = starts.unsqueeze(1) + torch.arange(CONTEXT)
        return self._data[places], self._data[places + 1]
