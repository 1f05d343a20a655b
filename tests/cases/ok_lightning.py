# healthy: the Trainer of Lightning, with a validation in eval mode
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch):
        return self.body(batch[0]).pow(2).mean()

    def validation_step(self, batch):
        self.log("val_loss", self.body(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(320, 8)), batch_size=8)
with tempfile.TemporaryDirectory() as folder:
    lightning.Trainer(
        default_root_dir=folder,
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Net(), loader, loader)
