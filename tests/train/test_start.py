"""Training starts from a checkpoint: dense, a mixture of experts, or a cell of an earlier run, with its own tokeniser."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from train.conftest import MakeRecipe
from wording import assert_refused

import holdfast
from holdfast.data import PixelScaling
from holdfast.hub.install import specs_of
from holdfast.hub.layers import is_moe
from holdfast.routing import Router
from holdfast.train import Comparison, Recipe, build_model, load_recipe, load_trained, make_task, parse_routers
from holdfast.train.recipe import ModelPart, parse_router
from holdfast.train.start import _say_once, padding_token, start_model, start_scaling, start_tokenizer
from holdfast.train.training import SingleRun

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
OF_BERT = {key: value for key, value in SIZES.items() if "key_value" not in key}


def save(model: Any, folder: Path, words: int = 60) -> str:
    """Save a model with a tokeniser of `words` words."""
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{number}": number for number in range(2, words)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folders of small models: dense, with experts, and an encoder without a head."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("models")
    models = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **SIZES)),
        "mixtral": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(vocab_size=64, num_local_experts=4, num_experts_per_tok=2, **SIZES)
        ),
        "bert": transformers.BertModel(transformers.BertConfig(vocab_size=64, **OF_BERT)),
    }
    return {name: save(model, place / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def cell(tiny: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a cell with `symphony`, whose graph has been learned for a few steps."""
    folder = tmp_path_factory.mktemp("pretrained")
    Comparison(tiny({"training.steps": 4, "data.test_bytes": 800}), parse_routers("symphony"), 1, folder).run()
    return folder / "cells" / "symphony-seed0"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "some.txt"
    path.write_text("".join(" ".join(f"w{2 + (i * j) % 50}" for j in range(20)) + "\n" for i in range(1, 300)))
    return path


def recipe_from(checkpoint: str, source: Path, changes: dict[str, Any] | None = None) -> Recipe:
    few = {"training.steps": 3, "training.batch": 4, "data.length": 16, "attack.rate": 0.2, "data.test_bytes": 800}
    sparse: dict[str, Any] = {"sparse": {}, "data.tokens": None, "data.source": str(source)}
    return load_recipe("tiny", {**few, **sparse, "model.checkpoint": checkpoint, **(changes or {})})


def built(recipe: Recipe, router: str = "smoe", seed: int = 0) -> Any:
    choice = parse_router(router)
    return build_model(make_task(recipe), choice.router, choice.options, seed=seed, k=choice.k)


# What routers are put into


def test_a_dense_checkpoint_becomes_copies_that_compute_what_it_computed(folders: dict[str, str], words: Path) -> None:
    recipe = recipe_from(folders["llama"], words, {"sparse.experts": 4})
    dense = transformers.LlamaForCausalLM.from_pretrained(folders["llama"]).eval()
    ids = torch.arange(2, 50).view(3, 16)
    for router in ("smoe", "symphony", "xmoe"):
        model = built(recipe, router).eval()
        assert is_moe(model) and len(specs_of(model)) == 2
        torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits, atol=1e-5, rtol=1e-4)
    random = built(recipe_from(folders["llama"], words, {"sparse.experts": 4, "sparse.init": "random"})).eval()
    assert not torch.allclose(random(input_ids=ids).logits, dense(input_ids=ids).logits, atol=1e-2)


def test_routers_start_from_equal_scores_also_with_copies(folders: dict[str, str], words: Path) -> None:
    recipe = recipe_from(folders["llama"], words, {"sparse.experts": 4})
    one, other = (built(recipe, router) for router in ("smoe", "smoe[noise=gaussian]"))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    assert not torch.equal(*(built(recipe, seed=seed).model.layers[0].mlp.router.score.weight for seed in (0, 1)))


