"""Label and help of every acceleration technique, for the sidebar and the lab."""

from __future__ import annotations

from typing import NamedTuple


class Technique(NamedTuple):
    """A technique: its field of RunConfig, label, and a help text of effect and limits."""

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
        "Stores images in NHWC order, which tensor cores and CPU convolutions prefer. No effect "
        "without convolutions.",
    ),
    "cudnn_benchmark": (
        "cudnn.benchmark",
        "Benchmarks cuDNN's convolution algorithms on the first batch of each shape and keeps the "
        "fastest. No effect without convolutions; slow if shapes vary.",
    ),
    "deterministic": (
        "Deterministic algorithms",
        "Uses only deterministic algorithms. Never faster; other operations end the run.",
    ),
    "optimizer_impl": (
        "Optimizer implementation",
        "fused updates all parameters in one kernel, foreach in a few multi-tensor kernels with "
        "extra memory, for-loop one by one. No gain for few parameters or long steps.",
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
        "Clips the total gradient 2-norm to this value; 0 disables clipping. Stabilizes training "
        "for one extra pass over the gradients.",
    ),
    "activation_checkpointing": (
        "Activation checkpointing",
        "Recomputes most activations in the backward pass instead of storing them. Costs about a "
        "third more compute, so it pays off only if it makes room for a larger batch.",
    ),
    "pin_memory": (
        "pin_memory",
        "Copies batches into pinned memory, from which copies to the GPU are faster and can "
        "overlap. No gain for small batches, no effect with the dataset on the device.",
    ),
    "non_blocking": (
        "non_blocking copies",
        "Copies to the GPU without blocking the training thread. Needs pin_memory; no gain if "
        "copies are a small part of the step, none with the dataset on the device.",
    ),
    "num_workers": (
        "num_workers",
        "Processes that load batches; 0 loads in the training thread. Helps if decoding is slow; "
        "data in memory loads faster without workers.",
    ),
    "persistent_workers": (
        "Persistent workers",
        "Keeps DataLoader workers and their memory between epochs. No effect within an epoch.",
    ),
    "prefetch_factor": (
        "prefetch_factor",
        "Batches each worker loads ahead. Evens out load times, but does not help workers that are "
        "too slow on average.",
    ),
    "copy_stream": (
        "Copy on a side stream",
        "Copies the next batch on a side CUDA stream while the current one is computed. Takes "
        "memory for one extra batch; needs pin_memory to overlap.",
    ),
    "dataset_on_device": (
        "Dataset on device",
        "GPU: copies the whole dataset once, so no batch is transferred. CPU: caches decoded "
        "images. Must fit in memory next to training; a GPU cannot hold data that must be "
        "decoded.",
    ),
    "kernel_warmup": (
        "Kernel warm-up",
        "Runs a few uncounted steps first, so kernels are loaded and selected; weights are "
        "unchanged. The rest of the run is no faster.",
    ),
    "preallocate_memory": (
        "Preallocate memory",
        "Reserves the memory of the largest step before training. Avoids driver calls in the "
        "first steps only.",
    ),
    "compile_mode": (
        "torch.compile",
        "Compiles the model into fewer, larger kernels; reduce-overhead adds CUDA Graphs, "
        "max-autotune tries many kernels. Compiling takes seconds to minutes, which a short run "
        "does not earn back.",
    ),
    "cuda_graphs": (
        "CUDA Graphs",
        "Captures the whole step once and replays it with a single launch. Helps launch-bound "
        "models only; every batch must have the same size.",
    ),
}
_PARALLEL = {
    "strategy": (
        "Strategy",
        "DDP: a full copy of the model per device, gradients are averaged. FSDP2: shards weights, "
        "gradients and optimizer state. DataParallel: one process that replicates the model every "
        "step. Small models do not gain, as ranks wait for each other.",
    ),
    "devices_per_node": (
        "Devices",
        "Devices of this machine, one process each (DataParallel: one process); on a CPU the "
        "processes share the cores. More devices mean more samples per step: epochs get shorter, "
        "but the loss may not fall as fast.",
    ),
    "cpu_offload": (
        "CPU offload",
        "Keeps weights, gradients and optimizer state in host memory and runs the optimizer "
        "there. Saves GPU memory; most steps become several times slower.",
    ),
}
SWITCHES = tuple(Technique(field, *texts) for field, texts in _SWITCHES.items())
PARALLEL_SWITCHES = tuple(Technique(field, *texts) for field, texts in _PARALLEL.items())
BY_FIELD = {switch.field: switch for switch in (*SWITCHES, *PARALLEL_SWITCHES)}
