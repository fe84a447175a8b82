"""After `import holdfast`, what opens Hugging Face folders opens ours: Auto classes, families' own classes, pipelines."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from changed_models import (
    TWO_ROWS,
    Edit,
    Trap,
    assert_same,
    edit_config,
    flip_a_bit,
    in_layer,
    learned,
    said,
    trainer_of,
    words,
)
from tiers import quick_or_slow
from tiny import EXTRA, tiny
from tiny_dense import CONFIGS, tiny_dense
from wording import assert_refused

import holdfast
from holdfast.hub.folder_files import write_manifest
from holdfast.hub.model_classes import ModifiedConfig, ModifiedModel

AUTO = {
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "vit": "AutoModelForImageClassification",
    "swin": "AutoModelForImageClassification",
    "siglip": "AutoModel",
}


def is_changed(model: Any) -> bool:
    return isinstance(model, ModifiedModel)


def assert_same_state(model: Any, other: Any) -> None:
    """Parameters and buffers, bit for bit, without the name of the layer; and what is trained."""
    assert_same(model, other, skip=("._name",))
    trained = {name: parameter.requires_grad for name, parameter in other.named_parameters()}
    assert trained == {name: parameter.requires_grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    holdfast.save(learned("mixtral"), folder / "mixtral", tokenizer=words())
    holdfast.save(learned("bert"), folder / "bert", tokenizer=words())
    holdfast.save(learned("vit"), folder / "vit")
    return folder


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(kept / name, tmp_path / name))


# The class that was saved


@pytest.mark.parametrize("model_type", quick_or_slow([*EXTRA, *CONFIGS], ["mixtral", "gpt_oss", "llama", "vit"]))
def test_the_auto_class_and_the_familys_own_class_open_the_saved_model(model_type: str, tmp_path: Path) -> None:
    model = learned(model_type)
    folder = holdfast.save(model, tmp_path / "out")
    auto = getattr(transformers, AUTO.get(model_type, "AutoModelForCausalLM"))
    own = getattr(transformers, type(model).__name__)
    assert not issubclass(own, ModifiedModel)
    for kind in (auto, own):
        loaded = kind.from_pretrained(folder)
        assert type(loaded) is type(model) and type(loaded.config) is type(model.config) and not loaded.training
        assert_same_state(model, loaded)
        assert torch.equal(said(model, model_type), said(loaded, model_type))
        assert not getattr(loaded, "is_quantized", False) and not hasattr(loaded.config, "quantization_config")
        again = holdfast.save(loaded, tmp_path / "again", force=True)  # and is saved as it was
        for name in ("model.safetensors", "holdfast.json", "README.md"):
            assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("router", ["xmoe", "attention+top-p", "smoe-dropout"])
def test_a_router_with_weights_of_its_own_comes_back_in_the_familys_own_class(router: str, tmp_path: Path) -> None:
    model = learned("mixtral", router)
    loaded = transformers.MixtralForCausalLM.from_pretrained(holdfast.save(model, tmp_path / "out"))
    assert_same_state(model, loaded)
    assert torch.equal(said(model, "mixtral"), said(loaded, "mixtral"))


@pytest.mark.parametrize("opens", ["AutoModelForCausalLM", "MixtralForCausalLM"])
def test_options_reach_the_model_and_its_config(opens: str, kept: Path) -> None:
    kind = getattr(transformers, opens)
    loaded = kind.from_pretrained(
        kept / "mixtral", dtype=torch.bfloat16, attn_implementation="eager", router_aux_loss_coef=0.5, use_cache=False
    )
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {value.dtype for name, value in loaded.named_buffers() if name.endswith(".graph")} == {torch.float32}
    assert loaded.config._attn_implementation == "eager"
    assert loaded.config.router_aux_loss_coef == 0.5 and loaded.config.use_cache is False
    loaded, info = kind.from_pretrained(kept / "mixtral", output_loading_info=True)
    assert is_changed(loaded) and not info["missing_keys"]


def test_the_config_alone_is_the_familys(kept: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(kept / "mixtral", vocab_size=99)
    assert isinstance(config, transformers.MixtralConfig) and ModifiedConfig in type(config).__mro__
    assert config.vocab_size == 99 and config.hidden_size == 32 and config.model_type == "mixtral"
    own = transformers.MixtralConfig.from_pretrained(kept / "mixtral")
    assert own.hidden_size == 32 and own.num_hidden_layers == 3
    again = type(config).from_pretrained(kept / "mixtral")  # as peft asks
    assert again.to_dict() == {**config.to_dict(), "vocab_size": 64, "_name_or_path": ""}


def test_a_config_makes_a_changed_model_with_new_weights(kept: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(kept / "mixtral")
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert is_changed(model) and any(isinstance(module, holdfast.Router) for module in model.modules())


def test_a_model_changed_in_this_process_has_a_config_that_auto_classes_know() -> None:
    model = holdfast.reroute(tiny("olmoe"), "symphony")
    assert is_changed(transformers.AutoModelForCausalLM.from_config(model.config))


def test_a_changed_class_opens_a_plain_folder_as_a_plain_model(kept: Path, tmp_path: Path) -> None:
    plain = tiny("mixtral")
    plain.save_pretrained(tmp_path)
    loaded = type(holdfast.load(kept / "mixtral")).from_pretrained(tmp_path)
    assert type(loaded) is type(plain) and torch.equal(said(plain, "mixtral"), said(loaded, "mixtral"))


# Other heads


@pytest.mark.parametrize("opens", ["AutoModel", "MixtralModel"])
def test_the_base_model_is_that_of_the_saved_one(opens: str, kept: Path) -> None:
    model = holdfast.load(kept / "mixtral")
    base = getattr(transformers, opens).from_pretrained(kept / "mixtral")
    assert is_changed(base)
    assert_same_state(model.model, base)
    with torch.no_grad():
        expected = model.model(input_ids=TWO_ROWS).last_hidden_state
        assert torch.equal(base(input_ids=TWO_ROWS).last_hidden_state, expected)


@pytest.mark.parametrize("opens", ["AutoModelForSequenceClassification", "MixtralForSequenceClassification"])
def test_another_head_is_initialised_with_a_warning_of_transformers(
    opens: str, kept: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    caplog.set_level("WARNING", logger="transformers")  # training in this process may have silenced it
    model = getattr(transformers, opens).from_pretrained(kept / "mixtral", num_labels=7)
    assert model.score.weight.shape == (7, 32) and bool(model.score.weight.isfinite().all())
    assert_same_state(holdfast.load(kept / "mixtral").model, model.model)
    assert "score.weight" in caplog.text and "MISSING" in caplog.text


def test_a_base_model_that_was_changed_is_opened_with_a_head(tmp_path: Path) -> None:
    base = holdfast.sparsify(tiny_dense("bert").bert, experts=4, router="smooth")
    folder = holdfast.save(base, tmp_path / "out")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert list(model.config.holdfast["layers"]) == [f"encoder.layer.{index}.intermediate" for index in range(3)]
    for name, value in base.state_dict().items():
        if not name.startswith("pooler"):  # which this head has not
            assert torch.equal(value, model.bert.state_dict()[name]), name


def test_a_model_inside_a_changed_one_is_saved_as_a_changed_one(tmp_path: Path) -> None:
    model = learned("mixtral")
    model.base_model.save_pretrained(tmp_path)
    assert_same_state(model.model, transformers.AutoModel.from_pretrained(tmp_path))
    holdfast.restore(model)
    assert not is_changed(model.model)
    assert_refused("save the whole model", learned("siglip").vision_model.save_pretrained, tmp_path / "tower")


def test_another_number_of_labels_is_the_users_choice(kept: Path) -> None:
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForImageClassification.from_pretrained(kept / "vit", num_labels=3)
    model = transformers.AutoModelForImageClassification.from_pretrained(
        kept / "vit", num_labels=3, ignore_mismatched_sizes=True
    )
    assert model.classifier.weight.shape == (3, 32)
    with pytest.raises(ValueError, match="reshapes weights"):  # its own class cannot: transformers would not look at shapes
        transformers.ViTForImageClassification.from_pretrained(kept / "vit", num_labels=3, ignore_mismatched_sizes=True)


# What is built on Auto classes


def test_a_pipeline_generates_what_the_model_generates(kept: Path) -> None:
    generate = transformers.pipeline("text-generation", model=str(kept / "mixtral"))
    assert is_changed(generate.model)
    found = generate("w5 w9 w13", max_new_tokens=4, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    asked = torch.tensor([[5, 9, 13]])
    expected = holdfast.load(kept / "mixtral").generate(input_ids=asked, max_new_tokens=4, do_sample=False)
    assert found == expected[0].tolist()


def test_a_trainer_writes_checkpoints_that_auto_classes_open(tmp_path: Path) -> None:
    model = learned("llama")
    trainer_of(model, tmp_path, TWO_ROWS, max_steps=1, save_steps=1, save_strategy="steps").train()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert_same_state(model, loaded)
    assert "library_name: holdfast" in (tmp_path / "checkpoint-1" / "README.md").read_text()


def image_processor(channels: int) -> Any:
    """One for the tiny ViT."""
    sizes: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    scaling = {"image_mean": [0.5] * channels, "image_std": [0.5] * channels}
    return transformers.CLIPImageProcessorPil(**sizes, **scaling, do_convert_rgb=channels == 3)


# For each kind of model: how it is made, its tokeniser or processor, and the names that its card must import.
CARDS: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[str]]] = {
    "causal": (lambda: learned("mixtral"), words, ["AutoModelForCausalLM", "pipeline"]),
    "causal of another name": (lambda: learned("gpt2"), words, ["AutoModelForCausalLM", "pipeline"]),
    "without a tokeniser": (lambda: learned("mixtral"), lambda: None, ["AutoModelForCausalLM"]),
    "masked": (lambda: learned("bert"), lambda: words(mask_token="w3"), ["AutoModelForMaskedLM", "pipeline"]),
    "labels": (
        lambda: holdfast.sparsify(transformers.BertForSequenceClassification(tiny_dense("bert").config), experts=4),
        words,
        ["AutoModelForSequenceClassification", "pipeline"],
    ),
    "encoder": (
        lambda: holdfast.sparsify(transformers.BertModel(tiny_dense("bert").config), experts=4),
        words,
        ["AutoModel", "pipeline"],
    ),
    "images": (lambda: learned("vit"), lambda: image_processor(3), ["AutoModelForImageClassification", "pipeline"]),
    "grey images": (
        lambda: holdfast.sparsify(tiny_dense("vit", num_channels=1), experts=4),
        lambda: image_processor(1),
        ["AutoModelForImageClassification", "AutoImageProcessor"],
    ),
    "two towers": (lambda: learned("siglip"), lambda: None, ["AutoModel"]),
}


@pytest.mark.parametrize("kind", CARDS)
def test_the_code_of_a_model_card_runs_as_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reader, names = CARDS[kind]
    model = make()
    folder = holdfast.save(model, tmp_path / "out", tokenizer=reader())
    monkeypatch.chdir(folder)
    first, *further = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    for code, name in zip([first, *further], ["holdfast", *names], strict=True):
        namespace: dict[str, Any] = {}
        exec(code, namespace)
        assert name in namespace
        opened = namespace["run"].model if name == "pipeline" else namespace.get("model", model)
        assert type(opened) is type(model)
    assert ("processor" in namespace) == (kind == "grey images")


# Folders that are damaged or hostile


def in_description(**values: Any) -> Edit:
    return lambda config: config["holdfast"].update(values)


def one_layer_more(config: dict[str, Any]) -> None:
    layers = config["holdfast"]["layers"]
    layers["layers.9.mlp"] = layers["layers.0.mlp"]


def another_type(own: str) -> Edit:
    return lambda config: (config.update(model_type=own), config["holdfast"].update(model_type=own))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no checksums": lambda folder: (folder / "holdfast.json").unlink(),
    "other weights": lambda folder: flip_a_bit(folder / "model.safetensors"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "an adapter": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "no description": lambda folder: edit_config(folder, lambda config: config.pop("holdfast")),
    "another description": lambda folder: edit_config(folder, in_layer(k=1)),
    "another family": lambda folder: edit_config(folder, lambda config: config.update(model_type="olmoe")),
    "other sizes": lambda folder: edit_config(folder, lambda config: config.update(intermediate_size=24)),
}
EDITS: dict[str, Edit] = {
    "another router": in_layer(router="smoe"),
    "a router with more weights": in_layer(router="xmoe"),
    "an unknown router": in_layer(router="nonsense"),
    "a layer that is not there": one_layer_more,
    "another format": in_description(format=3),
    "itself as a family": another_type("holdfast"),
}
OPENING = ("AutoModelForCausalLM", "MixtralForCausalLM", "AutoModel", "MixtralModel")


@pytest.mark.parametrize("opens", OPENING)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused_however_it_is_opened(name: str, opens: str, copied: Callable[[str], Path]) -> None:
    folder = copied("mixtral")
    DAMAGE[name](folder)
    with pytest.raises((ValueError, OSError, RuntimeError)):
        getattr(transformers, opens).from_pretrained(folder)


@pytest.mark.parametrize("opens", OPENING)
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_description_is_refused_even_with_its_checksum(
    name: str, opens: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("mixtral")
    edit_config(folder, EDITS[name])
    write_manifest(folder)
    assert_refused(r"holdfast|router|layer|weights|format", getattr(transformers, opens).from_pretrained, folder)


def test_a_folder_with_pickles_in_place_of_weights_is_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("mixtral")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap(tmp_path / "unpickled")}, folder / "pytorch_model.bin")
    write_manifest(folder)
    for kind in (transformers.AutoModelForCausalLM, transformers.MixtralForCausalLM):
        for options in ({}, {"use_safetensors": False}, {"weights_only": False}):
            with pytest.raises((OSError, ValueError)):
                kind.from_pretrained(folder, **options)
    assert not (tmp_path / "unpickled").exists()


def test_a_value_beside_the_familys_config_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("mixtral")
    edit_config(folder, lambda config: config.update(hidden_size=64), upper=True)
    for opens in (holdfast.load, transformers.AutoModelForCausalLM.from_pretrained):
        assert_refused("'hidden_size' beside", opens, folder)


def test_a_familys_own_class_fetches_no_kernel_that_a_folder_names(copied: Callable[[str], Path]) -> None:
    folder = copied("mixtral")
    edit_config(folder, lambda config: config.update(attn_implementation="evil/kernel"))
    assert_refused("kernel", transformers.MixtralForCausalLM.from_pretrained, folder)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).config._attn_implementation == "sdpa"
