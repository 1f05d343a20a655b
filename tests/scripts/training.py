"""Trains in the shapes that its arguments name, and prints every loss to the last bit."""
# ruff: noqa: T201

import argparse
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    """Found by workers that import this file under another name."""

    def __init__(self, size=32):
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(size, 4, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.points[index].sum()


def plain(options, every=1, **loading):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(Points(), batch_size=8, shuffle=True, **loading)
    for _ in range(options.epochs):
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets) / every
            loss.backward()
            print(loss.item().hex())
            if number % every == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()


def accumulate(options):
    plain(options, every=2)


def workers(options):
    plain(options, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)


def thread(options):
    thread = threading.Thread(target=plain, args=(options,))
    thread.start()
    thread.join()


def gan(options):
    maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
    makers = torch.optim.Adam(maker.parameters(), lr=options.lr)
    judges = torch.optim.Adam(judge.parameters(), lr=2 * options.lr)
    for _ in range(4 * options.epochs):
        real, made = torch.randn(8, 4), maker(torch.randn(8, 2))
        loss = nn.functional.softplus(judge(made.detach()) - judge(real)).mean()
        judges.zero_grad()
        loss.backward()
        judges.step()
        fooled = nn.functional.softplus(-judge(made)).mean()
        makers.zero_grad()
        fooled.backward()
        makers.step()
        print(loss.item().hex(), fooled.item().hex())


SHAPES = {
    "plain": plain,
    "accumulate": accumulate,
    "workers": workers,
    "thread": thread,
    "gan": gan,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--name", help="also an option of stepscope watch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for shape in options.shapes:
        print(shape)
        SHAPES[shape](options)


if __name__ == "__main__":
    main()
