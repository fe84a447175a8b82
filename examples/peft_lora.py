"""Replace the routers of a mixture-of-experts checkpoint and adapt it with LoRA (PEFT): few weights are trained and saved.

    python examples/peft_lora.py MODEL TEXTS --router smooth --out adapter

Attention gets adapters; the state of the routers is saved with them. Needs: pip install '.[lab]' peft
"""

import argparse
from pathlib import Path

import peft
import torch
import transformers
from upcycle_and_finetune import blocks

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of Hugging Face, or a name on the hub, with experts")
    parser.add_argument("texts", type=Path, help="the text to train on")
    parser.add_argument("--router", default="smooth", help="a name of `holdfast routers` (smooth)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (8)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (100)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (8)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (128)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, required=True, help="save the adapter in this folder")
    given = parser.parse_args()
    if not given.texts.is_file():
        parser.error(f"{given.texts} is not a file.")

    model = transformers.AutoModelForCausalLM.from_pretrained(given.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    holdfast.reroute(model, given.router, losses=holdfast.Losses(balance=0.01))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=given.rank, target_modules=["q_proj", "v_proj"]))
    adapted.print_trainable_parameters()

    examples = blocks(given.texts.read_text(encoding="utf-8"), tokenizer, given.length)
    optimizer = torch.optim.AdamW(
        (weight for weight in adapted.parameters() if weight.requires_grad), lr=given.learning_rate
    )
    adapted.train()
    torch.manual_seed(0)
    for step in range(given.steps):
        chosen = torch.randint(len(examples), (given.batch,)).tolist()
        batch = torch.stack([examples[place]["input_ids"] for place in chosen])
        loss = adapted(input_ids=batch, labels=batch).loss  # includes the router losses
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0 or step == given.steps - 1:
            print(f"step {step + 1}: loss {float(loss.detach()):.4f}")
    adapted.save_pretrained(given.out)
    print(f"saved in {given.out}; to load it: reroute the model alike, then peft.PeftModel.from_pretrained(model, folder)")


if __name__ == "__main__":
    main()
