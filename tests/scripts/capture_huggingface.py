"""Hugging Face's Trainer with a tiny model of its own, accumulation and an evaluation an epoch."""
# ruff: noqa: T201

import json
import sys

import torch
import transformers

BATCH, ACCUMULATE, ROWS, EPOCHS = 4, 2, 24, 2


class Printing(transformers.Trainer):
    """Says what each backward() was called on."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print(json.dumps({"micro_loss": loss.item()}))
        return loss


class Rates(transformers.TrainerCallback):
    """Says the learning rate and the norm that each step used."""

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        print(json.dumps({"lr": optimizer.param_groups[0]["lr"]}))


def rows(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def main(folder):
    torch.set_num_threads(1)
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        disable_tqdm=True,
    )
    trainer = Printing(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=rows(ROWS),
        eval_dataset=rows(16),
        callbacks=[Rates()],
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "grad_norm" in entry:
            print(json.dumps({"norm": float(entry["grad_norm"])}))


main(sys.argv[1])
