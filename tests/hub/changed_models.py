"""Tiny models with routers of ours, what tests compare of them, and ways to spoil their folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tiny import EXTRA, tiny
from tiny_dense import inputs, outputs, tiny_dense
from torch import Tensor

import holdfast

IDS = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(0))
Edit = Callable[[dict[str, Any]], object]  # of a config
TWO_ROWS = torch.tensor([[5, 9, 13, 7, 3, 22], [4, 8, 15, 16, 23, 42]])


def changed(model_type: str, router: str, seed: int = 0, **options: Any) -> Any:
    """A rerouted model of an MoE family, or a sparsified one of a dense family."""
    if model_type in EXTRA:
        return holdfast.reroute(tiny(model_type, seed), router, **options)
    dense = tiny_dense(model_type, seed)
    torch.manual_seed(1)
    return holdfast.sparsify(dense, experts=8, router=router, noise=0.5, **options)


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS, **options).logits
    return out


def batch_of(model_type: str) -> dict[str, Any]:
    return {"input_ids": TWO_ROWS} if model_type in EXTRA else inputs(model_type)


@torch.no_grad()
def said(model: Any, model_type: str) -> Tensor:
    return outputs(model, batch_of(model_type))


def places(layer: str) -> dict[str, str]:
    """Where accelerate puts the parts of a model with three layers: layers at `layer`, all else in memory."""
    around = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return dict.fromkeys(around, "cpu") | {f"model.layers.{index}": layer for index in range(3)}


def learned(model_type: str, router: str = "symphony+smooth", model: Any = None) -> Any:
    """A tiny model with this router, whose state has moved from where it started."""
    if model_type in EXTRA:
        model = holdfast.reroute(model or tiny(model_type), router)
    else:
        model = holdfast.sparsify(model or tiny_dense(model_type), experts=4, router=router, noise=0.3)
    torch.manual_seed(3)
    model.train()
    for _ in range(2):
        model(**batch_of(model_type))
    return model.eval()


def assert_same(model: Any, other: Any, skip: tuple[str, ...] = ()) -> None:
    """Parameters and buffers, saved or not, bit for bit and of the same dtype; not what was measured in the last batch."""
    for kind in ("named_parameters", "named_buffers"):
        expected, got = dict(getattr(model, kind)()), dict(getattr(other, kind)())
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            if not name.endswith((".staged_overflow", *skip)):
                assert value.dtype == got[name].dtype and torch.equal(value, got[name]), name


def trainer_of(model: Any, folder: Path, rows: Any, evaluated: Any = None, **options: Any) -> Any:
    """A trainer of transformers on the CPU. `rows` are token ids, or what its dataset has."""
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **{**quiet, **options})
    data = [{"input_ids": row, "labels": row} for row in rows] if isinstance(rows, Tensor) else rows
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=evaluated)


def words(**special: str) -> Any:
    """A tokeniser of words, "w5" for the token 5."""
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "</s>": 2, **{f"w{index}": index for index in range(3, 64)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="</s>", model_max_length=64, **special
    )


def edit_config(folder: Path, edit: Edit, *, upper: bool = False) -> None:
    """Edit the family's config, which holds the description of routers; with `upper`, what is around it."""
    config = json.loads((folder / "config.json").read_text())
    edit(config if upper else config.get("model_config", config))
    (folder / "config.json").write_text(json.dumps(config))


def in_layer(**values: Any) -> Edit:
    """Other values in the description of the first layer."""
    return lambda config: next(iter(config["holdfast"]["layers"].values())).update(values)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))
