"""What 16 bits cost and save: range, precision, memory and the time of a multiplication."""

import torch
from torch.utils.benchmark import Timer

device = "cuda" if torch.cuda.is_available() else "cpu"
kinds = (torch.float32, torch.float16, torch.bfloat16)

print(f"{'':22s}" + "".join(f"{str(kind)[6:]:>12s}" for kind in kinds))
print(f"{'largest number':22s}" + "".join(f"{torch.finfo(kind).max:12.3g}" for kind in kinds))
print(f"{'step above 1':22s}" + "".join(f"{torch.finfo(kind).eps:12.3g}" for kind in kinds))
for text, value in (("70 000 becomes", 7e4), ("1e-8 becomes", 1e-8), ("1.003 becomes", 1.003)):
    row = [torch.tensor(value, device=device).to(kind).item() for kind in kinds]
    print(f"{text:22s}" + "".join(f"{number:12.6g}" for number in row))

size = 2048 if device == "cuda" else 512  # large enough to keep a GPU busy
memory, times = [], []
for kind in kinds:
    a = torch.rand(size, size, device=device).to(kind)
    memory.append(a.numel() * a.element_size() / 2**20)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    times.append(timer.blocked_autorange(min_run_time=0.2).median * 1e3)
print(f"{f'{size} × {size}, MiB':22s}" + "".join(f"{number:12.2f}" for number in memory))
print(f"{'a @ a on ' + device + ', ms':22s}" + "".join(f"{number:12.3f}" for number in times))
