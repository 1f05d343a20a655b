# https://github.com/mihdalal/planseqlearn/issues/5
# the environment, in Python, takes most of the time
import random
import time

import torch
from torch import nn


class Maze:
    def __init__(self):
        self.cells = [[random.random() for _ in range(130)] for _ in range(130)]
        self.row = 0

    def step(self, action):
        self.row = (self.row + action) % 130
        total = 0.0
        for row in self.cells:
            for cell in row:
                total += cell * (self.row + 1) % 3
        return [total % 1, self.row / 130, action, 1.0], total % 1


policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
maze = Maze()
state = [0.0, 0.0, 0.0, 1.0]
end = time.monotonic() + 4.5
while time.monotonic() < end:
    log_probabilities = []
    rewards = []
    for _ in range(20):
        distribution = torch.distributions.Categorical(logits=policy(torch.tensor(state)))
        action = distribution.sample()
        state, reward = maze.step(int(action))
        log_probabilities.append(distribution.log_prob(action))
        rewards.append(reward)
    loss = -(torch.stack(log_probabilities) * torch.tensor(rewards)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
