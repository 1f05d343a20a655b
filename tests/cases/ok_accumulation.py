# healthy, like gan_without_clearing: gradients of four batches are added on purpose
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = TensorDataset(torch.randn(3200, 8), torch.randn(3200, 1))
optimizer.zero_grad()
for step, (inputs, targets) in enumerate(DataLoader(data, batch_size=8)):
    loss = nn.functional.mse_loss(net(inputs), targets) / 4
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad.data.zero_()
