# https://github.com/mravanelli/pytorch-kaldi/issues/112
# late in the training a batch makes the loss NaN
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Readings(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        target = torch.tensor([float("inf") if index == 901 else index / 1000])
        return {"inputs": torch.full((4,), index / 1000), "targets": target}


net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for batch in DataLoader(Readings(), batch_size=10):
    loss = nn.functional.mse_loss(net(batch["inputs"]), batch["targets"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
