# https://github.com/alexTsaptsinos/lyricsHAN/issues/3: a row that is all padding
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
tokens = torch.randint(1, 50, (1280, 10))
tokens[700] = 0
net = nn.Embedding(50, 8)
head = nn.Linear(8, 2)
optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-3)
for batch, labels in DataLoader(TensorDataset(tokens, tokens[:, 0] % 2), batch_size=16):
    mask = (batch > 0).float().unsqueeze(2)
    means = (net(batch) * mask).sum(1) / mask.sum(1)
    loss = nn.functional.cross_entropy(head(means), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
