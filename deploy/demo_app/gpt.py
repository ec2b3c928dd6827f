"""A small GPT over characters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 128  # characters
_HEAD_WIDTH = 32


def width_for(parameter_count: float) -> int:
    """Width of the model with about so many parameters.

    A block has 12 width² of them and there are width / 32 blocks.
    """
    heads = round((parameter_count * 32 / 12) ** (1 / 3) / _HEAD_WIDTH)
    return _HEAD_WIDTH * max(1, heads)


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD_WIDTH
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.query_key_value(self.attention_norm(x))
        query, key, value = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Logits of the next character at every place: [batch, length, vocabulary]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        depth = max(1, width // 32)
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if is_residual else 0.02)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.places(places)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, start: Tensor, length: int, generator: torch.Generator) -> Tensor:
        """Continues the 1-dimensional `start` by `length` characters."""
        text = start
        for _ in range(length):
            logits = self(text[-CONTEXT:].unsqueeze(0))[0, -1]
            odds = functional.softmax(logits / 0.8, dim=0)
            text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)])
        return text
