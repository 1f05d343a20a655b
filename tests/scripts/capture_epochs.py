"""Loops of real libraries whose epochs are easily miscounted; prints the epoch of every step."""
# ruff: noqa: T201, PLC0415

import json
import logging
import sys
import tempfile
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS = 4, 3

torch.set_num_threads(1)
torch.manual_seed(0)


def data(rows):
    return TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1))


def say(epoch, samples):
    print(json.dumps({"epoch": float(epoch), "samples": samples}))


def with_accelerate():
    """Evaluates with gradients on while fetching, as accelerate's examples do."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, training, validation = accelerator.prepare(
        net, optimizer, DataLoader(data(18), BATCH), DataLoader(data(10), BATCH)
    )
    for epoch in range(1, EPOCHS + 1):
        for x, y in training:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            say(epoch, len(x))
        for x, _ in validation:
            with torch.no_grad():
                net(x)


def with_huggingface():
    """Two micro-batches a step, the last step of an epoch has one; an evaluation an epoch."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )

    class Saying(transformers.Trainer):
        """Says what went into each step."""

        waiting = 0

        def training_step(self, model, inputs, *args, **kwargs):
            self.waiting += len(inputs["input_ids"])
            self.under_way = int(self.state.epoch or 0) + 1
            return super().training_step(model, inputs, *args, **kwargs)

    class Steps(transformers.TrainerCallback):
        """Knows where a step is."""

        def on_pre_optimizer_step(self, *args, **kwargs):
            say(trainer.under_way, trainer.waiting)
            trainer.waiting = 0

    def rows(count):
        ids = torch.randint(0, 50, (count, 12), generator=torch.Generator().manual_seed(0))
        return [{"input_ids": row, "labels": row} for row in ids]

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Saying(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=rows(18),
        eval_dataset=rows(10),
        callbacks=[Steps()],
    )
    trainer.train()


def with_lightning():
    """Three batches an epoch of a loader that has eight."""
    import lightning

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Tiny(lightning.LightningModule):
        """One linear layer."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch, _):
            say(self.current_epoch + 1, len(batch[0]))
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.layer(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        limit_train_batches=3,
        limit_val_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tiny(), DataLoader(data(32), BATCH), DataLoader(data(16), BATCH))


globals()["with_" + sys.argv[1]]()
