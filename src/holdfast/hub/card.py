"""The model card of a saved folder: what it is, and the two lines that load it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.writing import write_whole

CARD = """---
library_name: holdfast
{base}tags:
- holdfast
- mixture-of-experts
---

# {title}

A {family} model whose mixture-of-experts layers are routed by {routers}. Its routers are part of the model: load it with
Holdfast, not with transformers alone.

```
pip install holdfast
```

```python
import holdfast

model = holdfast.load("path/to/this/folder")
```

After `import holdfast`, transformers opens it too: `AutoModelForCausalLM.from_pretrained`, `pipeline`, and what uses them.
A program that does not import Holdfast is started with it: `holdfast run -- lm_eval --model hf ...`.
"""


def write_card(folder: Path, description: Mapping[str, Any]) -> None:
    """Write README.md; one that is there already stays."""
    if (folder / "README.md").exists():
        return
    layers = description["layers"].values()
    routers = " and ".join(f"`{name}`" for name in dict.fromkeys(layer["router"] for layer in layers))
    base = description.get("base_model")
    text = CARD.format(
        base=f"base_model: {base}\n" if base else "",
        title=f"{base or description['model_type']}, routed by Holdfast",
        family=base or description["model_type"],
        routers=routers,
    )
    write_whole(folder / "README.md", text)
