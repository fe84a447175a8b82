"""Count the GPU hours of the papers' experiments with `holdfast.plan`, and write them into the presets.

python benchmarks/paper_hours.py    # a minute; afterwards `git diff` shows what has changed
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.planning.planning import Workload, plan
from holdfast.train import papers
from holdfast.train.papers import PAPERS, RATE, find_preset, load_papers
from holdfast.train.recipe import ModelPart, Recipe, load_recipe

EXAMPLES = {  # training images, texts or dialogues of sources that epochs are counted of
    "imagenet": 1_281_167,
    "cifar10": 50_000,
    "banking77": 10_003,
    "cola": 8_551,
    "mnli": 392_702,
    "mrpc": 3_668,
    "qnli": 104_743,
    "qqp": 363_846,
    "rte": 2_490,
    "sst2": 67_349,
    "sst5": 8_544,
    "stsb": 5_749,
    "wnli": 635,
    "LLaVA-665K": 598_768,  # without the tenth that is held out for validation
}
BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
DEIT = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
PHI = {"hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 8192}
CHECKPOINTS = {  # of the hub: family and sizes, so that hours are counted without a download
    "google-bert/bert-large-cased": ModelPart(family="bert", config={**BERT, "vocab_size": 28_996}),
    "facebook/deit-small-patch16-224": ModelPart(family="vit", config=DEIT),
    "microsoft/Phi-3-mini-4k-instruct": ModelPart(family="phi3", config={**PHI, "vocab_size": 32_064, "pad_token_id": 0}),
}


def gpu_hours(name: str) -> float | None:
    """Return about how many hours all routers and seeds of a preset train on one GPU; None if this cannot be counted.

    Every router is counted as the plain one, and the GPU as one that computes with `RATE`. Labelled texts and dialogues are
    counted as if all were as long as the longest, and every dialogue with a picture.
    """
    preset = find_preset(name)
    assert preset.recipe is not None
    recipe = load_recipe(preset.recipe, preset.set)
    if preset.start is not None:  # the model is that of the cells
        before = find_preset(f"{name.partition(':')[0]}:{preset.start}")
        assert before.recipe is not None
        first = load_recipe(before.recipe, before.set)
        recipe = replace(recipe, model=replace(first.model, config=_sizes(first)), sparse=first.sparse)
    elif recipe.model.checkpoint is not None:
        recipe = replace(recipe, model=CHECKPOINTS.get(recipe.model.checkpoint, load_recipe(preset.recipe).model))
    flops = training_flops(recipe)
    return None if flops is None else flops * preset.cells / RATE / 3600


def _sizes(recipe: Recipe) -> dict[str, Any]:
    """Return the entries of the config of a recipe's model, with those that follow from its data."""
    data, sizes = recipe.data, dict(recipe.model.config)
    if recipe.task == "text":
        sizes["vocab_size"] = 256 if data.tokens == "bytes" else data.vocabulary or 50_000
    elif recipe.task == "vision-language":
        sizes["vision_config"] = {"image_size": data.size, **sizes["vision_config"]}
    elif recipe.task != "labels" and data.size is not None:
        sizes["image_size"] = data.size
    return sizes


def training_flops(recipe: Recipe) -> float | None:
    """Return the FLOPs of one training; None for unknown checkpoints, and for data of unknown size."""
    model, sparse, training, data = recipe.model, recipe.sparse, recipe.training, recipe.data
    if model.family is None:
        return None
    of_texts = recipe.task in ("text", "labels")
    sizes, sequence = _sizes(recipe), data.length if of_texts else None
    examples = EXAMPLES.get(data.source.partition("/")[0])
    if examples is None and data.train_tokens is not None:
        examples = data.train_tokens // data.length
    if training.steps is None and examples is None:
        return None
    examples_seen = training.step_count(examples or 0) * training.batch * training.accumulate
    if recipe.task == "vision-language":
        return examples_seen * _dialogue_flops(json.dumps([asdict(recipe.sparse), sizes, data.length]))
    try:
        with warnings.catch_warnings(action="ignore"):
            change = {name: getattr(sparse, name) for name in ("experts", "k", "layers", "hidden")}
            planned = plan(model.family, ["smoe"], sizes=sizes, workload=Workload(sequence=sequence), **change)
    except ValueError:  # `plan` does not know models whose layers see different numbers of tokens
        if of_texts or data.size is None:
            return None
        return examples_seen * _image_flops(model.family, json.dumps(sizes), sparse.k or 2, json.dumps(sparse.layers))
    return planned.columns[0].training.total * examples_seen * planned.sequence


