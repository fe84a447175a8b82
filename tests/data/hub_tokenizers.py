"""Write small tokenisers of Hugging Face into folders, as in the folders of models."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def write_tokenizer(folder: Path, kind: str, texts: Sequence[str]) -> Path:
    """Write a fast tokeniser with few merges: of "bytes", with an end of text, or of lower-case "words", without one."""
    if kind == "bytes":
        fast = Tokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
        fast.train_from_iterator(texts, trainer)
        PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>", model_max_length=8).save_pretrained(folder)
    else:
        fast = Tokenizer(models.WordLevel(unk_token="<unk>"))
        fast.normalizer = normalizers.Lowercase()
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        fast.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>"]))
        PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>").save_pretrained(folder)
    return folder
