# healthy, like left_in_eval and detached_output: an image is optimized, by a model in eval mode
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
net.eval()
image = torch.zeros(1, 8, requires_grad=True)
optimizer = torch.optim.Adam([image], lr=0.1)
for _ in range(60):
    loss = nn.functional.cross_entropy(net(image), torch.tensor([1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
