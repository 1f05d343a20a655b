# https://github.com/huggingface/transformers/issues/34059: images are decoded in the main process
import io
import time

import numpy
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self):
        pixels = numpy.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=numpy.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        self.content = file.getvalue()

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.content)).convert("RGB").resize((32, 32))
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 255, index % 10


net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
end = time.monotonic() + 4
for images, labels in DataLoader(Photos(), batch_size=16):
    loss = nn.functional.cross_entropy(net(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if time.monotonic() > end:
        break
