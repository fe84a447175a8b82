"""`save` and `load`: the same model comes back bit for bit, and what was damaged, changed or made up is refused."""

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from changed_models import TWO_ROWS, Edit, Trap, assert_same, edit_config, flip_a_bit, in_layer, learned, said, words
from safetensors.torch import load_file
from tiny import EXTRA, tiny
from tiny_dense import CONFIGS, tiny_dense
from torch import Tensor
from wording import assert_refused, mentions

import holdfast
from holdfast.errors import INSTALL
from holdfast.hub.folder_files import MODEL_TYPE, write_manifest

CHANGES = [
    *((model_type, "symphony+smooth") for model_type in (*EXTRA, *CONFIGS)),
    ("mixtral", "xmoe"),
    ("deepseek_v3", "attention+top-p"),
    ("llama", "ac+xmoe+similarity"),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders to copy and spoil: a rerouted and a sparsified model, one in shards, and a plain checkpoint."""
    folder = tmp_path_factory.mktemp("kept")
    holdfast.save(learned("mixtral"), folder / "mixtral")
    holdfast.save(learned("llama"), folder / "llama")
    holdfast.save(learned("mixtral", "similarity"), folder / "similarity")
    learned("llama").save_pretrained(folder / "sharded", max_shard_size="30KB")
    tiny("mixtral").save_pretrained(folder / "plain")
    tiny("mixtral").save_pretrained(folder / "plain sharded", max_shard_size="30KB")
    return folder


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(kept / name, tmp_path / name))

    return copy


def refusal(folder: Path | str, **options: Any) -> str:
    """The one line that says why a folder is not loaded."""
    with pytest.raises(ValueError, match=re.escape(str(folder))) as problem:
        holdfast.load(folder, **options)
    message = str(problem.value)
    assert type(problem.value) is ValueError
    assert "\n" not in message and "Traceback" not in message
    assert problem.value.__context__ is None or problem.value.__suppress_context__  # one error, not a chain of them
    return message


# What comes back


@pytest.mark.parametrize(("model_type", "router"), CHANGES)
def test_a_loaded_model_is_the_saved_one_bit_for_bit(model_type: str, router: str, tmp_path: Path) -> None:
    model = learned(model_type, router)
    loaded = holdfast.load(holdfast.save(model, tmp_path / "out"))
    assert type(loaded) is type(model) and not loaded.training
    assert_same(model, loaded)
    assert torch.equal(said(model, model_type), said(loaded, model_type))
    layers = [module.layer for module in loaded.modules() if isinstance(module, holdfast.Router)]
    assert layers == [module.layer for module in model.modules() if isinstance(module, holdfast.Router)] != []

    again = holdfast.save(loaded, tmp_path / "again")  # and is saved as it was
    for name in ("model.safetensors", "holdfast.json"):
        assert (again / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("router", ["native", "symphony+smooth"])
@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "deepseek_v3", "phimoe", "granitemoe"])
def test_a_folder_has_the_names_and_shapes_of_the_familys_checkpoints(model_type: str, router: str, tmp_path: Path) -> None:
    """Engines that read a family's checkpoints find its weights in a folder of ours, and routers' state beside them."""
    tiny(model_type).save_pretrained(tmp_path / "plain")
    holdfast.save(holdfast.reroute(tiny(model_type), router), tmp_path / "ours")
    expected, got = weights_in(tmp_path / "plain"), weights_in(tmp_path / "ours")
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert all(".holdfast." in name for name in got.keys() - expected.keys())
    assert (got.keys() == expected.keys()) == (router == "native")


def test_a_folder_for_a_trainer_has_the_names_of_the_model_by_which_it_resumes(tmp_path: Path) -> None:
    model = learned("mixtral")
    model.save_pretrained(tmp_path, state_dict=None)  # as `Trainer._save` calls it
    assert weights_in(tmp_path).keys() == model.state_dict().keys()
    for opens in (holdfast.load, transformers.MixtralForCausalLM.from_pretrained):
        assert_same(model, opens(tmp_path))


def test_a_model_of_a_folder_in_another_layout_is_saved_in_the_familys(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "fused", save_original_format=False)
    model = holdfast.reroute(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fused"), "native")
    tiny("mixtral").save_pretrained(tmp_path / "plain")
    assert weights_in(holdfast.save(model, tmp_path / "ours")).keys() == weights_in(tmp_path / "plain").keys()


@pytest.mark.parametrize("model_type", ["mixtral", "llama"])
def test_state_stays_float32_in_a_bfloat16_model(model_type: str, tmp_path: Path) -> None:
    holdfast.save(tiny(model_type) if model_type in EXTRA else tiny_dense(model_type), tmp_path / "plain")
    model = learned(model_type, model=holdfast.load(tmp_path / "plain", dtype=torch.bfloat16))
    loaded = holdfast.load(holdfast.save(model, tmp_path / "out"))
    assert_same(model, loaded)
    assert torch.equal(said(model, model_type), said(loaded, model_type))
    narrowed = holdfast.load(holdfast.save(learned(model_type), tmp_path / "wide"), dtype=torch.bfloat16)
    for either in (loaded, narrowed):
        assert {parameter.dtype for parameter in either.parameters()} == {torch.bfloat16}
        state = [value.dtype for name, value in either.named_buffers() if name.endswith((".graph", ".width"))]
        assert state == [torch.float32] * 6


def test_generation_settings_and_the_tokenizer_are_kept(tmp_path: Path) -> None:
    model = learned("llama")
    model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 7, 1.5
    folder = holdfast.save(model, tmp_path / "out", tokenizer=words())
    loaded = holdfast.load(folder)
    assert loaded.generation_config.max_new_tokens == 7 and loaded.generation_config.repetition_penalty == 1.5
    assert loaded.generate(input_ids=TWO_ROWS[:1]).shape == (1, 13)
    assert transformers.AutoTokenizer.from_pretrained(folder)("w5 w9 w5").input_ids == [5, 9, 5]


@pytest.mark.slow
def test_a_fresh_process_needs_holdfast_alone(kept: Path, tmp_path: Path) -> None:
    program = """
import sys
import holdfast
for name in sys.argv[3:]:
    model = holdfast.load(f"{sys.argv[1]}/{name}")
    torch = sys.modules["torch"]
    with torch.no_grad():
        torch.save(model(input_ids=torch.load(f"{sys.argv[2]}/ids")).logits, f"{sys.argv[2]}/{name}")
"""
    torch.save(TWO_ROWS, tmp_path / "ids")
    names = ["mixtral", "llama", "plain"]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, str(kept), str(tmp_path), *names], check=True, env=settings, cwd=tmp_path)
    with torch.no_grad():
        for name in names:
            assert torch.equal(torch.load(tmp_path / name), holdfast.load(kept / name)(input_ids=TWO_ROWS).logits)


@pytest.mark.parametrize("model_type", [*EXTRA, "llama", "gpt2", "vit"])
def test_a_folder_without_changes_is_loaded_unchanged(model_type: str, tmp_path: Path) -> None:
    """Also one that stores each expert by itself, as checkpoints on the hub do."""
    model = tiny(model_type) if model_type in EXTRA else tiny_dense(model_type)
    model.save_pretrained(tmp_path)
    loaded = holdfast.load(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(said(model, model_type), said(loaded, model_type))
    assert not (tmp_path / "holdfast.json").exists()
    if model_type == "mixtral":
        assert b"experts.7.w1.weight" in (tmp_path / "model.safetensors").read_bytes()


def test_saving_an_unchanged_model_writes_a_plain_folder(tmp_path: Path) -> None:
    model = tiny("olmoe")
    folder = holdfast.save(model, tmp_path / "out")
    for load in (holdfast.load, transformers.AutoModelForCausalLM.from_pretrained):
        assert torch.equal(said(model, "olmoe"), said(load(folder), "olmoe"))


@pytest.mark.parametrize("model_type", ["mixtral", "llama"])
def test_save_pretrained_writes_the_same_folder(model_type: str, kept: Path, tmp_path: Path) -> None:
    """It is what a Trainer calls."""
    model = holdfast.load(kept / model_type)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in (kept / model_type).iterdir()}
    assert_same(model, holdfast.load(tmp_path))


@pytest.mark.parametrize("router", ["xmoe", "smoe-dropout"])
def test_what_is_not_trained_is_not_trained_after_loading(router: str, tmp_path: Path) -> None:
    """A gate that the router leaves unused, and scores that stay as they are: optimizers and DDP count on it."""
    model = learned("mixtral", router)
    loaded = holdfast.load(holdfast.save(model, tmp_path / "out"))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in loaded.named_parameters()} == trained
    assert not all(trained.values())
    assert all(parameter.requires_grad for parameter in holdfast.restore(loaded).parameters())


def test_a_folder_in_shards_is_loaded(kept: Path) -> None:
    assert len(list((kept / "sharded").glob("model-*.safetensors"))) > 3
    assert_same(learned("llama"), holdfast.load(kept / "sharded"))
    assert_same(tiny("mixtral"), holdfast.load(kept / "plain sharded"))


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "phimoe"])
def test_a_loaded_model_is_restored_to_the_original(model_type: str, tmp_path: Path) -> None:
    native = tiny(model_type)
    loaded = holdfast.load(holdfast.save(learned(model_type), tmp_path / "out"))
    assert not torch.equal(said(native, model_type), said(loaded, model_type))
    holdfast.restore(loaded)
    assert type(loaded) is type(native) and type(loaded.config) is type(native.config)
    assert_same(native, loaded)
    assert torch.equal(said(native, model_type), said(loaded, model_type))
    native.save_pretrained(tmp_path / "native")
    loaded.save_pretrained(tmp_path / "plain")  # anybody's again
    for file in sorted((tmp_path / "native").iterdir()):
        assert (tmp_path / "plain" / file.name).read_bytes() == file.read_bytes()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(said(native, model_type), said(theirs, model_type))


def test_a_loaded_sparse_model_can_be_rerouted_and_saved_again(kept: Path, tmp_path: Path) -> None:
    model = holdfast.reroute(holdfast.load(kept / "llama"), "similarity", layers="last:1")
    loaded = holdfast.load(holdfast.save(model, tmp_path / "out"))
    assert_same(model, loaded)
    assert torch.equal(said(model, "llama"), said(loaded, "llama"))


def test_either_name_of_the_dtype_is_heeded(kept: Path) -> None:
    for name in ("dtype", "torch_dtype"):
        for folder in ("mixtral", "plain"):
            loaded = holdfast.load(kept / folder, **{name: torch.bfloat16})
            assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert holdfast.load(kept / "mixtral").dtype == torch.float32


@pytest.mark.parametrize("name", ["mixtral", "plain"])
def test_options_reach_the_config(name: str, kept: Path) -> None:
    loaded = holdfast.load(kept / name, attn_implementation="eager", router_aux_loss_coef=0.25, num_labels=7)
    assert loaded.config._attn_implementation == "eager"
    assert loaded.config.router_aux_loss_coef == 0.25 and loaded.config.num_labels == 7
    assert (loaded if name == "plain" else holdfast.restore(loaded)).router_aux_loss_coef == 0.25


def test_options_of_save_pretrained_are_heeded_and_unknown_ones_refused(kept: Path, tmp_path: Path) -> None:
    model = holdfast.load(kept / "llama")
    folder = holdfast.save(model, tmp_path / "out", max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    for opens in (holdfast.load, transformers.LlamaForCausalLM.from_pretrained):
        assert_same(model, opens(folder))
    folder = holdfast.save(model, tmp_path / "variant", variant="small")
    assert (folder / "model.small.safetensors").exists()
    assert_same(model, holdfast.load(folder, variant="small"))
    assert_refused("'max_shard_size'", holdfast.save, model, tmp_path / "wrong", max_shards_size="30KB")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_an_upload_has_the_checksums_and_the_card_of_a_saved_folder(
    how: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the two calls that need a hub are replaced; the card on the hub is looked for, and not found."""
    remote = tmp_path / "remote"
    remote.mkdir()

    def create_commit(hub: Any, *, repo_id: str, operations: list[Any], **options: Any) -> None:
        for operation in operations:
            shutil.copy(operation.path_or_fileobj, remote / operation.path_in_repo)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda hub, repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    model = holdfast.load(kept / "mixtral")
    model.add_model_tags(["mine"])
    if how == "push_to_hub":
        model.push_to_hub("me/mine")
    else:
        model.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="me/mine")
        assert_same(model, holdfast.load(tmp_path / "local"))
    assert_same(model, holdfast.load(remote))
    card = huggingface_hub.ModelCard.load(remote / "README.md")
    assert card.data.library_name == "holdfast" and card.data.tags == ["holdfast", "mixture-of-experts", "mine"]
    assert "holdfast.load(" in card.text