@cache
def _image_flops(family: str, sizes: str, k: int, layers: str) -> float:
    """Return the FLOPs of training on one image, counted on the dense model: a sparse layer runs k such networks.

    `sizes` and `layers` are JSON, so that equal models are counted once.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForImageClassification

    from holdfast.hub.convert import choose_layers
    from holdfast.hub.layers import dense_layers

    config = AutoConfig.for_model(family, **json.loads(sizes))
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = AutoModelForImageClassification.from_config(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, config.num_channels, config.image_size, config.image_size))
    names = list(dense_layers(model))
    counts = {name.partition(".")[2]: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    more = sum(counts[names[index]] for index in choose_layers(json.loads(layers), len(names)))
    return 3 * (counter.get_total_flops() + (k - 1) * more)  # a backward costs two forwards


@cache
def _dialogue_flops(described: str) -> float:
    """Return the FLOPs of training a LLaVA model on a dialogue with a picture, once for equal models.

    The language model is counted by the plan. Tower and connector are counted as in `_image_flops`: a sparse layer runs k
    networks, each with a product of two numbers, and their sum, for every weight and patch.

    described    JSON of the recipe's section `sparse`, the model's sizes and the number of tokens of text
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForImageTextToText

    from holdfast.hub.convert import choose_in_parts
    from holdfast.hub.layers import dense_layers

    sparse, sizes, length = json.loads(described)
    parts, k = sparse["parts"] or ["language"], sparse["k"] or 2
    config = AutoConfig.for_model("llava", **sizes)
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = AutoModelForImageTextToText.from_config(config)
        size = config.vision_config.image_size
        with FlopCounterMode(display=False) as counter:
            model.model.get_image_features(torch.empty(1, config.vision_config.num_channels, size, size))
    patches = (size // config.vision_config.patch_size) ** 2
    found = [layer for layer in dense_layers(model).values() if layer.of_images and layer.part in parts]
    networks = [model.get_submodule(layer.name) for layer in choose_in_parts(sparse["layers"], found)]
    weights = sum(one.numel() for network in networks for one in network.parameters() if one.dim() > 1)
    of_picture = 3 * (counter.get_total_flops() + (k - 1) * 2 * weights * patches)

    text = dict(sizes["text_config"])
    planned = plan(
        text.pop("model_type"),
        ["smoe"],
        experts=sparse["experts"],
        k=k if "language" in parts else 1,
        layers=sparse["layers"] if "language" in parts else "all",
        hidden=sparse["hidden"],
        sizes=text,
        workload=Workload(sequence=length + patches),
    )
    return of_picture + planned.columns[0].training.total * planned.sequence


def main() -> None:
    for paper in PAPERS:
        file = Path(papers.__file__).with_name(f"{paper}.yaml")
        text = re.sub(r"^    hours: .*\n", "", file.read_text(), flags=re.MULTILINE)
        for name, preset in load_papers()[paper].presets.items():
            if preset.recipe is not None and (hours := gpu_hours(f"{paper}:{name}")) is not None:
                heading = rf"(^  {re.escape(name)}:\n    title: .*\n)"
                text, count = re.subn(heading, rf"\g<1>    hours: {hours:.6g}\n", text, flags=re.MULTILINE)
                assert count == 1, f"{paper}:{name} has one line with its title"
        file.write_text(text)


if __name__ == "__main__":
    main()
