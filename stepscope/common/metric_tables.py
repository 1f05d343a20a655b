"""Key, label, unit and meaning of all metrics, by stream."""

from __future__ import annotations

STEPS = (
    (
        "train/loss",
        "train loss",
        "",
        "Loss of this optimizer step's batch, averaged over its samples. In a watched script: "
        "sum of the scalars on which backward() was called since the last step, if they changed "
        "gradients of the optimizer. Each rank records that of its own samples.",
    ),
    (
        "train/backwards",
        "backward calls",
        "count",
        "Calls of backward() whose sum is the loss of this step; recorded if more than one.",
    ),
    ("train/lr", "learning rate", "", "Learning rate that this step used."),
    (
        "train/grad_norm",
        "gradient norm",
        "",
        "Norm of all gradients before clipping (the 2-norm unless the script asks for another); "
        "recorded only with clipping.",
    ),
    (
        "train/amp_scale",
        "AMP scale",
        "",
        "Loss scale of fp16 AMP; halves on inf gradients. The built-in loop reads it at the end "
        "of each epoch.",
    ),
    (
        "train/amp_skipped",
        "skipped steps",
        "count",
        "Optimizer steps skipped so far because a gradient was inf or NaN. Steps that a fused "
        "optimizer skips on the device are not counted.",
    ),
    (
        "train/epoch",
        "epoch",
        "count",
        "Epoch that the step belongs to, counted from 1. In a watched script: passes over the "
        "DataLoader of the training.",
    ),
    (
        "val/loss",
        "validation loss",
        "",
        "Mean loss over the validation split, once an epoch; the same on all ranks of a job.",
    ),
    (
        "val/accuracy",
        "validation accuracy",
        "%",
        "Share of validation samples classified correctly, once an epoch.",
    ),
    ("model/weight", "weight", "", "Slope of the fitted line (linear regression only)."),
    ("model/bias", "bias", "", "Intercept of the fitted line (linear regression only)."),
    (
        "perf/step_time",
        "step time",
        "s",
        "Wall time from one step boundary to the next, without pauses and validation.",
    ),
    (
        "perf/samples_per_sec",
        "samples/s",
        "1/s",
        "Samples of this step divided by its step time; a job's rate is the sum of its ranks'.",
    ),
    (
        "perf/tokens_per_sec",
        "tokens/s",
        "1/s",
        "Tokens of this step divided by its step time; scripts pass them to stepscope.log or step.",
    ),
    ("perf/data_wait", "data wait", "s", "Part of the step time spent waiting for the next batch."),
    (
        "perf/forward",
        "forward",
        "s",
        "Part of the step time from the arrival of the batch to the start of backward(); on a "
        "GPU what the host takes to launch it. In jobs and watched scripts.",
    ),
    (
        "perf/backward",
        "backward",
        "s",
        "Part of the step time in backward(), with waiting for other ranks. In jobs and watched "
        "scripts.",
    ),
    (
        "perf/optimizer",
        "optimizer",
        "s",
        "Part of the step time from the end of backward() to the end of the optimizer's step, "
        "with clipping. In jobs and watched scripts.",
    ),
    (
        "perf/forward_compute",
        "forward computing",
        "s",
        "Time from the start of DistributedDataParallel's forward to the start of backward(), "
        "on a GPU by the device's clock. Of sampled steps, in the row of the step after.",
    ),
    (
        "perf/backward_compute",
        "backward computing",
        "s",
        "Time that backward() computed until its last gradient was ready, without waiting for "
        "other ranks. Of sampled steps, in the row of the step after.",
    ),
    (
        "perf/comm_wait",
        "wait for other ranks",
        "s",
        "Time that backward() waited for averaged gradients after its own computing was done. "
        "Of sampled steps, in the row of the step after. The straggler waits least.",
    ),
    (
        "perf/ddp_iteration",
        "DDP iteration (sampled)",
        "count",
        "Number of the iteration to which perf/comm_wait in this row belongs, as "
        "DistributedDataParallel counts them: the same on all ranks.",
    ),
    (
        "perf/ddp_models",
        "models in DDP",
        "count",
        "Models in DistributedDataParallel; recorded if more than one. Their "
        "waiting is not recorded: they synchronize separately.",
    ),
    (
        "perf/h2d",
        "H2D copy time",
        "s",
        "Time that the device spent on copies from the host by .to() and .cuda(). In a watched "
        "script one step in 10 ms is measured; in the built-in loop every step is.",
    ),
    (
        "perf/gpu_time",
        "GPU time",
        "s",
        "Time on the device from the start of the forward pass to the end of the optimizer's "
        "update, with gaps between kernels, without copies of the batch. Built-in loop only.",
    ),
    (
        "perf/gpu_wait",
        "host wait for GPU",
        "s",
        "Part of the step time in which the host, two steps ahead, waited for the GPU. Near 0 "
        "the GPU waits for the host. Built-in loop only.",
    ),
    (
        "perf/tflops",
        "model FLOPs",
        "TFLOP/s",
        "Floating-point operations of the model in this step, forward and backward, divided by "
        "its step time; without recomputation. Built-in loop only.",
    ),
    (
        "perf/mfu",
        "model FLOPs utilization",
        "%",
        "Share of the GPU's dense peak for the run's precision that perf/tflops is (MFU). "
        "Missing on a CPU and without a known peak; run.json has the reason.",
    ),
)
"""One optimizer step."""
SAMPLES = (
    (
        "memory/allocated",
        "allocated",
        "B",
        "Bytes of live tensors in torch's CUDA caching allocator, this process, this device. "
        "Read between two steps, and ten times a second inside long steps.",
    ),
    (
        "memory/reserved",
        "reserved",
        "B",
        "Bytes that the caching allocator holds from the driver: allocated plus its cache.",
    ),
    (
        "memory/peak_allocated",
        "peak allocated",
        "B",
        "Highest allocated since the run began or the last Reset peak stats.",
    ),
    (
        "memory/peak_reserved",
        "peak reserved",
        "B",
        "Highest reserved since the run began or the last Reset peak stats.",
    ),
    (
        "memory/active",
        "active",
        "B",
        "Allocated, plus freed blocks that another stream may still use.",
    ),
    (
        "memory/inactive_split",
        "inactive split",
        "B",
        "Free parts of blocks in use: cache that empty_cache cannot return.",
    ),
    (
        "memory/alloc_retries",
        "allocation retries",
        "count",
        "Allocations since the run began that failed first and succeeded after a cache flush.",
    ),
    (
        "memory/ooms",
        "out-of-memory errors",
        "count",
        "Out-of-memory errors that the allocator has raised since the run began.",
    ),
    ("process/rss", "process memory", "B", "Resident memory of the training process."),
    (
        "process/peak_rss",
        "peak process memory",
        "B",
        "Highest process memory sampled since the run began or the last Reset peak stats.",
    ),
    (
        "process/cpu",
        "process CPU",
        "%",
        "CPU time of the training process per wall time, without workers; 100% is one core.",
    ),
    ("host/cpu", "host CPU", "%", "Busy share of all cores of the host."),
    (
        "host/mem_used",
        "host memory used",
        "B",
        "Host memory in use: total minus available. In a container with a limit: what it uses, "
        "without inactive file cache.",
    ),
    (
        "host/mem_total",
        "host memory total",
        "B",
        "Host memory installed, or the limit of the container where that is less.",
    ),
    ("sampler/cost", "sampler cost", "s", "Wall time that the previous tick of the sampler took."),
    (
        "memory/parameters",
        "parameters",
        "B",
        "Bytes of trained and frozen weights, each storage once, on the device that trains; on "
        "a CPU part of the process memory. Read about once a second between two steps.",
    ),
    (
        "memory/gradients",
        "gradients",
        "B",
        "Bytes of the gradients that are held between two steps: in a watched script as "
        "optimizer.step() ends, in the built-in loop after zero_grad().",
    ),
    (
        "memory/optimizer_state",
        "optimizer state",
        "B",
        "Bytes of the optimizers' tensors on the device that trains, such as Adam's moments.",
    ),
    (
        "memory/process_used",
        "process on the device",
        "B",
        "Device memory of this process as the driver counts it: reserved, and what CUDA's "
        "context and libraries take. Missing where the driver hides it.",
    ),
    (
        "process/children_rss",
        "worker memory",
        "B",
        "Memory that only this process's children and theirs have, such as data-loading "
        "workers, once a second; without pages that they share.",
    ),
)
"""The process and its host, one row per tick of the sampler."""
DEVICES = (
    (
        "gpu/util",
        "GPU utilization",
        "%",
        "Share of the driver's sample window (1/6 to 1 s) in which at least one kernel ran.",
    ),
    (
        "gpu/mem_util",
        "memory access",
        "%",
        "Share of the sample window in which device memory was read or written.",
    ),
    (
        "gpu/mem_used",
        "device used",
        "B",
        "Device memory in use by all processes; older drivers add their own reserve.",
    ),
    ("gpu/mem_total", "device total", "B", "Device memory installed."),
    ("gpu/temp", "temperature", "°C", "GPU core temperature."),
    (
        "gpu/power",
        "power",
        "W",
        "Board power now; a one-second average where only the older call works.",
    ),
    ("gpu/power_limit", "power limit", "W", "Power limit in force."),
    (
        "gpu/energy",
        "energy counter",
        "J",
        "A counter: energy of the board since the driver was loaded, by all processes.",
    ),
    ("gpu/sm_clock", "SM clock", "MHz", "Clock of the streaming multiprocessors."),
    ("gpu/mem_clock", "memory clock", "MHz", "Clock of the device memory."),
    (
        "gpu/throttle_reasons",
        "throttle reasons",
        "bit mask",
        "Why clocks are below their maximum now, as a bit mask of NVML.",
    ),
    (
        "gpu/mem_reserved",
        "driver reserve",
        "B",
        "Device memory that the driver keeps for itself; not part of gpu/mem_used.",
    ),
    (
        "gpu/mem_others",
        "other processes",
        "B",
        "Memory of all other processes, once a second; run.json names them. Missing where the "
        "driver does not list all of them, as in a container.",
    ),
    (
        "gpu/temp_mem",
        "memory temperature",
        "°C",
        "Temperature of the device memory; missing on most consumer GPUs.",
    ),
    ("gpu/temp_margin", "thermal margin", "°C", "Degrees left until the GPU slows itself down."),
    (
        "gpu/throttle_power",
        "power-capped time",
        "s",
        "A counter: time in which the power cap lowered the clocks, normal at full load.",
    ),
    (
        "gpu/throttle_sw_thermal",
        "thermal slowdown time (software)",
        "s",
        "A counter: time in which the driver lowered the clocks because of heat; R580 and newer.",
    ),
    (
        "gpu/throttle_hw_thermal",
        "thermal slowdown (hardware)",
        "s",
        "A counter: time in which the hardware did so because of heat; R580 and newer.",
    ),
    (
        "gpu/throttle_brake",
        "power brake time",
        "s",
        "A counter: time in which an external power brake did so; R580 and newer.",
    ),
    ("gpu/fan", "fan", "%", "Requested fan speed, as a share of its maximum; may exceed 100."),
    (
        "gpu/pcie_tx",
        "PCIe sent",
        "B/s",
        "Bytes a second from the GPU over PCIe, the mean since the last reading.",
    ),
    ("gpu/pcie_rx", "PCIe received", "B/s", "Bytes a second to the GPU over PCIe, as gpu/pcie_tx."),
    ("gpu/nvlink_tx", "NVLink sent", "B/s", "Bytes a second from the GPU over all its NVLinks."),
    ("gpu/nvlink_rx", "NVLink received", "B/s", "Bytes a second to the GPU over all its NVLinks."),
    (
        "gpu/sm_active",
        "SM active",
        "%",
        "Share of time in which a streaming multiprocessor had work; Hopper and newer.",
    ),
    (
        "gpu/sm_occupancy",
        "SM occupancy",
        "%",
        "Warps in flight as a share of the most that fit; Hopper and newer.",
    ),
    (
        "gpu/tensor_active",
        "tensor cores active",
        "%",
        "Share of time in which the tensor cores were active; Hopper and newer.",
    ),
    (
        "gpu/dram_active",
        "DRAM active",
        "%",
        "Share of the memory's bandwidth that was used; Hopper and newer.",
    ),
    (
        "gpu/ecc_corrected",
        "corrected memory errors",
        "count",
        "Memory errors since the driver was loaded that ECC has corrected.",
    ),
    (
        "gpu/ecc_uncorrected",
        "uncorrected memory errors",
        "count",
        "Memory errors since the driver was loaded that ECC could not correct.",
    ),
    (
        "gpu/remapped_rows",
        "remapped rows",
        "count",
        "Memory rows replaced by spare rows, over the GPU's life; Ampere and newer, not with MIG.",
    ),
    (
        "gpu/remap_pending",
        "remap pending",
        "count",
        "1 if rows will be replaced at the next reset of the GPU, else 0.",
    ),
    (
        "gpu/remap_failed",
        "remap failed",
        "count",
        "1 if a row could not be replaced for lack of spare rows, else 0.",
    ),
    (
        "gpu/pcie_replays",
        "PCIe replays",
        "count",
        "Packets retransmitted over PCIe; a rising number means a bad link.",
    ),
)
"""Each GPU, one row per tick of the sampler."""
