"""The lessons of the Learn page: each other file is a program of at most 30 lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from stepscope.distributed import ONE_MACHINE

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """One technique: a program, and a paragraph that explains its result.

    `on_cpu` describes the difference on a CPU, `ranks` is the number of processes that torchrun
    starts, or 1 without torchrun.
    """

    name: str  # of the file, and in the address of the page
    theme: str
    title: str
    text: str
    on_cpu: str = ""
    limit_s: float = 60.0  # after which the page kills it
    ranks: int = 1

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    @property
    def needs_cuda(self) -> str | None:
        """The reason with which the program exits without a GPU; None if it runs on a CPU too."""
        source = self.path.read_text(encoding="utf-8")
        exits = re.search(r'is_available\(\):\n    sys\.exit\("(.*)"\)', source)
        return None if exits is None else exits[1]

    @property
    def arguments(self) -> list[str]:
        """Python's arguments for the program."""
        if self.ranks == 1:
            return [str(self.path)]
        torchrun = ["-m", "torch.distributed.run", *ONE_MACHINE]
        return [*torchrun, f"--nproc-per-node={self.ranks}", str(self.path)]

    @property
    def command(self) -> str:
        """The shell command that starts the program."""
        program = shlex.quote(str(self.path))
        if self.ranks == 1:
            return f"python {program}"
        return f"torchrun --standalone --nproc-per-node={self.ranks} {program}"


START = "First steps"
ARITHMETIC = "Arithmetic"
MEMORY = "Memory and copies"
LAUNCHES = "Kernels and launches"
INSIDE = "Profiling"
PROCESSES = "Several processes"
_GLOO = "two processes use gloo instead of NCCL; the values are the same."


def _two_ranks(name: str, title: str, text: str, on_cpu: str = _GLOO) -> Lesson:
    """Return a lesson of two processes, each with a GPU if there are two."""
    return Lesson(name=name, theme=PROCESSES, title=title, text=text, on_cpu=on_cpu, ranks=2)


