"""A small GPT over bytes, its optimizer and its schedule."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from shardkeep.demo.records import Shape

VOCABULARY: Final = 256
DROPOUT: Final = 0.1


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added after."""

    def __init__(self, width: int, heads_count: int) -> None:
        super().__init__()
        self.heads_count = heads_count
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[batch, time, width]` to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads_count, -1).permute(2, 0, 3, 1, 4)
        mixed: torch.Tensor = functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, dropout_p=DROPOUT if self.training else 0.0
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        hidden: torch.Tensor = functional.gelu(self.up(self.norm2(x)))
        result: torch.Tensor = x + self.dropout(self.down(hidden))
        return result


class Gpt(nn.Module):
    """A decoder over bytes whose output layer is tied to its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context_bytes, shape.width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads_count) for _ in range(shape.layers_count))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers_count) if deep else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map bytes `int64[batch, time]` to logits `[batch, time, 256]`."""
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_model(shape: Shape) -> Gpt:
    """Return the model, sharded over all ranks: each block, then what is left."""
    model = Gpt(shape)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW in two groups: matrices decay, vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def make_scheduler(optimizer: torch.optim.Optimizer, stop: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule: a linear warmup over an eighth of the steps, then a cosine down to a tenth."""
    warmup = max(stop // 8, 1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(stop - warmup, 1), 1.0)
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