def test_a_model_card_says_how_to_load_the_folder(tmp_path: Path) -> None:
    model = tiny("mixtral")
    model.config._name_or_path = "someone/Mixtral-of-theirs"
    model = holdfast.reroute(model, "symphony")
    card = huggingface_hub.ModelCard.load(holdfast.save(model, tmp_path / "out") / "README.md")
    assert card.data.library_name == "holdfast" and card.data.base_model == "someone/Mixtral-of-theirs"
    assert f"To install Holdfast, run {INSTALL}." in card.text and "`symphony`" in card.text
    loaded = holdfast.load(tmp_path / "out")
    again = huggingface_hub.ModelCard.load(holdfast.save(loaded, tmp_path / "again") / "README.md")
    assert again.content == card.content  # what it was made of is not forgotten


@pytest.mark.parametrize("name", ["/home/me/mine", "runs/mine", "../up/mine", "a/b\nevil: 1", None, 5])
def test_a_model_card_names_nothing_of_this_machine(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    model = tiny("mixtral")
    model.config._name_or_path = name
    card = huggingface_hub.ModelCard.load(holdfast.save(holdfast.reroute(model, "smoe"), tmp_path / "out") / "README.md")
    assert card.data.base_model is None and str(name) not in card.text


def test_the_card_of_a_model_that_reads_images_in_a_part_of_it(tmp_path: Path) -> None:
    from transformers import CLIPImageProcessorPil, SiglipConfig, SiglipForImageClassification

    model = holdfast.sparsify(SiglipForImageClassification(SiglipConfig(**CONFIGS["siglip"])), experts=2, k=1)
    folder = holdfast.save(model, tmp_path / "out", tokenizer=CLIPImageProcessorPil())
    assert 'pipeline("image-classification", ".")' in (folder / "README.md").read_text()


def test_a_card_that_is_there_stays(tmp_path: Path) -> None:
    model = holdfast.reroute(tiny("mixtral"), "smoe")
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    holdfast.save(model, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    holdfast.save(model, tmp_path / "out", force=True)  # replaces the folder, as it says
    assert "library_name: holdfast" in (tmp_path / "out" / "README.md").read_text()
    holdfast.save(tiny("mixtral"), tmp_path / "plain")  # of a plain model we know nothing to say
    assert not (tmp_path / "plain" / "README.md").exists()


# Saving, whole or not at all


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "DataParallel", "none"])
def test_what_is_no_hugging_face_model_is_refused_with_the_one_inside(wrapper: str, tmp_path: Path) -> None:
    model = holdfast.reroute(tiny("mixtral"), "smoe")
    if wrapper == "DistributedDataParallel":
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped: Any = model.model.layers if wrapper == "none" else getattr(torch.nn.parallel, wrapper)(model)
        said = "ModuleList is not a Hugging Face model" if wrapper == "none" else f"this {wrapper} wraps the model; save the"
        assert_refused(said, holdfast.save, wrapped, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    finally:
        if wrapper == "DistributedDataParallel":
            torch.distributed.destroy_process_group()
    if wrapper != "none":
        holdfast.save(wrapped.module, tmp_path / "out")


def test_a_folder_that_is_there_is_replaced_only_by_force(kept: Path, tmp_path: Path) -> None:
    first, second = holdfast.load(kept / "mixtral"), holdfast.load(kept / "llama")
    target = tmp_path / "new" / "out"
    assert holdfast.save(first, target) == target
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="force=True") as problem:
        holdfast.save(second, target)
    assert str(target) in str(problem.value) and (target / "notes.txt").exists()
    assert_same(first, holdfast.load(target))
    holdfast.save(second, target, force=True)
    assert_same(second, holdfast.load(target))
    assert [path.name for path in target.parent.iterdir()] == ["out"] and not (target / "notes.txt").exists()
    (tmp_path / "file").write_text("")
    assert_refused("is a file", holdfast.save, first, tmp_path / "file", force=True)


