"""Every acceleration technique that a run can switch on: what it does and when it does not help.

The sidebar draws them and the lab measures them; a test holds that each has a field in RunConfig.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """One technique: a field of RunConfig, its label, and help of two sentences."""

    field: str
    label: str
    help: str


SWITCHES: tuple[Switch, ...] = (
    Switch(
        "precision",
        "Precision",
        "tf32, bf16 and fp16 use tensor cores and, with 16 bits, half of the memory traffic; AMP "
        "keeps weights in fp32, pure keeps nothing in it. A model that waits for its data or for "
        "kernel launches gains nothing, and pure 16 bits may not learn.",
    ),
    Switch(
        "channels_last",
        "channels_last",
        "Stores images with their channels together, as tensor cores and CPU convolutions read "
        "them. A model without convolutions has nothing to gain.",
    ),
    Switch(
        "cudnn_benchmark",
        "cudnn.benchmark",
        "Times the convolution algorithms of cuDNN at the first batch of each shape and keeps the "
        "fastest. It costs time again for each new shape, and does nothing without convolutions.",
    ),
    Switch(
        "deterministic",
        "Deterministic",
        "Takes only algorithms that give the same result each time. It never makes training "
        "faster, and some operations have no such algorithm and then end the run.",
    ),
    Switch(
        "fused",
        "Fused optimizer",
        "Updates all parameters in one kernel. A model with few parameters, or one that computes "
        "long per step, shows no difference.",
    ),
    Switch(
        "foreach",
        "foreach optimizer",
        "Updates lists of parameters together, in a few kernels for all of them. The fused kind is "
        "faster still where it exists, and foreach needs memory for its intermediate values.",
    ),
    Switch(
        "set_to_none",
        "zero_grad(set_to_none)",
        "Frees the gradients after each step instead of filling them with zeros. It saves one "
        "write per parameter, which a model with few parameters does not notice.",
    ),
    Switch(
        "accumulation",
        "Gradient accumulation",
        "Adds up the gradients of several batches before one optimizer step, so that a large batch "
        "fits into little memory. It saves no work: one large batch is faster where it fits.",
    ),
    Switch(
        "clip_norm",
        "Clip norm",
        "Scales the gradients down to this 2-norm where theirs is larger; 0 does not clip. It "
        "keeps training stable, and costs one more pass over the gradients.",
    ),
    Switch(
        "activation_checkpointing",
        "Activation checkpointing",
        "Keeps only some activations and computes the others again in the backward pass. It saves "
        "memory and costs about a third more computing, so it pays only if the memory buys a "
        "larger batch.",
    ),
    Switch(
        "pin_memory",
        "pin_memory",
        "Copies batches into page-locked memory, with workers in a thread of the DataLoader: from "
        "there a GPU copies faster and beside its computing. Small batches gain nothing, "
        "page-locked memory is lost to other programs, and beside data_on_device, with which no "
        "batch is copied, it does nothing.",
    ),
    Switch(
        "non_blocking",
        "non_blocking copies",
        "Does not let the training thread wait for a copy to the GPU. It needs pin_memory, and "
        "gains nothing where copies are a small part of the step, or with data_on_device none.",
    ),
    Switch(
        "num_workers",
        "num_workers",
        "Loads batches in this many processes beside the training; 0 loads in the training thread. "
        "It pays where decoding takes long; data that lie in memory are faster without.",
    ),
    Switch(
        "persistent_workers",
        "Persistent workers",
        "Keeps the loader processes alive between epochs. It changes nothing within an epoch, and "
        "keeps their memory taken.",
    ),
    Switch(
        "prefetch_factor",
        "prefetch_factor",
        "Batches that each worker loads ahead. More of them bridge batches that take unevenly "
        "long; they cannot make workers faster that are too slow on average.",
    ),
    Switch(
        "copy_stream",
        "Copy on a side stream",
        "Copies the next batch to the GPU on a stream of its own while this one is computed. It "
        "costs memory for one more batch, and needs pin_memory to overlap.",
    ),
    Switch(
        "data_on_device",
        "Data set kept on the device",
        "Copies the whole data set to the GPU once, so that no batch has to travel; on a CPU it "
        "keeps the images that the first epoch has decoded. It must fit beside the training, and "
        "on a GPU data that have to be decoded cannot use it; pin_memory and non_blocking then do "
        "nothing.",
    ),
    Switch(
        "warmup",
        "Warm-up",
        "Makes some steps before the first one that counts, so that kernels are loaded and chosen; "
        "the weights stay as they were. The rest of the run is as fast as without.",
    ),
    Switch(
        "memory_warmup",
        "Memory warm-up",
        "Lets the allocator reserve once what the largest step needs, before training. It avoids "
        "calls to the driver in the first steps only, and keeps that memory reserved.",
    ),
    Switch(
        "compile",
        "torch.compile",
        "Compiles the model for full batches into fewer, larger kernels; reduce-overhead adds CUDA "
        "Graphs, max-autotune tries many kernels. Compiling takes from seconds to minutes, which a "
        "short run does not earn back.",
    ),
    Switch(
        "cuda_graphs",
        "CUDA Graphs",
        "Records the whole step once and replays it with one launch. It helps where the GPU waits "
        "for launches; long kernels hide those anyway, and every batch must have the same size.",
    ),
)

PARALLEL_SWITCHES: tuple[Switch, ...] = (
    Switch(
        "parallel",
        "Parallelism",
        "DDP gives each device a process with a copy of the model and averages the gradients; "
        "FSDP2 spreads weights, gradients and optimizer state, and DataParallel copies the model "
        "anew in each step, in one process. Small models gain nothing: they wait for each other "
        "longer than they compute.",
    ),
    Switch(
        "ranks",
        "Devices",
        "How many devices of a machine train together, one process each; on a CPU each process "
        "gets its share of the cores. More of them take more samples a step, which shortens an "
        "epoch but may not lower the loss as fast.",
    ),
    Switch(
        "nodes",
        "Machines",
        "How many machines train together, each with as many devices; more than one is started by "
        "hand, with one command on each. The network between them is much slower than the "
        "connection within one.",
    ),
    Switch(
        "max_restarts",
        "Restarts at most",
        "When a rank dies, torchrun starts all ranks again, from the newest checkpoint, at most "
        "this often. It does not help against a failure that comes again, such as too little "
        "memory.",
    ),
    Switch(
        "no_sync",
        "no_sync",
        "Averages the gradients of all ranks once a step, instead of after each of its batches. "
        "It changes nothing without gradient accumulation, and with FSDP2 each rank keeps whole "
        "gradients in between.",
    ),
    Switch(
        "static_graph",
        "Static graph",
        "Promises DDP that each step uses the same parameters, so that it learns the order of the "
        "gradients once. A model that leaves out parts of itself at times must not promise it, "
        "and most others gain little.",
    ),
    Switch(
        "bucket_view",
        "Gradients as bucket views",
        "Keeps the gradients in DDP's buckets, instead of copying them there and back. It saves "
        "memory of the size of the gradients, and little time.",
    ),
    Switch(
        "bucket_mb",
        "Bucket size (MiB)",
        "How much of the gradients is averaged together, while the backward pass goes on. Small "
        "buckets begin earlier, large ones cost fewer calls; a model smaller than one has no "
        "choice.",
    ),
    Switch(
        "reshard",
        "Reshard after forward",
        "Frees the gathered weights of each block after its forward pass, and gathers them again "
        "for the backward pass. Without it training sends a third less, and keeps the whole "
        "model on each device.",
    ),
    Switch(
        "cpu_offload",
        "CPU offload",
        "Keeps weights, gradients and optimizer state in the host's memory, and computes the "
        "update there. It saves memory of the GPU, and makes most steps several times slower.",
    ),
    Switch(
        "collective_timing",
        "Time collectives",
        "Lets NCCL measure how long each collective takes. It costs a little, and may keep "
        "communication from overlapping with computing.",
    ),
)
"""How several devices share the work; only those that act on the chosen kind are drawn."""

BY_FIELD: dict[str, Switch] = {switch.field: switch for switch in (*SWITCHES, *PARALLEL_SWITCHES)}
