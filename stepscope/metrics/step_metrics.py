"""Metrics of one optimizer step."""

from __future__ import annotations

from stepscope.metrics.metric import MetricTable, Unit

STEPS: MetricTable = {
    "train/loss": (
        Unit.NONE,
        "train loss",
        "Loss of this optimizer step's batch, averaged over its samples. In a watched script: "
        "sum of the scalars on which backward() was called since the last step or zero_grad(), "
        "if they changed gradients of the optimizer. Of several ranks each records that of its own "
        "samples: the mean over ranks is that of the global batch.",
    ),
    "train/backwards": (
        Unit.COUNT,
        "backward calls",
        "Calls of backward() whose sum is the loss of this step; recorded if more than one.",
    ),
    "train/lr": (Unit.NONE, "learning rate", "Learning rate that this step used."),
    "train/grad_norm": (
        Unit.NONE,
        "gradient norm",
        "Total norm of the gradients before clipping (the 2-norm unless the script asks for "
        "another), over all calls before the step; recorded only with clipping.",
    ),
    "train/amp_scale": (
        Unit.NONE,
        "AMP scale",
        "Loss scale of fp16 AMP; halves on inf gradients. The built-in loop reads it at the end "
        "of each epoch; in a watched script it is the scale that this step used.",
    ),
    "train/amp_skipped": (
        Unit.COUNT,
        "skipped steps",
        "Optimizer steps skipped so far because a gradient was inf or NaN. A fused optimizer "
        "skips on the device; that is not counted, only the scale shows it.",
    ),
    "train/epoch": (
        Unit.COUNT,
        "epoch",
        "Epoch that the step belongs to, counted from 1. In a watched script: passes over the "
        "DataLoader of the training; missing if an epoch is undefined.",
    ),
    "val/loss": (
        Unit.NONE,
        "validation loss",
        "Mean loss over the validation split, once an epoch; the same on all ranks of a job.",
    ),
    "val/accuracy": (
        Unit.PERCENT,
        "validation accuracy",
        "Share of validation samples classified correctly, once an epoch.",
    ),
    "model/weight": (Unit.NONE, "weight", "Slope of the fitted line (linear regression only)."),
    "model/bias": (Unit.NONE, "bias", "Intercept of the fitted line (linear regression only)."),
    "perf/step_time": (
        Unit.SECOND,
        "step time",
        "Wall time from one step boundary to the next, without pauses and validation.",
    ),
    "perf/samples_per_sec": (
        Unit.PER_SECOND,
        "samples/s",
        "Samples of this step divided by its step time; a job's rate is the sum of its ranks'.",
    ),
    "perf/tokens_per_sec": (
        Unit.PER_SECOND,
        "tokens/s",
        "Tokens of this step divided by its step time; scripts pass them to stepscope.log or step.",
    ),
    "perf/data_wait": (
        Unit.SECOND,
        "data wait",
        "Part of the step time spent waiting for the next batch.",
    ),
    "perf/forward": (
        Unit.SECOND,
        "forward",
        "Part of the step time from the arrival of the batch to the start of backward(), over all "
        "batches of the step; on a GPU what the host takes to launch it. Recorded in jobs of "
        "several processes.",
    ),
    "perf/backward": (
        Unit.SECOND,
        "backward",
        "Part of the step time in backward(), with waiting for other ranks. In distributed jobs.",
    ),
    "perf/optimizer": (
        Unit.SECOND,
        "optimizer",
        "Part of the step time from the end of backward() to the end of the optimizer's step, with "
        "clipping. In distributed jobs.",
    ),
    "perf/forward_compute": (
        Unit.SECOND,
        "forward computing",
        "Time from the start of DistributedDataParallel's forward to the start of backward(), on "
        "a GPU by the device's clock. Of sampled steps, in the row of the step after.",
    ),
    "perf/backward_compute": (
        Unit.SECOND,
        "backward computing",
        "Time that backward() computed until its last gradient was ready, without waiting for "
        "other ranks. Of sampled steps, in the row of the step after. Missing without "
        "DistributedDataParallel.",
    ),
    "perf/comm_wait": (
        Unit.SECOND,
        "wait for other ranks",
        "Time that backward() waited for averaged gradients after its own computing was done. Of "
        "sampled steps, in the row of the step after. The straggler waits least.",
    ),
    "perf/ddp_iteration": (
        Unit.COUNT,
        "DDP iteration (sampled)",
        "Number of the iteration to which perf/comm_wait in this row belongs, as "
        "DistributedDataParallel counts them: the same on all ranks.",
    ),
    "perf/ddp_models": (
        Unit.COUNT,
        "models in DDP",
        "Models in DistributedDataParallel that are trained; recorded if more than one. Their "
        "waiting is not recorded: they synchronize separately.",
    ),
    "perf/h2d": (
        Unit.SECOND,
        "H2D copy time",
        "Time that the device spent on copies from the host by .to() and .cuda(). In a watched "
        "script one step in 10 ms is measured, and its row is the one at which all of them had "
        "ended; in the built-in loop every step is, by the step that used the batch.",
    ),
    "perf/gpu_time": (
        Unit.SECOND,
        "GPU time",
        "Time on the device from the start of the forward pass to the end of the optimizer's "
        "update, without copies of the batch. If the host launches too slowly it contains the gaps "
        "between kernels: see perf/gpu_wait. Built-in loop only: the begin of the forward pass of "
        "a watched script is unknown.",
    ),
    "perf/gpu_wait": (
        Unit.SECOND,
        "host wait for GPU",
        "Part of the step time in which the host, two steps ahead, waited for the GPU. Near 0 the "
        "GPU waits for the host: for its launches, or for data. Built-in loop only.",
    ),
    "perf/tflops": (
        Unit.TERAFLOPS,
        "model FLOPs",
        "Floating-point operations of the model in this step, forward and backward, divided by its "
        "step time. Counted once, at the run's start; what activation checkpointing computes again "
        "does not count. Built-in loop only.",
    ),
    "perf/mfu": (
        Unit.PERCENT,
        "model FLOPs utilization",
        "Share of the GPU's dense peak for the run's precision that perf/tflops is (MFU); with "
        "DataParallel of the peak of all its GPUs. Missing on a CPU and without a known peak; "
        "peak_reason in run.json has the reason.",
    ),
}
