"""The attention kernel that torch selects on a GPU, simulated without a GPU.

The rules are the order flash, memory-efficient, math of aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp (torch 2.13), as far as the model decides them. A mask excludes flash; a head size
that is no multiple of 8 needs math.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.memory_estimate.fake import replaced

MAX_FLASH_HEAD = 256
MIN_FLASH_CAPABILITY = (8, 0)
_aten = torch.ops.aten


@contextmanager
def attention_on(capability: tuple[int, int]) -> Iterator[None]:
    """Attend as on a GPU of this compute capability, in recomputed blocks too.

    A dispatch mode would not cover the backward pass.
    """
    attend = partial(_attend, functional.scaled_dot_product_attention, capability)
    with replaced(functional, "scaled_dot_product_attention", attend):
        yield


def _attend(
    func: Callable[..., Tensor],
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (part.to(dtype) for part in (query, key, value))
    head, scale = query.shape[-1], more.get("scale")
    fused = head % 8 == 0 and attn_mask is None and not more.get("enable_gqa")
    half = query.dtype in (torch.float16, torch.bfloat16)
    found: Tensor
    if fused and half and head <= MAX_FLASH_HEAD and capability >= MIN_FLASH_CAPABILITY:
        found = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    elif fused and query.dtype is not torch.float64:
        needs = any(part.requires_grad for part in (query, key, value))
        found = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, needs, dropout_p, is_causal, scale=scale
        )[0]
    else:
        found = func(query, key, value, attn_mask, dropout_p, is_causal, **more)
    return found
