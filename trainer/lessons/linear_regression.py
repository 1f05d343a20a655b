"""Linear regression without nn.Module and without an optimizer: four lines make a step."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.rand(256, 1, device=device)
y = 3 * x - 1 + 0.05 * torch.randn(256, 1, device=device)

w = torch.zeros(1, device=device, requires_grad=True)
b = torch.zeros(1, device=device, requires_grad=True)
for step in range(201):
    error = w * x + b - y
    loss = (error**2).mean()
    loss.backward()
    if step == 0:  # the derivative of the mean square by w is the mean of 2 · error · x
        print(f"gradient of w: autograd {w.grad.item():.5f}, ", end="")
        print(f"by hand {(2 * error * x).mean().item():.5f}")
    with torch.no_grad():  # the update is not part of the function that is learned
        w -= 0.5 * w.grad
        b -= 0.5 * b.grad
    w.grad = b.grad = None  # else the next backward() would add to them
    if step % 40 == 0:
        print(f"step {step:3d}: loss {loss.item():.5f}, w {w.item():+.3f}, b {b.item():+.3f}")
print("the data were made with w = 3, b = -1 and noise of 0.05, whose square is 0.0025")
