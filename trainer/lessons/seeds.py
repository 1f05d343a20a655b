"""The same random numbers again: seeds, the state of a generator, and generators of one's own."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"


def draw() -> list[float]:
    """Three random numbers on the device, rounded for reading."""
    return [round(value, 4) for value in torch.rand(3, device=device).tolist()]


torch.manual_seed(7)  # the CPU's generator, and those of all GPUs
first = draw()
print(f"seed 7:        {first}")
print(f"drawn on:      {draw()}")
torch.manual_seed(7)
repeated = draw()
print(f"seed 7 again:  {repeated}, equal: {repeated == first}")

# The state is the position in the sequence: a checkpoint has it, a resumed run continues there.
cpu, state = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
expected = draw()
torch.set_rng_state(cpu)
if state is not None:
    torch.cuda.set_rng_state(state)
print(f"state restored: the next numbers are the same: {draw() == expected}")

# A separate generator, as for the order of a DataLoader, does not change the state of others.
order = torch.randperm(8, generator=torch.Generator().manual_seed(7))
print(f"own generator: {order.tolist()}")
