"""What the example of the README opens: the folder `my-moe`, a tiny model and a tokeniser, and `my-text.txt`."""

import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<pad>", "<unk>", *(f"word{number}" for number in range(30))]
LINES, LENGTH = 16, 32


def write_what_the_readme_opens(folder: Path) -> None:
    """Write my-moe and my-text.txt to `folder`."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS[2:], k=LENGTH)) for _ in range(LINES)]
    (folder / "my-text.txt").write_text("\n".join(lines))
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "my-moe")
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.OlmoeConfig(
        **sizes, vocab_size=len(WORDS), num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "my-moe")
