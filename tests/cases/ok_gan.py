# healthy, like gan_without_clearing: two optimizers, each cleared before its own backward()
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Linear(4, 8)
discriminator = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for _ in range(100):
    made = generator(torch.randn(8, 4))
    of_discriminator.zero_grad()
    (discriminator(made.detach()) - discriminator(torch.randn(8, 8))).mean().backward()
    of_discriminator.step()
    of_generator.zero_grad()
    (-discriminator(made)).mean().backward()
    of_generator.step()
