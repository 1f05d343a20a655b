"""Which kernel torch takes for attention on a GPU, where no GPU can be asked.

The rules are the order flash, memory-efficient, math of aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp (torch 2.13), as far as the model decides them. A mask rules out flash; heads whose
channels are no multiple of 8 are left to math.
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

FLASH_CHANNELS = 256
FLASH_SINCE = (8, 0)
ALIGNED = 8
_aten = torch.ops.aten


@contextmanager
def attention_on(capability: tuple[int, int]) -> Iterator[None]:
    """Attend as on a GPU of this compute capability, also in what checkpoints compute again.

    Not by a mode: the backward pass leaves those.
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
    scale = more.get("scale")
    half = query.dtype in (torch.float16, torch.bfloat16)
    aligned = query.shape[-1] % ALIGNED == 0 and not more.get("enable_gqa")
    flash = half and aligned and attn_mask is None and capability >= FLASH_SINCE
    found: Tensor
    if flash and query.shape[-1] <= FLASH_CHANNELS:
        found = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    elif aligned and attn_mask is None and query.dtype is not torch.float64:
        needs = any(part.requires_grad for part in (query, key, value))
        found = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, needs, dropout_p, is_causal, scale=scale
        )[0]
    else:
        found = func(query, key, value, attn_mask, dropout_p, is_causal, **more)
    return found
