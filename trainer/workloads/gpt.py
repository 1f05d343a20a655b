"""A small character-level GPT on the help texts of Python.

`pydoc_data.topics` has 373,000 characters in Python 3.11 without repeated paragraphs; the last
tenth is for validation. The loss is in nats per character: 4.6 is chance among 100 characters.
Memory grows with layers × width² (weights) and batch_size × context × width × layers (activations).
"""

from __future__ import annotations

from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import RunConfig
from trainer.workloads.task import Task, TensorSplit

HELD_OUT = 0.1
STRIDE = 64  # characters between the starts of two samples
HEAD_CHANNELS = (64, 32, 16)
SPREAD = 0.02  # standard deviation of the initial weights, as in GPT-2


def task(config: RunConfig) -> Task:
    """Return a character-level GPT of `num_layers` blocks with `width` channels."""
    train, held_out = _texts()
    characters = sorted(set(train + held_out))
    splits = [_split(text, characters, config.context_length) for text in (train, held_out)]
    return Task(
        model=Gpt(config, len(characters)),
        train=splits[0],
        validation=splits[1],
        loss=loss,
        classifies=False,
        tokens_per_sample=config.context_length,
        run_info={
            "data": f"Python's own help text: {len(train):,} characters, {len(characters)} "
            f"distinct; {len(held_out):,} held out; loss in nats per character"
        },
    )


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy per character in nats; scores (n, context, characters)."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Gpt(nn.Module):
    """Pre-norm decoder: characters (n, context), int64, to scores (n, context, characters)."""

    def __init__(self, config: RunConfig, characters: int) -> None:
        super().__init__()
        width = config.width
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Embedding(config.context_length, width)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, config.dropout) for _ in range(config.num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        self.apply(_begin)
        with torch.no_grad():
            for name, weights in self.named_parameters():
                # The residual stream must not grow with the number of layers.
                if name.endswith(("out.weight", "perceptron.2.weight")):
                    weights.mul_((2 * config.num_layers) ** -0.5)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, characters: Tensor) -> Tensor:
        """Return scores for each next character."""
        places = torch.arange(characters.shape[1], device=characters.device)
        features = self.blocks(self.embedding(characters) + self.positions(places))
        scores: Tensor = self.head(self.norm(features))
        return scores


class TransformerBlock(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape (n, context, width)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        added: Tensor = x + self.dropout(self.perceptron(self.norm2(x)))
        return added


class CausalSelfAttention(nn.Module):
    """Causal self-attention with heads of 64 channels if the width allows it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads(width)
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape (n, context, width)."""
        # (n, context, 3 × width) -> three times (n, heads, context, channels of a head)
        parts = self.query_key_value(x).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        features: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return features


def heads(width: int) -> int:
    """Return the number of attention heads of 64, 32 or 16 channels; 1 if none divides width."""
    return next((width // size for size in HEAD_CHANNELS if width % size == 0), 1)


def _begin(module: nn.Module) -> None:
    """Initialize weights with small random numbers and biases with zeros."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=SPREAD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _texts() -> tuple[str, str]:
    """Return training and validation text, without paragraphs that topics share."""
    found = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).split("\n\n")
    text = "\n\n".join({" ".join(paragraph.split()): paragraph for paragraph in found}.values())
    cut = round(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def _split(text: str, characters: list[str], context: int) -> TensorSplit:
    """Return windows of the text as a split; overlapping windows share memory."""
    numbers = {character: number for number, character in enumerate(characters)}
    tokens = torch.tensor([numbers[character] for character in text])
    windows = tokens.unfold(0, context + 1, STRIDE)
    return TensorSplit.of(windows[:, :-1], windows[:, 1:])