def test_a_mixture_of_experts_is_rerouted_and_keeps_its_weights(folders: dict[str, str], words: Path) -> None:
    recipe = recipe_from(folders["mixtral"], words)
    native = transformers.MixtralForCausalLM.from_pretrained(folders["mixtral"]).eval()
    ids = torch.arange(2, 50).view(3, 16)
    for router, k in (("smoe", 2), ("symphony", 2), ("smoe[k=1]", 1)):
        model = built(recipe, router).eval()
        assert [spec.k for spec in specs_of(model).values()] == [k, k]
        assert [spec.losses and spec.losses.balance for spec in specs_of(model).values()] == [0.01, 0.01]
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in native.state_dict().items())
        same = torch.allclose(model(input_ids=ids).logits, native(input_ids=ids).logits, atol=1e-5)
        assert same == (k == 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sparse.experts": 8}, "sparse.experts is 8, and .* has 4 already; leave it out .--set sparse.experts=null"),
        ({"sparse.hidden": 8}, "sparse.hidden is 8"),
        ({"sparse.shared": 1}, "sparse.shared is 1"),
        ({"sparse.layers": "last:1"}, "sparse.layers is last:1, and .* in other layers"),
        ({"sparse.init": "copy"}, "sparse.init is for dense models"),
        ({"sparse.k": 5}, "k is 5"),
    ],
)
def test_values_that_contradict_a_mixture_of_experts_are_refused_before_training(
    changes: dict[str, Any], sentence: str, folders: dict[str, str], words: Path, tmp_path: Path
) -> None:
    recipe = recipe_from(folders["mixtral"], words, changes)
    assert_refused(sentence, lambda: Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run").run())
    assert not (tmp_path / "run").exists()


def test_values_that_agree_with_a_mixture_of_experts_are_accepted(folders: dict[str, str], words: Path) -> None:
    changes = {"sparse.experts": 4, "sparse.hidden": 32, "sparse.layers": [0, 1]}
    assert len(specs_of(built(recipe_from(folders["mixtral"], words, changes)))) == 2


def test_a_cell_keeps_the_state_of_its_router_unless_another_is_named(cell: Path, tiny: MakeRecipe) -> None:
    recipe = tiny({"model.checkpoint": str(cell), "losses.z": 0.5})
    before = load_trained(cell).model
    graphs = [module.snapshot()["graph"] for module in before.modules() if isinstance(module, Router)]
    kept = built(recipe, "symphony", seed=5)
    routers = [module for module in kept.modules() if isinstance(module, Router)]
    assert len(graphs) == len(routers) == 2
    for graph, router in zip(graphs, routers, strict=True):
        assert torch.equal(router.snapshot()["graph"], graph) and bool((graph != torch.eye(8)).any())
        assert router.losses == holdfast.Losses(z=0.5, balance=0.01)
    assert all(spec.losses and spec.losses.z == 0.5 for spec in specs_of(kept).values())
    assert kept.state_dict().keys() == before.state_dict().keys()
    assert all(torch.equal(value, kept.state_dict()[name]) for name, value in before.state_dict().items())
    for other in ("symphony[beta=0.5]", "smoe"):
        changed = built(recipe, other)
        for router, old in zip((m for m in changed.modules() if isinstance(m, Router)), routers, strict=True):
            assert torch.equal(router.score.get_parameter("weight"), old.score.get_parameter("weight"))
            assert "graph" not in router.snapshot() or torch.equal(router.snapshot()["graph"], torch.eye(8))


@pytest.mark.slow
def test_a_comparison_from_a_cell_trains_resumes_and_is_evaluated_again(
    cell: Path, tiny: MakeRecipe, text: Path, tmp_path: Path
) -> None:
    recipe = tiny({"model.checkpoint": str(cell), "training.steps": 4, "data.test_bytes": 800})
    results = Comparison(recipe, parse_routers("smoe,symphony"), 1, tmp_path / "run").run()
    shutil.move(cell, cell.with_name("moved"))  # a trained model needs its checkpoint no longer
    try:
        trained = load_trained(tmp_path / "run" / "cells" / "smoe-seed0")
        task = trained.task(source=str(text))
        assert task.score(trained.model)["clean"]["nll"] == results[0]["clean"]["nll"]
    finally:
        shutil.move(cell.with_name("moved"), cell)
    again = Comparison(recipe, parse_routers("smoe,symphony"), 1, tmp_path / "run").run()
    assert [result["log"] for result in again] == [result["log"] for result in results]


def test_a_run_whose_checkpoint_has_changed_is_refused(folders: dict[str, str], words: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(folders["mixtral"], folder)
    recipe = recipe_from(str(folder), words, {"training.steps": 1})
    SingleRun(recipe, parse_router("smoe"), 0, tmp_path / "run").run()
    SingleRun(recipe, parse_router("smoe"), 0, tmp_path / "run")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(
        "belongs to another run \\(another checkpoint\\)", SingleRun, recipe, parse_router("smoe"), 0, tmp_path / "run"
    )


# Tokenisers


def test_a_checkpoint_brings_its_own_tokeniser(folders: dict[str, str], cell: Path, words: Path, text: Path) -> None:
    task: Any = make_task(recipe_from(folders["llama"], words))
    assert task.tokenizer.decode([5, 6]) == "w5 w6" and len(task.tokenizer) == 60
    same: Any = make_task(recipe_from(folders["llama"], words, {"data.tokens": folders["bert"]}))  # the same tokeniser
    assert same.tokenizer.checksum() == task.tokenizer.checksum()
    own: Any = make_task(recipe_from(str(cell), words, {"data.tokens": "words"}))  # not the words of this text
    assert own.tokenizer.describe() == load_trained(cell).record.tokenizer().describe()


def test_another_tokeniser_is_refused(folders: dict[str, str], cell: Path, words: Path, tmp_path: Path) -> None:
    other = save(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **SIZES)), tmp_path / "other", 50)
    for checkpoint, tokens in itertools.product((folders["llama"], str(cell)), ("bytes", other)):
        with pytest.raises(ValueError, match=r"was trained with another tokeniser; leave data\.tokens out") as caught:
            make_task(recipe_from(checkpoint, words, {"data.tokens": tokens}))
        assert "\n" not in str(caught.value)


