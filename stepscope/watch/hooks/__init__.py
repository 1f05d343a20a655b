"""Zero-code capture: what `stepscope watch` records of a script that knows nothing of Stepscope.

`install(live)` is called before the script runs. It imports nothing: an import hook waits until the
script has imported torch, so that environment variables set before `import torch` still count, and
then wraps a handful of torch's functions:

| file           | wraps                                    | metrics                             |
|----------------|------------------------------------------|-------------------------------------|
| `optimizer.py` | the post hook of all optimizers' `step`  | a row a step, `train/lr`            |
| `loss.py`      | `torch.autograd.backward`, `zero_grad`,  | `train/loss`, `train/backwards`     |
|                | `Optimizer.__init__`                     |                                     |
| `gradient.py`  | `torch.nn.utils.clip_grad_norm_`         | `train/grad_norm`                   |
| `amp.py`       | `GradScaler.scale`, `GradScaler.step`    | `train/amp_scale`, `…/amp_skipped`  |
| `data.py`      | `__next__` of the DataLoader's iterators | data wait, samples/s, `train/epoch` |
| `transfer.py`  | `Tensor.to`, `Tensor.cuda` (only CUDA)   | `perf/h2d`                          |

What they hear is put together in `times.py` (a step's times), `passes.py` (its batches and epoch),
`parties.py` (whose loss it is, of several optimizers), `clips.py` (norms of several calls) and
`by_hand.py` (steps of scripts without an optimizer).

No wrapper waits for a GPU or changes a result. One that fails says so once and is off from then
on; the script never notices. They work in one thread, the one that steps the optimizers, and are
off in forked children and DataLoader workers.

What they cannot see, and what the charts then lack:

- losses that never call `backward()` on a scalar: `torch.autograd.grad`, `backward(gradient)` of a
  vector, several roots in one `torch.autograd.backward([a, b])`, tensors on devices other than CPU
  and CUDA, tensor subclasses such as DTensor;
- which part of a loss that reaches several optimizers is whose: the first to step gets all of it,
  the others none;
- updates by hand while the script has an optimizer of torch, and those by `torch.autograd.grad` or
  `torch.func`;
- whether an optimizer that steps late, while an earlier one is still alive, is its partner (a GAN)
  or its successor (a next phase): it gets keys of its own, such as `train/loss.optimizer1`;
- a loss scaled by hand, or scaled and then divided, or by FSDP's ShardedGradScaler: the value that
  `backward()` got is not the loss (with ShardedGradScaler none is recorded);
- steps of optimizers that are no `torch.optim.Optimizer` (DeepSpeed, JAX). Where the script makes
  none of torch at all, each outermost `backward()` is recorded as a step: with gradient
  accumulation every micro-batch is one, unless the script counts its steps by `rec.step`;
- steps that run inside `backward()` in autograd's own thread;
- replayed CUDA graphs: Python does not run there, so whole steps captured in one leave no row;
- clipping by other means than `clip_grad_norm_`: by value, FSDP's and DeepSpeed's own methods,
  norms that are DTensors;
- steps that a fused optimizer skips by itself under a GradScaler: the decision is on the device.
  The scale halves, `train/amp_skipped` does not count;
- batches that do not come from `torch.utils.data.DataLoader` (lists, generators, torchdata, DALI),
  or that another thread of the script fetches: no data wait, samples or epochs;
- the end of the last epoch, as an event, where the loop never asks the loader for more (Lightning);
- epochs that are not certain: `train/epoch` is then missing (`passes.py` says when);
- passes of a loader that reads all batches before the first `backward()` (accelerate, when one
  optimizer step takes the whole set): such a pass looks like evaluation;
- evaluation whose batches do not come from a DataLoader: its time counts as step time. So does that
  of a loop which fetches outside `no_grad` and is left with `break`, after one batch or where
  training reads the same dataset; its batches then count as samples;
- copies to the GPU by `copy_`, `torch.tensor(..., device="cuda")` or on other streams than the one
  that is current when `.to()` is called;
- all but one of several threads that train; child processes that the script starts to train in;
- metrics that the script computes itself (accuracy, validation loss): log them with
  `stepscope.log(...)`.
"""

from __future__ import annotations

from stepscope.watch.hooks.install import Hooks, install

__all__ = ["Hooks", "install"]
