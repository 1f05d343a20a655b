# healthy, like slow_upload: a print at each step, a checkpoint at each 200th
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(100_000, 256), torch.randn(100_000, 1))
end = time.monotonic() + 4
with tempfile.TemporaryDirectory() as folder:
    for step, (inputs, targets) in enumerate(tqdm(DataLoader(data, batch_size=128, shuffle=True))):
        loss = nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tqdm.write(f"{loss.item():.4f}")
        if step % 200 == 0:
            torch.save(net.state_dict(), Path(folder, "net.pt"))
        if time.monotonic() > end:
            break
