"""Which devices torch sees on this machine, and one line that chooses the best of them."""

import torch

print(f"torch {torch.__version__}, built for CUDA: {torch.version.cuda}")
print(f"CPU: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")

print(f"CUDA devices: {torch.cuda.device_count()}")
for index in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    print(f"  cuda:{index} {gpu.name}")
    print(f"    compute capability {gpu.major}.{gpu.minor}")
    print(f"    {gpu.multi_processor_count} multiprocessors")
    print(f"    {free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB")

# The same program then runs with a GPU and without one.
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.ones(3, device=device)
print(f"Chosen: {x.device}, which computes {x.tolist()} + 1 = {(x + 1).tolist()}")
