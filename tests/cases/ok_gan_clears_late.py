# healthy, like gan_without_clearing: the generator's backward() adds to gradients that are cleared
# before the discriminator uses them
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Linear(4, 8)
discriminator = nn.Linear(8, 1)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for _ in range(100):
    made = generator(torch.randn(8, 4))
    of_discriminator.zero_grad()
    (discriminator(made.detach()) - discriminator(torch.randn(8, 8))).mean().backward()
    of_discriminator.step()
    generator.zero_grad()
    (-discriminator(made)).mean().backward()
    of_generator.step()
