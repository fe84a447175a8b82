"""Changed vision-language models with the image processors of transformers that run on Pillow, without torchvision."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_vlm import IMAGE, PARTS, batch, llava, qwen, smolvlm
from torch import Tensor
from trained_by_others import llava_processor

import holdfast

Image = pytest.importorskip("PIL.Image")


def pil_processor(family: str, kind: str, **options: Any) -> Any:
    place = f"transformers.models.{family}.image_processing_pil_{family}"
    pytest.importorskip(place, reason="this transformers needs torchvision")
    return getattr(importlib.import_module(place), kind)(**options)


def drawn(*sizes: tuple[int, int]) -> list[Any]:
    """Images of these heights and widths, of random pixels."""
    numbers = np.random.default_rng(0)
    return [Image.fromarray(numbers.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]


def packed() -> dict[str, Tensor]:
    """Two images of Qwen2.5-VL, one high and one wide: eight tokens each."""
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    read = pil_processor("qwen2_vl", "Qwen2VLImageProcessorPil", **sizes)
    return dict(read(images=drawn((32, 16), (16, 32)), return_tensors="pt"))


def padded() -> dict[str, Tensor]:
    """Two images of SmolVLM; the second has fewer patches."""
    sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": False}
    read = pil_processor("smolvlm", "SmolVLMImageProcessorPil", **sizes)
    given = dict(read(images=[[image] for image in drawn((16, 16), (16, 16))], return_tensors="pt"))
    given["pixel_attention_mask"][1, :, 8:] = 0
    return given


@pytest.mark.parametrize(("family", "make", "images"), [("qwen", qwen, packed), ("smolvlm", smolvlm, padded)])
def test_copied_experts_compute_what_the_dense_model_did_with_images_of_several_sizes(
    family: str, make: Any, images: Any
) -> None:
    given = {**batch(family), **images()}
    parts = PARTS if family == "qwen" else ("vision", "language")
    if family == "qwen":
        assert given["image_grid_thw"].tolist() == [[1, 8, 4], [1, 4, 8]]
    with torch.no_grad():
        model = make()
        before = model(**given).logits
        after = holdfast.sparsify(model, experts=4, parts=parts)(**given).logits
    real = given["attention_mask"].bool()
    torch.testing.assert_close(after[real], before[real], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_folder_with_its_processor_opens_as_its_card_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pil_processor("siglip", "SiglipImageProcessorPil")
    processor = llava_processor()
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert token != IMAGE
    model = holdfast.sparsify(llava(image_token_id=token), experts=4, router="symphony+smooth", parts=PARTS, noise=0.5)
    folder = holdfast.save(model, tmp_path / "saved", tokenizer=processor)
    opened = transformers.AutoProcessor.from_pretrained(folder)
    (image,) = drawn((20, 30))
    given = opened(images=[image], text=["<image> w3 w4"], return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(holdfast.load(folder)(**given).logits, model(**given).logits)
    card = (folder / "README.md").read_text(encoding="utf-8")
    codes = [part.partition("```")[0] for part in card.split("```python\n")[1:]]
    assert len(codes) == 3 and "AutoModelForImageTextToText" in codes[1] and "image-text-to-text" in codes[2]
    monkeypatch.chdir(folder)
    for code in codes:
        values: dict[str, Any] = {}
        exec(code, values)
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    (answer,) = values["run"](images=[image], text="<image> w3 w4", generate_kwargs=asked, return_full_text=False)
    new = model.generate(**given, **asked)[:, given["input_ids"].shape[1] :]
    assert answer["generated_text"].split() == opened.batch_decode(new, skip_special_tokens=True)[0].split()
