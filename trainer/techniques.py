"""Every acceleration technique that a run can switch on: what it does and when it does not help.

The sidebar draws them and the lab measures them; a test holds that each has a field in RunConfig.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique: a field of RunConfig, its label, and help of two sentences."""

    field: str
    label: str
    help: str


_SWITCHES = {
    "precision": (
        "Precision",
        "TF32, BF16 and FP16 run on tensor cores; 16-bit types also halve memory traffic. AMP "
        "keeps weights in FP32, pure 16-bit does not. No gain if the model is input-bound or "
        "launch-bound; pure 16-bit may fail to converge.",
    ),
    "channels_last": (
        "channels_last",
        "Stores images in NHWC order, which tensor cores and CPU convolutions prefer. No "
        "effect without convolutions.",
    ),
    "cudnn_benchmark": (
        "cudnn.benchmark",
        "Benchmarks cuDNN's convolution algorithms on the first batch of each shape and keeps "
        "the fastest. Every new shape is benchmarked again. No effect without convolutions.",
    ),
    "deterministic": (
        "Deterministic algorithms",
        "Uses only deterministic algorithms. Never faster; operations that have none end the "
        "run with an error.",
    ),
    "optimizer_impl": (
        "Optimizer implementation",
        "fused updates all parameters in one kernel, foreach in a few multi-tensor kernels with "
        "extra memory for intermediates, for-loop one by one. No visible gain for models with "
        "few parameters or long steps.",
    ),
    "set_to_none": (
        "zero_grad(set_to_none)",
        "Sets gradients to None after each step instead of zeroing them. Saves one write per "
        "parameter, negligible for models with few parameters.",
    ),
    "gradient_accumulation_steps": (
        "Gradient accumulation",
        "Accumulates gradients over several batches per optimizer step, so a large effective "
        "batch fits in little memory. Saves no compute: one large batch is faster if it fits.",
    ),
    "max_grad_norm": (
        "Max gradient norm",
        "Clips the total gradient 2-norm to this value; 0 disables clipping. Stabilizes "
        "training for one extra pass over the gradients.",
    ),
    "activation_checkpointing": (
        "Activation checkpointing",
        "Keeps only some activations and recomputes the rest in the backward pass. Saves "
        "memory for about a third more compute, so it pays off only if the memory allows a "
        "larger batch.",
    ),
    "pin_memory": (
        "pin_memory",
        "Copies batches into pinned memory, which the GPU copies faster and while it computes. No "
        "gain for small batches, no effect with the dataset on the device; pinned memory is not "
        "available to other programs.",
    ),
    "non_blocking": (
        "non_blocking copies",
        "Copies to the GPU without blocking the training thread. Needs pin_memory; no gain if "
        "copies are a small part of the step, none with the dataset on the device.",
    ),
    "num_workers": (
        "num_workers",
        "Processes that load batches; 0 loads in the training thread. Helps when decoding is "
        "slow; data already in memory loads faster without workers.",
    ),
    "persistent_workers": (
        "Persistent workers",
        "Keeps DataLoader workers alive between epochs. No effect within an epoch; their "
        "memory stays allocated.",
    ),
    "prefetch_factor": (
        "prefetch_factor",
        "Batches each worker loads ahead. Smooths uneven load times; cannot help workers that "
        "are too slow on average.",
    ),
    "copy_stream": (
        "Copy on a side stream",
        "Copies the next batch on its own CUDA stream while the current one is computed. Costs "
        "memory for one extra batch; needs pin_memory to overlap.",
    ),
    "dataset_on_device": (
        "Dataset on device",
        "GPU: copies the whole dataset over once, so no batch is transferred. CPU: caches the "
        "images decoded in the first epoch. Must fit in memory next to training, does not work "
        "on a GPU for data that must be decoded, and makes pin_memory and non_blocking "
        "ineffective.",
    ),
    "kernel_warmup": (
        "Kernel warm-up",
        "Runs a few uncounted steps first, so kernels are loaded and selected; weights are "
        "unchanged. The rest of the run is no faster.",
    ),
    "preallocate_memory": (
        "Preallocate memory",
        "Reserves the memory of the largest step before training. Avoids driver calls in the "
        "first steps only, and keeps the memory reserved.",
    ),
    "compile_mode": (
        "torch.compile",
        "Compiles the model for full batches into fewer, larger kernels; reduce-overhead adds CUDA "
        "Graphs, max-autotune tries many kernels. Compiling takes seconds to minutes, which a "
        "short run does not earn back.",
    ),
    "cuda_graphs": (
        "CUDA Graphs",
        "Captures the whole step once and replays it with a single launch. Helps launch-bound "
        "models; long kernels hide launch cost anyway. Every batch must have the same size.",
    ),
}
_PARALLEL = {
    "strategy": (
        "Strategy",
        "DDP: one process per device, each with a full copy of the model; gradients are "
        "averaged. FSDP2: shards weights, gradients and optimizer state. DataParallel: one "
        "process that replicates the model every step. Small models do not gain: ranks wait "
        "for each other longer than they compute.",
    ),
    "devices_per_node": (
        "Devices per node",
        "Devices per node that train together, one process each (DataParallel: one process for "
        "all); on a CPU the processes share the cores. More devices mean more samples per "
        "step: epochs get shorter, but the loss may not fall as fast.",
    ),
    "num_nodes": (
        "Nodes",
        "Nodes that train together, each with the same number of devices. For more than one, "
        "you start the job with one command per node. The network between nodes is much slower "
        "than the links within one.",
    ),
    "max_restarts": (
        "Max restarts",
        "How often torchrun may restart all ranks from the newest checkpoint after one dies. "
        "Does not help if the failure recurs, for example out of memory.",
    ),
    "no_sync": (
        "no_sync",
        "Averages gradients across ranks once per optimizer step instead of after every batch. No "
        "effect without gradient accumulation; with FSDP2, each rank keeps full gradients in "
        "between.",
    ),
    "static_graph": (
        "Static graph",
        "Promises DDP that every step uses the same parameters, so it learns the gradient "
        "order once. Leave it off for models that sometimes skip parts; most others gain "
        "little.",
    ),
    "gradient_as_bucket_view": (
        "gradient_as_bucket_view",
        "Keeps gradients in DDP's buckets instead of copying them in and out. Saves as much "
        "memory as the gradients take, and little time.",
    ),
    "bucket_cap_mb": (
        "Bucket size (MiB)",
        "How many gradients are averaged together during the backward pass. Small buckets "
        "start earlier, large ones need fewer calls; a model smaller than one bucket is "
        "unaffected.",
    ),
    "reshard_after_forward": (
        "Reshard after forward",
        "Frees each block's gathered weights after its forward pass and gathers them again for "
        "backward. Off: a third less communication, but every device keeps the whole model.",
    ),
    "cpu_offload": (
        "CPU offload",
        "Keeps weights, gradients and optimizer state in host memory and runs the optimizer "
        "there. Saves GPU memory; most steps become several times slower.",
    ),
    "time_collectives": (
        "Time collectives",
        "Has NCCL time every collective. Small overhead; may reduce the overlap of "
        "communication and compute.",
    ),
}

SWITCHES = tuple(Technique(field, *texts) for field, texts in _SWITCHES.items())
PARALLEL_SWITCHES = tuple(Technique(field, *texts) for field, texts in _PARALLEL.items())
"""How several devices share the work; only those that act on the chosen kind are drawn."""

BY_FIELD: dict[str, Technique] = {
    switch.field: switch for switch in (*SWITCHES, *PARALLEL_SWITCHES)
}