def test_the_padding_token_is_one_that_no_text_contains(folders: dict[str, str], cell: Path) -> None:
    hub, vocabulary = (start_tokenizer(name) for name in (folders["bert"], str(cell)))
    assert (padding_token(hub), padding_token(vocabulary)) == (1, vocabulary.end)


# Heads


def unnamed(count: int) -> dict[int, str]:
    """Return the labels of classes without names, as transformers has them."""
    return {number: f"LABEL_{number}" for number in range(count)}


def classifier(folder: Path, classes: list[str]) -> str:
    torch.manual_seed(1)
    names = dict(enumerate(classes))
    config = transformers.LlamaConfig(vocab_size=64, pad_token_id=1, id2label=names, **SIZES)
    return save(transformers.LlamaForSequenceClassification(config), folder)


def test_a_head_that_does_not_fit_is_made_new_and_that_is_said(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = ModelPart(checkpoint=classifier(tmp_path / "three", ["a", "b", "c"]))
    own = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "three")
    kept = start_model(part, "labels", id2label={0: "a", 1: "b", 2: "c"})
    assert torch.equal(kept.score.weight, own.score.weight) and not caplog.messages
    for classes in (["a", "b"], ["c", "b", "a"]):  # another number, and the same number in another order
        caplog.clear()
        _say_once.cache_clear()
        fresh = start_model(part, "labels", id2label=dict(enumerate(classes)))
        assert fresh.config.id2label == dict(enumerate(classes)) and fresh.score.weight.shape == (len(classes), 32)
        assert "score starts new" in caplog.text
        assert not torch.equal(fresh.score.weight[0], own.score.weight[0])
        assert 0.01 < float(fresh.score.weight.detach().std()) < 0.04  # initializer_range is 0.02
        assert torch.equal(fresh.model.norm.weight, own.model.norm.weight)
    caplog.clear()
    bert = start_model(ModelPart(checkpoint=folders["bert"]), "labels", id2label=unnamed(1), problem_type="regression")
    assert (bert.config.num_labels, bert.config.problem_type) == (1, "regression")
    assert "classifier starts new" in caplog.text and "pooler" not in caplog.text
    masked = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **OF_BERT))
    part = ModelPart(checkpoint=save(masked, tmp_path / "masked"))
    start_model(part, "labels", id2label=unnamed(3))  # such a model has no pooler
    assert "bert.pooler.dense, classifier starts new, and cls.predictions" in caplog.text


