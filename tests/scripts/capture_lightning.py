"""Lightning's Trainer: the closure runs forward and backward inside optimizer.step()."""
# ruff: noqa: T201

import json
import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Tiny(lightning.LightningModule):
    """One linear layer; says every loss that Lightning calls backward() on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_index):
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        print(json.dumps({"micro_loss": loss.item() / self.trainer.accumulate_grad_batches}))
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def main():
    torch.set_num_threads(1)
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=3,
    )
    trainer.fit(Tiny(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))


main()
