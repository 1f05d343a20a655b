# https://github.com/Project-MONAI/GenerativeModels/issues/102: the discriminator's gradients stay
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Linear(4, 8)
discriminator = nn.Linear(8, 1)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for _ in range(100):
    of_generator.zero_grad()
    (-discriminator(generator(torch.randn(8, 4))).mean()).backward()
    of_generator.step()
    made = generator(torch.randn(8, 4)).detach()
    loss = (discriminator(made) - discriminator(torch.randn(8, 8))).mean()
    loss.backward()
    of_discriminator.step()
