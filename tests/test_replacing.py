"""A folder that is replaced is there, old or new, whenever the process is killed; what it leaves behind is cleaned up."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.files import recover_folder, replace_folder


def write(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        folder.mkdir()
        (folder / "file").write_text(text)

    return fill


def killed_at(step: str, target: Path) -> None:
    """A process that replaces the folder, and is killed while it fills the new one, or before or after a rename."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    rename, count = Path.rename, 0

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(path: Path, to: Path) -> Path:
        nonlocal count
        count += 1
        is_due = step.endswith("first rename" if count == 1 else "second rename")
        if is_due and step.startswith("before"):
            die()
        renamed = rename(path, to)
        if is_due:
            die()
        return renamed

    try:
        Path.rename = dying  # type: ignore[assignment,method-assign]
        replace_folder(target, die if step == "while it fills" else write("new"))
    finally:
        os._exit(0)


STEPS = ["while it fills", "before the first rename", "after the first rename", "before the second rename"]
STEPS += ["after the second rename"]


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_is_killed_while_it_replaces_a_folder_loses_nothing(step: str, tmp_path: Path) -> None:
    target = tmp_path / "model"
    replace_folder(target, write("old"))
    killed_at(step, target)
    assert recover_folder(target)
    assert (target / "file").read_text() == ("new" if step == "after the second rename" else "old")
    replace_folder(target, write("next"))
    assert (target / "file").read_text() == "next"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # the scratch folder of the dead process is gone


def test_a_scratch_folder_of_a_running_process_is_not_removed(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def meanwhile(folder: Path) -> None:
        replace_folder(target, write("other"))  # as another process would
        assert folder.parent.is_dir()
        write("mine")(folder)

    replace_folder(target, meanwhile)
    assert (target / "file").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_fails_leaves_the_old_folder_and_no_scratch(tmp_path: Path) -> None:
    target = tmp_path / "model"
    replace_folder(target, write("old"))

    def full(folder: Path) -> None:
        write("half")(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_folder(target, full)
    assert (target / "file").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_link_in_place_of_a_scratch_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim" / "old").mkdir(parents=True)
    (tmp_path / ".model.saving-000000000000").symlink_to(tmp_path / "victim")
    assert not recover_folder(tmp_path / "model")
    replace_folder(tmp_path / "model", write("new"))
    assert (tmp_path / "victim" / "old").is_dir() and (tmp_path / ".model.saving-000000000000").is_symlink()


def test_load_finds_a_model_whose_replacement_was_interrupted(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    holdfast.sparsify(model, experts=2, k=1, router="smoe")
    holdfast.save(model, tmp_path / "model")
    killed_at("before the second rename", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    again = holdfast.load(tmp_path / "model")
    assert again.state_dict().keys() == model.state_dict().keys() and (tmp_path / "model").is_dir()
