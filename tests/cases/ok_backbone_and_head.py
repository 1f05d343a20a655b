# healthy, like left_in_eval:
# backbone and head are two models, and only the backbone is in eval mode
import torch
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
head = nn.Linear(16, 2)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
backbone.eval()
for _ in range(60):
    inputs = torch.randn(16, 8)
    with torch.no_grad():
        features = backbone(inputs)
    loss = nn.functional.cross_entropy(head(features), (inputs[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
