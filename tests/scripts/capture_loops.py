"""Loops that clip, validate, scale and compile; prints what its records have to say."""
# ruff: noqa: T201

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data(rows=20):
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), batch_size=8)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def say(**values):
    print(json.dumps(values))


def clipped():
    net, loader = model(), data()
    bias = [p for p in net.parameters() if p.ndim == 1]
    rest = [p for p in net.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": bias, "lr": 0.5}], lr=0.25)
    for epoch in (1.0, 2.0):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            say(
                loss=loss.item(),
                norm=norm.item(),
                lr=0.25,
                bias_lr=0.5,
                epoch=epoch,
                samples=float(len(x)),
            )
        for x, y in loader:  # fetched outside of no_grad, as many loops do
            with torch.no_grad():
                nn.functional.mse_loss(net(x), y)


def scaled():
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for number in range(6):
        optimizer.zero_grad()
        loss = net(torch.full((8, 4), 0.1 * number)).mean()
        if number in (2, 3):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if number not in (2, 3):
            say(loss=loss.item(), scale=scale)


def compiled():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="aot_eager")
    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(4):
        say(loss=step(torch.randn(8, 4)).item())


def closures():
    weight = nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)
    last = []

    def closure():
        optimizer.zero_grad()
        loss = (weight - 1).square()
        loss.backward()
        last[:] = [loss.item()]
        return loss

    for _ in range(2):
        optimizer.step(closure)
        say(loss=last[0])


torch.set_num_threads(1)
for part in (clipped, scaled, compiled, closures):
    part()
