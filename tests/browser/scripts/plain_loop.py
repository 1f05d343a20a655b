"""A training script that knows nothing of Stepscope; it ends at Ctrl-C, in words of its own."""

import sys
import time

import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=16)
sys.stdout.write(f"training begins {sys.argv[1:]}\n")
try:
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            time.sleep(0.02)
except KeyboardInterrupt:
    sys.stdout.write("interrupted, saved nothing\n")
    sys.exit(130)
