"""Out of memory, and what helps: a smaller batch, its gradients added up over several steps."""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit("Without CUDA there is no limit to set: Linux ends a process that takes too much.")

# A limit for this process alone, so that nothing else on the GPU is disturbed.
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(200 * 2**20 / total)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
batch, done = 16384, 0
while done < 16384:
    failed = None
    try:
        model(torch.randn(batch, 512, device="cuda")).square().mean().backward()
    except torch.OutOfMemoryError as error:
        failed = str(error).split(" GPU ")[0]  # not the error itself: it keeps all tensors alive
    if failed is None:
        done += batch  # the gradients of these parts add up
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"batch {batch:6d}: fits, peak {peak:.0f} MiB; {done} of 16384 samples done")
        continue
    print(f"batch {batch:6d}: {failed}")
    done, batch = 0, batch // 2
    model.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
torch.cuda.set_per_process_memory_fraction(1.0)
