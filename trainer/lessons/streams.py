"""Streams and events: Python runs ahead of the GPU, and two streams may work side by side."""

import sys
import time

import torch

if not torch.cuda.is_available():
    sys.exit("A stream is a queue of GPU work: on a CPU each operation is done when it returns.")

a = torch.rand(1024, 1024, device="cuda")
torch.matmul(a, a)  # warm-up
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda.synchronize()

start = time.perf_counter()
begin.record()
for _ in range(20):
    torch.matmul(a, a)
end.record()
queued = (time.perf_counter() - start) * 1e3
print(f"20 multiplications are queued after {queued:.2f} ms; done by then: {end.query()}")
end.synchronize()  # waits for this event only
print(f"the GPU worked on them for {begin.elapsed_time(end):.2f} ms")

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())  # a must be complete before the side stream reads it
with torch.cuda.stream(side):
    b = a @ a
torch.cuda.current_stream().wait_stream(side)  # without this line, b could be read too early
b.record_stream(torch.cuda.current_stream())  # its memory is not reused before that
print(f"the result of the side stream is right: {torch.equal(b, a @ a)}")