def test_a_link_is_followed_and_the_working_folder_stays(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, link, place = holdfast.load(kept / "mixtral"), tmp_path / "link", tmp_path / "elsewhere"
    place.mkdir()
    link.symlink_to(place)
    assert holdfast.save(model, link) == link
    assert link.is_symlink()
    assert_same(model, holdfast.load(place))
    monkeypatch.chdir(place)
    for folder in (".", ".."):
        assert_refused("working directory", holdfast.save, model, folder, force=True)
    assert_same(model, holdfast.load("."))


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_save_that_fails_leaves_nothing_and_keeps_what_was_there(
    part: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = holdfast.load(kept / "mixtral")

    class Full:
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            (folder / "half").write_text("written")
            raise OSError("no space left on device")

    holdfast.save(model, tmp_path / "old")
    tokenizer = Full() if part == "tokenizer" else None
    if part == "model":
        monkeypatch.setattr(model, "save_pretrained", Full().save_pretrained)
    for target in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(OSError, match="no space left"):
            holdfast.save(model, target, tokenizer=tokenizer, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert_same(model, holdfast.load(tmp_path / "old"))


# Damage


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def swap(file: Path) -> None:
    """Whole, and of another model."""
    tiny("mixtral").save_pretrained(file.parent / "other")
    shutil.move(file.parent / "other" / "model.safetensors", file)
    shutil.rmtree(file.parent / "other")


DAMAGES = [*itertools.product(("mixtral", "llama"), (cut, flip_a_bit, swap, Path.unlink)), ("plain", cut)]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damaged_weights_are_refused(name: str, damage: Callable[[Path], None], copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    damage(folder / "model.safetensors")
    assert "model.safetensors" in refusal(folder) or name == "plain"


def test_a_missing_or_an_extra_shard_is_refused(copied: Callable[[str], Path]) -> None:
    for name in ("sharded", "plain sharded"):
        folder = copied(name)
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        content = shard.read_bytes()
        shard.unlink()
        assert f"lacks {shard.name}" in refusal(folder)
        shard.write_bytes(content)
        holdfast.load(folder)
    (folder := copied("llama"), shutil.copy(folder / "model.safetensors", folder / "more.safetensors"))
    assert "more.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["sharded", "plain sharded"])
@pytest.mark.parametrize("shard", ["../away.safetensors", "/away.safetensors", "weights.bin", "a/b.safetensors", 5])
def test_an_index_that_names_other_files_is_refused(name: str, shard: Any, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = shard
    file.write_text(json.dumps(index))
    assert file.name in refusal(folder)


@pytest.mark.parametrize("content", [None, "", "{not json", "[]", "5", '"text"', "\x00\x01", '{"model_type": "llama"'])
@pytest.mark.parametrize("name", ["mixtral", "plain"])
def test_a_config_that_is_missing_or_unreadable_is_refused(
    name: str, content: str | None, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "weights": []}'])
def test_a_folder_without_its_checksums_is_refused(content: str | None, copied: Callable[[str], Path]) -> None:
    folder = copied("mixtral")
    (folder / "holdfast.json").unlink()
    if content is not None:
        (folder / "holdfast.json").write_text(content)
    assert "holdfast.json" in refusal(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "sub/model.safetensors", "..", ""])
def test_checksums_of_files_elsewhere_are_refused(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied("mixtral")
    (folder / "sub").mkdir()
    for place in (folder.parent / "outside.safetensors", folder / "sub" / "model.safetensors"):
        shutil.copy(folder / "model.safetensors", place)
    content = json.loads((folder / "holdfast.json").read_text())
    content["weights"][name] = content["weights"]["model.safetensors"]
    (folder / "holdfast.json").write_text(json.dumps(content))
    assert "holdfast.json" in refusal(folder)


# Descriptions that do not fit


def renamed(name: str) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        layers = config["holdfast"]["layers"]
        layers[name] = layers.pop(next(iter(layers)))

    return edit


EDITS: dict[str, Edit] = {
    "an unknown router": in_layer(router="nonsense"),
    "a router of another kind": in_layer(router="smoe"),
    "a router with less state": in_layer(router="smooth"),
    "a router with other state": in_layer(router="symphony+attention"),
    "the family's own rule": in_layer(router="native"),
    "k in words": in_layer(k="two"),
    "an unknown option": in_layer(options={"nonsense": 1}),
    "an option of another router": in_layer(options={"tau": 2.0}),
    "an option out of range": in_layer(options={"eps": -1}),
    "more experts": in_layer(experts=5),
    "an unknown loss": in_layer(losses={"nonsense": 1}),
    "a missing entry": lambda config: next(iter(config["holdfast"]["layers"].values())).pop("k"),
    "a layer that is not there": renamed("model.layers.9.mlp"),
    "a layer that is no MoE": renamed("model.layers.0.self_attn"),
    "a layer too few": lambda config: config["holdfast"]["layers"].popitem(),
    "no layers": lambda config: config["holdfast"].update(layers={}),
    "layers in a list": lambda config: config["holdfast"].update(layers=[]),
    "an earlier format": lambda config: config["holdfast"].update(format=3),
    "another family": lambda config: config["holdfast"].update(model_type="olmoe"),
    "an unknown family": lambda config: config["holdfast"].update(model_type="nonsense"),
    "a description in words": lambda config: config.update(holdfast="symphony"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_an_edited_description_is_refused_even_with_its_checksum(
    name: str, edit: Edit, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    edit_config(folder, edit)
    assert "it was changed" in refusal(folder)
    write_manifest(folder)
    assert "it was changed" not in refusal(folder)


def test_wrong_shapes_are_said_in_our_words(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    edit_config(folder, in_layer(hidden=7))
    write_manifest(folder)
    assert mentions(refusal(folder), f"{folder} ", "shapes")


def test_a_hierarchical_router_from_before_it_had_two_gates_is_refused_with_its_new_name(tmp_path: Path) -> None:
    folder = tmp_path / "older"
    holdfast.save(learned("mixtral", "grouped[groups=2]"), folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("grouped", "hierarchical"))  # the name of its weights' router then
    write_manifest(folder)
    assert mentions(refusal(folder), "lacks weights", "`grouped`")


@pytest.mark.parametrize(
    "edit",
    [
        lambda config: config.pop("model_config"),
        lambda config: config["model_config"].pop("holdfast"),
        lambda config: config["model_config"].update(holdfast=None),
        lambda config: config.update(model_type="mixtral"),
        lambda config: config.update(model_type=["holdfast"]),
        lambda config: config.update(model_type="holdfast"),  # as formats before the release had it
        lambda config: config.update({**config.pop("model_config"), "model_type": "holdfast"}),  # as their first one
    ],
)
def test_a_config_that_is_half_ours_is_refused(edit: Edit, copied: Callable[[str], Path]) -> None:
    folder = copied("mixtral")
    edit_config(folder, edit, upper=True)
    write_manifest(folder)
    assert "Holdfast" in refusal(folder)


MISFITS = [{"hidden_size": 64}, {"hidden_size": "wide"}, {"num_hidden_layers": 4}, {"num_hidden_layers": 2}]


@pytest.mark.parametrize("values", [*MISFITS, {"dtype": "nonsense"}], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "plain"])
def test_a_config_that_does_not_fit_the_weights_is_refused(
    name: str, values: dict[str, Any], copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    edit_config(folder, lambda config: config.update(values))
    refusal(folder)


CLASSES = ["os.system", "Trainer", "pipeline", "MixtralConfig", "AutoModelForCausalLM", "PreTrainedModel"]
OTHERS = ["LlamaForCausalLM", "MixtralModel", "MixtralForSequenceClassification", "MixtralPreTrainedModel"]


@pytest.mark.parametrize("classes", [*([name] for name in (*CLASSES, *OTHERS)), [], None, "MixtralForCausalLM", {}, [5]])
@pytest.mark.parametrize("name", ["mixtral", "plain"])
def test_a_class_that_is_not_the_models_is_refused(name: str, classes: Any, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    edit_config(folder, lambda config: config.update(architectures=classes))
    refusal(folder)


# Code and pickles


@pytest.mark.parametrize("name", ["mixtral", "plain"])
def test_no_code_of_a_folder_is_run(
    name: str, copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = copied(name), tmp_path / "code has run"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    config_class = f"{code}import transformers\nclass Config(transformers.MixtralConfig): pass\n"
    (folder / "evil.py").write_text(config_class)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"{code}def generate(model, **options): pass\n")
    expected = said(holdfast.load(folder), "mixtral")
    names = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    kernels = {"attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel", "experts_implementation": "evil"}
    edit_config(folder, lambda config: config.update(auto_map=names, **kernels))
    edit_config(folder, lambda config: config.update(auto_map=names, **kernels), upper=True)
    for options in ({}, {"trust_remote_code": True}):
        loaded = holdfast.load(folder, **options)
        assert torch.equal(said(loaded, "mixtral"), expected)
        assert loaded.config._attn_implementation == "sdpa" and not hasattr(loaded.config, "auto_map")
    assert not mark.exists()
    if name == "mixtral":
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert torch.equal(said(loaded, "mixtral"), expected) and not mark.exists()
        edit_config(folder, lambda config: config.update(model_type="unknown to transformers"), upper=True)
    transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists()  # the trap works


@pytest.mark.parametrize("trapped", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "plain"])
def test_pickled_weights_are_refused(name: str, trapped: bool, copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Also those that would do no harm."""
    folder, mark = copied(name), tmp_path / "unpickled"
    weights = {"lm_head.weight": Trap(mark)} if trapped else holdfast.load(folder).state_dict()
    (folder / "model.safetensors").unlink()
    for file in ("pytorch_model.bin", "pytorch_model-00001-of-00001.bin"):
        torch.save(weights, folder / file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "pytorch_model-00001-of-00001.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    if name != "plain":
        write_manifest(folder)
    for options in ({}, {"use_safetensors": False}, {"weights_only": False}):
        assert "no file named model.safetensors" in refusal(folder, **options)
    shutil.copy(folder / "pytorch_model.bin", folder / "model.safetensors")
    if name != "plain":
        write_manifest(folder)
    refusal(folder)
    assert not mark.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert mark.exists() == trapped  # it works


# Loaders that do not know us


WITHOUT_HOLDFAST = """
import json, sys
sys.modules["holdfast"] = None  # `import holdfast` raises ModuleNotFoundError
import transformers
found = {}
def attempt(what, opens, *arguments, **options):
    try:
        opens(*arguments, **options)
    except (ValueError, OSError) as problem:
        found[what] = str(problem)
    else:
        found[what] = "OPENED"
for folder, *classes in json.loads(sys.argv[1]):
    for name in ["AutoConfig", "AutoModel", "AutoModelForCausalLM", *classes]:
        for options in ({}, {"attn_implementation": "eager"}, {"trust_remote_code": True}):
            attempt(f"{folder} {name} {options}", getattr(transformers, name).from_pretrained, folder, **options)
    attempt(f"{folder} Auto in a pipeline", transformers.pipeline, "text-generation", folder)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_plain_transformers_fails_rather_than_make_up_weights(tmp_path: Path) -> None:
    """In a Python without Holdfast: Auto classes, the family's own class, its base model, another family."""
    asked = []
    for model_type in ("mixtral", "gpt_oss", "llama", "gpt2", "bert", "vit", "swin", "siglip"):
        model = learned(model_type, "smoe")
        folder = holdfast.save(model, tmp_path / model_type)
        native: Any = type(model).__bases__[1]  # the family's own class
        assert not issubclass(native, type(model)) and native.__name__ == type(model).__name__
        own = {native.__name__, native.__name__.replace("ForCausalLM", "Model"), "LlamaForCausalLM"}
        asked.append([str(folder), *own, *(["SiglipTextModel", "SiglipVisionModel"] if model_type == "siglip" else [])])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOLDFAST, json.dumps(asked)], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 100
    assert [what for what, problem in found.items() if "import holdfast" not in problem] == []
    assert [what for what, problem in found.items() if " Auto" in what and MODEL_TYPE not in problem] == []


def test_what_reads_the_config_only_in_passing_is_not_disturbed(kept: Path) -> None:
    """A Trainer that resumes, and `AutoTokenizer` (above)."""
    for name in ("mixtral", "llama"):
        transformers.PreTrainedConfig.from_json_file(str(kept / name / "config.json"))
        transformers.PreTrainedConfig.from_pretrained(kept / name)
        settings = transformers.GenerationConfig.from_pretrained(kept / name)
        assert settings.eos_token_id == 2


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "no/such/folder", "no such folder", "../nothing"])
def test_an_unknown_path_raises_a_one_line_error_without_network_access_when_offline(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def connect(*arguments: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.chdir(tmp_path)
    assert "there is no folder" in refusal(name)


def test_a_folder_with_an_adapter_is_for_peft(tmp_path: Path) -> None:
    holdfast.save(holdfast.reroute(tiny("mixtral"), "smoe"), tmp_path / "saved")
    (tmp_path / "saved" / "adapter_config.json").write_text("{}")
    assert_refused("peft", holdfast.load, tmp_path / "saved")


def test_a_single_tower_of_a_changed_model_is_not_made_up(tmp_path: Path) -> None:
    """A tower's own class would make new weights for the experts it does not know."""
    holdfast.save(holdfast.sparsify(tiny_dense("siglip"), experts=4), tmp_path / "saved")
    for tower in (transformers.SiglipTextModel, transformers.SiglipVisionModel):
        with pytest.raises(Exception, match=r"holdfast\.load"):
            tower.from_pretrained(tmp_path / "saved")
