"""Make a dense language model a mixture of experts (upcycle it), fine-tune it with the Hugging Face Trainer, and save it.

    python examples/upcycle_and_finetune.py MODEL TEXTS --experts 8 --router symphony --out upcycled

MODEL is a folder or a name on the hub, TEXTS a .txt file. docs/tutorials/upcycle-and-fine-tune.md explains the steps.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import holdfast


def blocks(text: str, tokenizer: Any, length: int) -> list[dict[str, torch.Tensor]]:
    """Return a text as examples of equal length, as the Trainer takes them."""
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    whole = tokens[: len(tokens) // length * length].view(-1, length)
    if len(whole) < 2:
        raise SystemExit(
            f"the text has {len(tokens)} tokens, but needs {2 * length}: give a longer one or a smaller --length."
        )
    return [{"input_ids": block, "labels": block} for block in whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of Hugging Face, or a name on the hub, of a dense model")
    parser.add_argument("texts", type=Path, help="the text to train on; its last tenth is held out")
    parser.add_argument("--experts", type=int, default=8, help="experts of each layer (8)")
    parser.add_argument("--k", type=int, default=2, help="experts of a token (2)")
    parser.add_argument("--router", default="symphony", help="a name of `holdfast routers` (symphony)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (8)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (128)")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, required=True, help="save the model in this folder")
    given = parser.parse_args()
    if not given.texts.is_file():
        parser.error(f"{given.texts} is not a file.")

    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    losses = holdfast.Losses(balance=0.01)
    holdfast.sparsify(model, experts=given.experts, k=given.k, router=given.router, losses=losses)

    examples = blocks(given.texts.read_text(encoding="utf-8"), tokenizer, given.length)
    held_out = max(1, len(examples) // 10)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=given.steps,
            per_device_train_batch_size=given.batch,
            learning_rate=given.learning_rate,
            warmup_steps=given.steps // 10,
            eval_strategy="steps",
            eval_steps=max(1, given.steps // 4),
            eval_on_start=True,  # the loss of the dense model: every expert is a copy
            save_strategy="no",
            report_to=[],
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=examples[:-held_out],
            eval_dataset=examples[-held_out:],
        )
        trainer.train()
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            print(f"step {entry['step']}: held-out loss {entry['eval_loss']:.4f}")
    holdfast.save(model, given.out, tokenizer=tokenizer)
    print(f"saved in {given.out}; load it with holdfast.load")


if __name__ == "__main__":
    main()
