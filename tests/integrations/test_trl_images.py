"""TRL's SFTTrainer on images: routers of every part have the gradients of a hand-written `loss + router_loss`.

The processor is LLaVA's with SigLIP's image processor on Pillow, which needs no torchvision.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vlm import PARTS, llava
from torch import Tensor
from trained_by_others import (
    SETTINGS,
    adding_by_hand,
    assert_near,
    gradients_of,
    llava_processor,
    losses_by_hand,
    sentence,
)

import holdfast
from holdfast.hub.layers import moe_layers

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers.models.siglip.image_processing_pil_siglip", reason="this transformers needs torchvision")

LOSSES = holdfast.Losses(balance=0.3, z=0.1)


def rows() -> Any:
    """Questions about images of several sizes; the processor resizes them."""
    drawn = np.random.default_rng(0)
    sizes = [(16, 16), (20, 12), (9, 30), (24, 24)]
    images = [Image.fromarray(drawn.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
    return datasets.Dataset.from_list(
        [
            {
                "images": [images[seed % 4]],
                "messages": [
                    {"role": "user", "content": sentence(seed, 3)},
                    {"role": "assistant", "content": sentence(seed + 50, 2 + seed % 4)},
                ],
            }
            for seed in range(8)
        ]
    )


def model_of(router: str, losses: holdfast.Losses | None, with_adapter: bool) -> Any:
    image_token = llava_processor().tokenizer.convert_tokens_to_ids("<image>")
    model = llava(image_token_id=image_token)
    torch.manual_seed(1)
    holdfast.sparsify(model, experts=4, router=router, losses=losses, noise=0.5, parts=PARTS)
    if not with_adapter:
        return model
    torch.manual_seed(4)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    for layer in moe_layers(model):  # train the routers beside the adapter
        layer.block.get_submodule("router").requires_grad_(True)
    return wrapped


def trainer_of(model: Any, folder: Path, parts: int, **options: Any) -> Any:
    settings = {**SETTINGS, "gradient_accumulation_steps": parts, "max_length": None, **options}
    arguments = trl.SFTConfig(output_dir=str(folder), **settings)
    return trl.SFTTrainer(model, arguments, train_dataset=rows(), processing_class=llava_processor())


def gradients(router: str, with_adapter: bool, parts: int, folder: Path, *, by_hand: bool) -> dict[str, Tensor]:
    model = model_of(router, None if by_hand else LOSSES, with_adapter)
    inner = model.get_base_model() if with_adapter else model
    if not by_hand:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the loss was computed without")
            return gradients_of(trainer_of(model, folder, parts), model)
    seen = losses_by_hand(inner, LOSSES)
    run = trainer_of(model, folder, parts, router_aux_loss_coef=0.0)
    with adding_by_hand(run, seen, parts):
        return gradients_of(run, model)


@pytest.mark.parametrize("router", ["modality+smooth", "symphony"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("with_adapter", [False, True], ids=["whole", "adapter"])
def test_router_losses_of_all_parts_train_as_if_added_by_hand(
    with_adapter: bool, parts: int, router: str, tmp_path: Path
) -> None:
    found = gradients(router, with_adapter, parts, tmp_path / "ours", by_hand=False)
    expected = gradients(router, with_adapter, parts, tmp_path / "by hand", by_hand=True)
    assert_near(found, expected, 3e-6)
    scores = [name for name in found if ".router.score." in name]
    for part in ("vision_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in scores)
    assert all(found[name].any() for name in scores)
    if with_adapter:
        assert not any(".experts." in name for name in found)


@pytest.mark.slow
def test_it_trains_with_images_and_learns(tmp_path: Path) -> None:
    model = model_of("symphony+smooth", LOSSES, with_adapter=False)
    options = {"max_steps": 12, "learning_rate": 3e-3, "logging_steps": 1}
    trainer = trainer_of(model, tmp_path, 1, **options)
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert sum(found[-3:]) < 0.9 * sum(found[:3])