LESSONS: tuple[Lesson, ...] = (
    Lesson(
        name="devices",
        theme=START,
        title="Choose a device",
        text="A program that selects its device in one line runs on every machine: with one GPU, "
        "with several and with none. Compute capability decides which number formats and "
        "kernels a GPU has: 8.0 and later have bf16 and TF32. Free memory is that of the whole "
        "GPU, so it excludes the memory of other programs.",
        on_cpu="the list of CUDA devices is empty, and the CPU is chosen.",
    ),
    Lesson(
        name="moving_tensors",
        theme=START,
        title="Moving tensors to a device",
        text="Two tensors can only be combined on one device. Torch never moves a tensor "
        "automatically, because a copy is slow and should be visible in the code. Move the inputs "
        "to the model's device before the call. A tensor's to() returns a new tensor, so its "
        "result must be assigned; a module's to() moves the module.",
        on_cpu="torch's device “meta”, which has no values, replaces the GPU. The error is the "
        "same.",
    ),
    Lesson(
        name="linear_regression",
        theme=START,
        title="Autograd and linear regression",
        text="Training repeats four steps: compute the error, compute the gradients with "
        "backward(), change the weights a little against the gradients, clear the gradients. "
        "backward() applies the chain rule in reverse and adds to .grad: this makes gradient "
        "accumulation possible, and is why a loop must clear the gradients. w and b approach the "
        "numbers behind the data, and the loss ends near the square of the noise, which no line "
        "can remove. Such a small model is launch-bound, so a GPU is no faster.",
    ),
    Lesson(
        name="seeds",
        theme=START,
        title="Seeds and random state",
        text="A generator gives a fixed sequence; the seed selects the sequence, the state is the "
        "position in it. A checkpoint therefore has the state, not the seed: a resumed run "
        "continues with the next numbers. The CPU and each GPU have separate generators, and the "
        "same seed gives different numbers on each.",
    ),
    Lesson(
        name="matmul",
        theme=ARITHMETIC,
        title="Matmul: CPU against GPU",
        text="The work grows with the third power of the size, the data with the second: large "
        "products use every unit, small ones mostly wait. So the GFLOP/s rise with the size on "
        "both devices. A small product on a GPU takes as long as its launch; only larger ones "
        "reach the speed of the GPU. Without a synchronization the clock would measure the launch "
        "only.",
        on_cpu="only the CPU is measured.",
    ),
    Lesson(
        name="half_tensors",
        theme=ARITHMETIC,
        title="Half tensors: fp16 and bf16",
        text="Both have 16 bits and take half the memory of fp32. fp16 uses more of them "
        "for precision: its maximum is 65,504, and 1e-8 becomes 0, so it needs a gradient scaler. "
        "bf16 has the range of fp32 and only two to three decimal digits. Which one is fast "
        "depends on the hardware: a device without units for a format must convert, and can be "
        "slower than in fp32.",
    ),
    Lesson(
        name="amp",
        theme=ARITHMETIC,
        title="Mixed precision by hand",
        text="autocast runs matrix products in fp16 and keeps the weights in fp32. The scaler "
        "multiplies the loss, so that small gradients do not become 0; where they overflow to "
        "infinity it skips the step and halves its factor, as the first steps show, and "
        "after 20 good steps it doubles it again. Gradients are unscaled before clipping, "
        "or the limit would apply to numbers that are thousands of times too large.",
        on_cpu="autocast and the scaler work on a CPU too; whether fp16 is faster there depends "
        "on its instructions.",
    ),
    Lesson(
        name="cudnn_benchmark",
        theme=ARITHMETIC,
        title="cudnn.benchmark",
        text="cuDNN has several algorithms for each convolution. Without benchmark it chooses by a "
        "heuristic; with benchmark the first call with each shape times all of them and keeps the "
        "fastest. That first call is slower, and with shapes that change in each batch this cost "
        "repeats.",
    ),
    Lesson(
        name="allocated_reserved",
        theme=MEMORY,
        title="Allocated, reserved, cached",
        text="Allocated memory belongs to tensors; reserved memory is all that torch has from the "
        "driver; the difference is its cache. del moves memory into the cache, which serves the "
        "next tensor without the driver. A reference cycle keeps its tensors until gc.collect(). "
        "empty_cache() returns unused memory to the driver: it helps other programs, not this "
        "one, which must allocate it again.",
    ),
    Lesson(
        name="out_of_memory",
        theme=MEMORY,
        title="Out of memory: what to do",
        text="The whole batch does not fit into the limit of 200 MiB of this program. "
        "Activations grow with the batch, weights and gradients do not: so the batch is halved "
        "until it fits, and the gradients of the parts are added up. The error object must not be "
        "kept, because it holds the frames of the failed call and with them all their tensors. "
        "Other remedies are 16-bit precision and activation checkpointing.",
    ),
    Lesson(
        name="pinned_copies",
        theme=MEMORY,
        title="Pinned memory and copies",
        text="The GPU's copy engine reads only page-locked memory, which the system may not move. "
        "From pageable memory the driver must copy piece by piece into a page-locked buffer first, "
        "and the call returns only when that is done. From pinned memory the copy is direct, and "
        "with non_blocking=True Python continues at once. Pinning is slow: it pays for memory that "
        "is reused.",
    ),
    Lesson(
        name="streams",
        theme=LAUNCHES,
        title="Streams and events",
        text="Python only enqueues work in a stream and continues; the GPU runs it in order. So a "
        "clock in Python measures the queueing, and events, whose times the GPU takes, measure the "
        "work. Two streams have no order: wait_stream creates one, and record_stream informs the "
        "allocator that the other stream still reads the memory.",
    ),
    Lesson(
        name="warm_up",
        theme=LAUNCHES,
        title="Warm-up: slow first calls",
        text="The first call includes one-time work: libraries are loaded, kernels chosen, memory "
        "is reserved, on a GPU also the CUDA context is created. A mean over all calls includes "
        "this; a measurement should exclude the first calls and use a median, which one disturbed "
        "call cannot change.",
        on_cpu="there is no CUDA context; thread pools, libraries and memory are warmed up.",
    ),
    Lesson(
        name="cuda_graphs",
        theme=LAUNCHES,
        title="CUDA Graphs",
        text="Each kernel launch takes Python and the driver a few microseconds, longer than tiny "
        "kernels run. A graph captures fifty of them once and replays them with one launch. In "
        "return every replay uses the same memory and shapes, so new input must be copied to the "
        "captured tensors, and no code on the CPU is repeated.",
    ),
    Lesson(
        name="compile_modes",
        theme=LAUNCHES,
        title="torch.compile in three modes",
        text="Eager code runs one kernel for each operation, and each reads and writes the whole "
        "tensor. The compiler fuses them into one loop, which reads the memory once. "
        "reduce-overhead adds CUDA Graphs, and max-autotune tries several kernels, mostly for "
        "matrix products. The seconds of the first call pay off over the calls that follow: "
        "divide them by the time that a call saves.",
        on_cpu="the three modes write the same C++ here, which is compiled once; CUDA Graphs and "
        "Triton's choice of kernels need a GPU. It takes half a minute and more.",
        limit_s=300.0,
    ),
    Lesson(
        name="profiler",
        theme=INSIDE,
        title="The profiler",
        text="Each row is one operator with its self time, without the operators that it calls, "
        "and the memory that it allocated less the memory that it freed. A change pays for the "
        "rows at the top: a row with 2% of the time cannot save more. On a GPU compare both "
        "times: much CPU time and little GPU time means that launches are the limit. The first "
        "calls are excluded, because their one-time work would be at the top.",
        on_cpu="the CPU's operators are shown; there are no kernels to trace.",
    ),
    Lesson(
        name="nvtx_ranges",
        theme=INSIDE,
        title="NVTX ranges",
        text="A range names a part of the program on the timeline of Nsight Systems, above the "
        "kernels that the part launched. Without a profiler a range has almost no cost, so it can "
        "stay in the code. It marks the time of the Python code: the kernels run later, in their "
        "stream.",
    ),
    _two_ranks(
        "broadcast",
        "broadcast: from one to all",
        "torchrun has started this program twice: each process is a rank, with separate "
        "memory. A collective is a call that all ranks make, in the same order; if one rank omits "
        "it, the others wait. broadcast overwrites a tensor with that of one rank. Data-parallel "
        "training begins with a broadcast, so that all ranks train the same weights.",
    ),
    _two_ranks(
        "scatter",
        "scatter and gather",
        "scatter: one rank cuts its tensor into equal parts, and rank k gets part k. gather is the "
        "reverse: one rank collects a tensor from every rank, such as predictions to be saved. Its "
        "link carries everything, so training seldom uses either: each rank loads its own share of "
        "the data. Ranks that pass no list must make the call too.",
    ),
    _two_ranks(
        "all_reduce",
        "all_reduce: the sum everywhere",
        "The most used collective of training: all ranks pass a tensor of the same size, "
        "and all get the sum, the mean or the maximum. It consists of a reduce_scatter and an "
        "all_gather, so each byte crosses the link 2 · (n - 1) / n times, hardly more with "
        "more ranks. That factor turns size over time into the bus bandwidth.",
    ),
    _two_ranks(
        "reduce_scatter",
        "reduce_scatter and all_gather",
        "The halves of an all_reduce. FSDP averages gradients by a reduce_scatter, as each rank "
        "updates only its own part of the weights. It collects the weights of a layer by an "
        "all_gather, right before the layer is computed, and drops them afterwards. All tensors "
        "must have the same size: pad shorter ones, or send objects, which is far slower.",
    ),
    _two_ranks(
        "all_to_all",
        "all_to_all: a transpose",
        "Part k of each rank's tensor goes to rank k, and part k of the result came "
        "from rank k: a transpose over processes. Mixtures of experts send each token to the "
        "rank of its expert this way, and the results back. Every rank sends to every other "
        "at once, so it loads the links between machines more than any other collective.",
    ),
    _two_ranks(
        "send_recv",
        "send and recv: one to one",
        "A message has one sender and one receiver; other ranks make no call. Pipeline "
        "parallelism passes activations on this way. If two ranks both send first, each may "
        "wait for the other to receive: a deadlock. batch_isend_irecv starts all sends and "
        "receives together and waits afterwards, which is safe in any order.",
    ),
    _two_ranks(
        "barrier",
        "barrier: wait for all ranks",
        "No rank leaves a barrier before all ranks have reached it, so all ranks are as slow "
        "as the last one. Every collective waits in this way; a slow rank therefore shows in the "
        "times of the other ranks, not in its own. A barrier suits work of one rank, such as a "
        "download; elsewhere it only costs time.",
    ),
    _two_ranks(
        "ddp_by_hand",
        "Data parallel by hand",
        "Two calls make training data parallel: broadcast the weights once, and average "
        "the gradients after each backward pass. Weights with equal gradients stay equal, "
        "so no more has to be sent. DistributedDataParallel does the same, but "
        "sends gradients in buckets while backward still computes the others, so most of the "
        "sending costs no time.",
    ),
    _two_ranks(
        "distributed_sampler",
        "DistributedSampler",
        "Every rank shuffles all indices with the same seed and takes each n-th of "
        "them, so the shares are disjoint without communication. If the number of samples is "
        "not divisible, some are used twice. set_epoch changes the seed: without it every epoch "
        "has the same order, and no error is raised. Batches add up: two ranks of 3 make steps "
        "of 6.",
    ),
    _two_ranks(
        "dp_or_ddp",
        "DataParallel or DDP",
        "DataParallel is one process with a thread for each GPU. In every pass it "
        "copies the model to all GPUs, sends the inputs out from the first one and gathers "
        "the outputs there, and its threads share one Python lock. DDP is one process for "
        "each GPU: the model stays where it is, only gradients travel, while backward "
        "computes. The gradients are the same.",
        "DataParallel finds no GPU and computes alone; DDP runs two processes by gloo.",
    ),
)

BY_NAME: dict[str, Lesson] = {lesson.name: lesson for lesson in LESSONS}
