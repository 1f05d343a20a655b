"""Automatic mixed precision by hand: autocast, scale, unscale, clip, step, update."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(256, 64, device=device)
y = x.sum(dim=1, keepdim=True) / 8
layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers).to(device)  # the weights stay in fp32
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# Far too large on purpose: the first gradients overflow fp16, and the scaler reacts.
scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=20)

for step in range(61):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):  # fp16 where that is safe
        output = model(x)
        loss = torch.nn.functional.mse_loss(output.float(), y)
    scaler.scale(loss).backward()  # small gradients would be 0 in fp16
    scaler.unscale_(optimizer)  # before clipping: the limit is meant for the true gradients
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scale = scaler.get_scale()
    scaler.step(optimizer)  # leaves the step out if a gradient is infinite
    scaler.update()
    note = ": step left out, scale halved" if scaler.get_scale() < scale else ""
    if step % 20 == 0 or note:
        print(f"step {step:2d}: loss {loss.item():.4f}, norm {norm.item():.3f}, ", end="")
        print(f"scale {scale:.0f}{note}")
print(f"output {output.dtype}, weights {layers[0].weight.dtype}")
