# healthy: the Trainer of transformers, with its schedule to 0
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 2)

    def forward(self, inputs, labels):
        logits = self.body(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
rows = [{"inputs": torch.randn(8), "labels": index % 2} for index in range(320)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(Net(), arguments, train_dataset=rows).train()