def test_a_cell_of_a_language_model_becomes_a_classifier_with_its_routers(cell: Path, tmp_path: Path) -> None:
    part = ModelPart(checkpoint=str(cell))
    assert_refused("needs a token for padding", lambda: start_model(part, "labels", id2label=unnamed(2)))
    model = start_model(part, "labels", id2label=unnamed(2), pad_token_id=1).eval()
    before = load_trained(cell).model.eval()
    assert type(model).__name__ == "LlamaForSequenceClassification" and len(specs_of(model)) == 2
    torch.testing.assert_close(before.model.state_dict(), model.model.state_dict(), rtol=0, atol=0)
    ids = torch.tensor([[5, 6, 7, 1, 1], [5, 6, 7, 8, 9]])
    out = model(input_ids=ids, attention_mask=(ids != 1).long()).logits
    alone = model(input_ids=ids[:1, :3]).logits
    assert out.shape == (2, 2)
    torch.testing.assert_close(out[:1], alone, atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    for again in (holdfast.load(tmp_path), transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)):
        assert torch.equal(again.eval()(input_ids=ids[:1, :3]).logits, alone)


def test_what_is_not_a_language_model_is_refused_as_one(folders: dict[str, str], words: Path, tmp_path: Path) -> None:
    for checkpoint in (folders["bert"], classifier(tmp_path / "two", ["a", "b"])):
        assert_refused("does not predict the next token", make_task(recipe_from(checkpoint, words)).initial_model)
    both = save(transformers.BertLMHeadModel(transformers.BertConfig(vocab_size=64, **OF_BERT)), tmp_path / "both")
    assert_refused("in both directions", lambda: make_task(recipe_from(both, words)).initial_model())
    with pytest.raises(ValueError, match="no AutoModelForImageClassification"):
        start_model(ModelPart(checkpoint=folders["llama"]), "images", id2label=unnamed(2))


