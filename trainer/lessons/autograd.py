"""What backward() computes: a derivative checked by hand, and gradients that add up."""

import torch


def f(x: torch.Tensor) -> torch.Tensor:
    """A parabola; its derivative is 2x + 2."""
    return x**2 + 2 * x


x = torch.tensor(3.0, requires_grad=True, dtype=torch.float64)
y = f(x)
print(f"f(3) = {y.item():g}, made by {y.grad_fn.name() if y.grad_fn else None}")

y.backward()
print(f"backward():       {x.grad}")
print(f"by hand, 2x + 2:  {2 * x.item() + 2:g}")
with torch.no_grad():  # nothing is recorded here, so nothing is kept for a backward pass
    h = 1e-5
    slope = (f(x + h) - f(x - h)) / (2 * h)
print(f"by difference:    {slope.item():.8f}, recorded: {slope.requires_grad}")

f(x).backward()
print(f"a second backward() adds its gradient: {x.grad}")
x.grad = None  # what zero_grad() does
f(x).backward()
print(f"after x.grad = None it is right again: {x.grad}")
