"""The model card of a saved folder: README.md, with code that opens the folder."""

from pathlib import Path
from typing import Any

from holdfast.errors import INSTALL
from holdfast.files import write_atomically
from holdfast.hub.folder_files import PROCESSOR

CARD = """---
library_name: holdfast
{base}tags:
{tags}
---

# {title}

A {family} model whose mixture-of-experts layers are routed by {routers}. Its routers are part of the model: load it with
Holdfast, not with transformers alone.

To install Holdfast, run {install}.

The code below runs in this folder. Elsewhere, write the folder's path, or the model's name on a hub, in place of ".".

```python
import holdfast

model = holdfast.load(".")
```
{further}
Start a program that does not import Holdfast with `holdfast run -- PROGRAM`.
"""
WITH_TRANSFORMERS = """
{sentence}

```python
import holdfast
from transformers import {name}

{line}
```
"""
# Auto classes that a pipeline uses, with the pipeline's task and the file that the folder must have for it.
PIPELINES = {
    "AutoModelForCausalLM": ("text-generation", "tokenizer_config.json"),
    "AutoModelForMaskedLM": ("fill-mask", "tokenizer_config.json"),
    "AutoModelForSequenceClassification": ("text-classification", "tokenizer_config.json"),
    "AutoModelForTokenClassification": ("token-classification", "tokenizer_config.json"),
    "AutoModelForImageClassification": ("image-classification", PROCESSOR),
    "AutoModel": ("feature-extraction", "tokenizer_config.json"),
}
GENERATED = "This model card has been automatically generated."  # in the card that transformers writes for an upload


def write_card(folder: Path, model: Any) -> None:
    """Write the model card to README.md, unless there is one that transformers did not generate."""
    file, tags = folder / "README.md", ["holdfast", "mixture-of-experts"]
    if file.exists():
        if GENERATED not in file.read_text(encoding="utf-8"):
            return
        from huggingface_hub import ModelCard

        tags += [tag for tag in ModelCard.load(file).data.tags or () if tag not in tags]  # those that the user named
    description = model.config.holdfast
    layers, base = description["layers"].values(), description.get("base_model")
    text = CARD.format(
        base=f"base_model: {base}\n" if base else "",
        tags="\n".join(f"- {tag}" for tag in tags),
        title=f"{base or description['model_type']}, routed by Holdfast",
        family=base or description["model_type"],
        routers=" and ".join(f"`{name}`" for name in dict.fromkeys(layer["router"] for layer in layers)),
        install=INSTALL,
        further=_with_transformers(folder, model),
    )
    write_atomically(file, text)


def _with_transformers(folder: Path, model: Any) -> str:
    """Return the part of a model card about classes of transformers that open this folder."""
    auto = _auto_class(model)
    if auto is None:
        return ""
    after = "After `import holdfast`, transformers loads it too:"
    text = WITH_TRANSFORMERS.format(sentence=after, name=auto, line=f'model = {auto}.from_pretrained(".")')
    task, needed = PIPELINES.get(auto, ("", ""))
    if not needed or not (folder / needed).is_file():
        return text
    if needed == PROCESSOR and getattr(model.config, "num_channels", 3) != 3:  # a pipeline makes RGB of every image
        name, line = "AutoImageProcessor", 'processor = AutoImageProcessor.from_pretrained(".")'
        sentence = 'It reads grey images. Its processor reads them: `processor(image.convert("L"), return_tensors="pt")`:'
    else:
        name, line, sentence = "pipeline", f'run = pipeline("{task}", ".")', "Or as a pipeline:"
    return text + WITH_TRANSFORMERS.format(sentence=sentence, name=name, line=line)


def _auto_class(model: Any) -> str | None:
    """Return the name of the Auto class that gives a model of this class, one that a pipeline uses if there are several."""
    from transformers.models.auto import modeling_auto

    found = []
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and type(model.config) in mapping:
            found += [name] if mapping[type(model.config)] is type(model) else []
    return next((name for name in PIPELINES if name in found), next(iter(found), None))