# Checkpoints are untrusted


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("lacks", "lacks weights \\(1, the first is model.norm.weight\\)"),
        ("adds", "has unexpected weights \\(1, the first is model.layers.0.mlp.extra\\)"),
        ("reshapes", "reshapes weights \\(1, the first is model.norm.weight\\)"),
        ("no weights", "cannot be loaded"),
        ("a pickle", "cannot be loaded"),
    ],
)
@pytest.mark.parametrize("head", ["text", "labels"])
def test_any_other_weight_that_does_not_fit_is_refused(
    head: str, change: str, sentence: str, folders: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(folders["llama"], folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    if change == "lacks":
        del weights["model.norm.weight"]
    elif change == "adds":
        weights["model.layers.0.mlp.extra"] = torch.zeros(3)
    elif change == "reshapes":
        weights["model.norm.weight"] = torch.zeros(31)
    (folder / "model.safetensors").unlink()
    if change == "a pickle":
        torch.save(weights, folder / "pytorch_model.bin")
    elif change != "no weights":
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    entries: dict[str, Any] = {"id2label": unnamed(2), "pad_token_id": 1} if head == "labels" else {}
    assert_refused(sentence, lambda: start_model(ModelPart(checkpoint=str(folder)), head, **entries))


def test_no_code_of_a_checkpoint_is_run(folders: dict[str, str], tmp_path: Path, words: Path) -> None:
    folder, mark = tmp_path / "code", tmp_path / "was-run"
    shutil.copytree(folders["llama"], folder)
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
    (folder / "config.json").write_text(json.dumps(config))
    built(recipe_from(str(folder), words, {"sparse.experts": 2}))
    assert not mark.exists()


def test_a_checkpoint_that_does_not_exist_is_one_sentence(words: Path) -> None:
    assert_refused("there is no folder nowhere/at-all", lambda: make_task(recipe_from("nowhere/at-all", words)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.family": "llama"}, "give one of model.family and model.checkpoint; this recipe has both"),
        ({"model.checkpoint": None, "model.family": None}, "this recipe has neither"),
        ({"sparse.experts": None}, "is a dense model: set sparse.experts"),
        ({"sparse.experts": 4, "model.config.no_such_entry": 3}, "has no entry 'no_such_entry'"),
        ({"sparse.experts": 4, "data.length": 65}, "length is 65, but the model's positions end at 64"),
    ],
)
def test_mistakes_in_a_recipe_are_one_sentence(
    changes: dict[str, Any], sentence: str, folders: dict[str, str], words: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        Comparison(recipe_from(folders["llama"], words, changes), parse_routers("smoe"), 1, tmp_path / "run").run()
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_entries_of_the_config_replace_those_of_the_checkpoint(folders: dict[str, str], words: Path) -> None:
    changes = {"sparse.experts": 4, "model.config.attention_dropout": 0.25}
    assert built(recipe_from(folders["llama"], words, changes)).config.attention_dropout == 0.25


def test_on_meta_a_checkpoint_has_its_structure_and_no_values(folders: dict[str, str], cell: Path) -> None:
    for checkpoint in (folders["bert"], folders["mixtral"], str(cell)):
        part, entries = ModelPart(checkpoint=checkpoint), {"id2label": unnamed(3), "pad_token_id": 1}
        with torch.device("meta"):
            model = start_model(part, "labels", **entries)
        real = start_model(part, "labels", **entries)
        assert all(parameter.is_meta for parameter in model.parameters())
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        assert shapes == {name: value.shape for name, value in real.state_dict().items()}
        assert specs_of(model) == specs_of(real)


# Images


def images(checkpoint: str, changes: dict[str, Any] | None = None) -> Recipe:
    few = {"training.steps": 2, "attack.steps": 1, "attack.examples": 4, "sparse": {"experts": 4}}
    return load_recipe("vmoe-tiny", {**few, "model.checkpoint": checkpoint, **(changes or {})})


def vit(folder: Path, image_size: int = 8, **processor: Any) -> str:
    torch.manual_seed(2)
    sizes = {key: value for key, value in OF_BERT.items() if "position" not in key}
    config = transformers.ViTConfig(image_size=image_size, patch_size=2, num_channels=1, num_labels=10, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def test_a_checkpoint_of_images_brings_its_image_processor(digits: MakeRecipe, tmp_path: Path) -> None:
    checkpoint = vit(tmp_path / "vit", image_mean=[0.1], image_std=[0.2])
    recipe = images(checkpoint)
    task = make_task(recipe)
    plain = make_task(digits())
    expected = ((plain.probe()["pixel_values"] * 0.5 + 0.5) - 0.1) / 0.2
    torch.testing.assert_close(task.probe()["pixel_values"], expected)
    torch.testing.assert_close(task.examples(0).__getitems__([1])["pixel_values"].amin(), torch.tensor(-0.5))
    SingleRun(recipe, parse_router("smoe"), 0, tmp_path / "run").run()
    again = load_trained(tmp_path / "run")
    torch.testing.assert_close(again.task().probe()["pixel_values"], expected)
    next_one = ModelPart(checkpoint=str(tmp_path / "run"))
    assert start_scaling(next_one) == PixelScaling((0.1,), (0.2,))
    assert start_scaling(ModelPart(checkpoint=vit(tmp_path / "plain"))) == PixelScaling()


@pytest.mark.parametrize(
    ("processor", "sentence"),
    [
        ({"image_mean": [0.5], "image_std": [0.0]}, "cannot be scaled"),
        ({"image_mean": "half", "image_std": [0.5]}, "list of numbers"),
        ({"image_mean": [0.5], "image_std": [0.5], "do_rescale": False}, "does not scale pixels"),
    ],
)
def test_an_image_processor_that_is_not_understood_is_refused(
    processor: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    assert_refused(sentence, lambda: make_task(images(vit(tmp_path / "vit", **processor))))


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    """Also of the family's usual size, which is not written to config.json."""
    for size in (16, 224):
        recipe = images(vit(tmp_path / str(size), image_size=size))
        with pytest.raises(ValueError, match=rf"reads images with {size} pixels .* have 8; set data\.size to {size}"):
            make_task(recipe).initial_model()


def test_a_tokeniser_with_more_tokens_than_the_model_is_refused(words: Path, tmp_path: Path) -> None:
    """Also than the family's usual number, which is not written to config.json."""
    sizes = {**SIZES, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    assert model.config.vocab_size == 32_000
    checkpoint = save(model, tmp_path / "llama", words=32_010)
    with pytest.raises(ValueError, match="has 32,000 tokens, and the tokeniser has 32,010: it belongs to another model"):
        make_task(recipe_from(checkpoint, words, {"sparse.experts": 2})).initial_model()
