"""Tiny tokenisers, data and loops for other people's trainers, and the gradients that they compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import holdfast

WORDS = [f"w{index}" for index in range(56)]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer() -> Any:
    """A word-level tokeniser of 63 words, in memory."""
    import tokenizers
    import transformers

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )


def llava_processor() -> Any:
    """The processor of a LLaVA whose images have 4 x 4 patches; its image processor runs on Pillow, without torchvision."""
    import transformers
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    options = {
        "patch_size": 4,
        "vision_feature_select_strategy": "full",
        "image_token": "<image>",
        "chat_template": CHAT_TEMPLATE,
    }
    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    return transformers.LlavaProcessor(image_processor=images, tokenizer=words, **options)


def sentence(seed: int, length: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(index)] for index in torch.randint(0, len(WORDS), (length,), generator=generator))


def adapter() -> Any:
    """The config of a LoRA of PEFT, and the seed by which its weights start."""
    import peft

    torch.manual_seed(4)
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """The same names, and values whose differences are a part of the largest value, or of 1 where that is less."""
    assert found.keys() == expected.keys() != set()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * max(1.0, float(value.abs().max())), name


def losses_by_hand(model: Any, losses: holdfast.Losses) -> list[Tensor]:
    """The list that each router's loss goes to from now on, with its graph; nothing is added to any gradient by itself."""
    seen: list[Tensor] = []
    model.__dict__["_holdfast"].collector.collect = lambda routing, weights, *_: weights
    for module in model.modules():
        if isinstance(module, holdfast.Router):
            module.losses = losses
            module.register_forward_hook(lambda _, given, routing: seen.append(routing.loss))
    return seen


@contextmanager
def adding_by_hand(trainer: Any, seen: list[Tensor], divisor: float) -> Iterator[None]:
    """Inside the `with`, the trainer's loss is its own plus the routers', divided by `divisor`."""
    own = trainer.compute_loss

    def compute_loss(*given: Any, **options: Any) -> Any:
        seen.clear()
        loss = own(*given, **options)
        return loss + torch.stack([term for term in seen if term.requires_grad]).sum() / divisor

    trainer.compute_loss = compute_loss
    yield


def gradients_of(trainer: Any, model: Any) -> dict[str, Tensor]:
    """Train for one step; return the gradients of that step, before anything clips them."""
    import transformers

    found: dict[str, Tensor] = {}

    class Keep(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found.update({name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None})

    trainer.add_callback(Keep())
    trainer.train()
    return found


SETTINGS: dict[str, Any] = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.0,
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 3,
}
