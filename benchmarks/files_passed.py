"""Count the files of the package that a reader passes through who follows one operation from its call to its result.

    python benchmarks/files_passed.py                       # a training step with `smooth`, and `audit --what-if smooth`
    python benchmarks/files_passed.py --router symphony --list    # another router; also print the files

A file is passed if one of its functions is called. A move is a call from one file into another. Both operations run on a
CPU, on a model of two layers, and are counted when they run for the second time, so that nothing is imported in them.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType

import torch
import transformers

import holdfast

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PACKAGE = str(Path(holdfast.__file__).parent) + os.sep


class Passed:
    """The files in which a function was called, and the number of calls from one file of the package into another."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.moves = 0

    @contextmanager
    def watching(self) -> Iterator["Passed"]:
        """Count what this thread calls inside the `with`."""
        sys.setprofile(self._count)
        try:
            yield self
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        self.calls[file.removeprefix(PACKAGE)] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        self.moves += caller is not None and caller.f_code.co_filename != file


def tiny_model(router: str) -> torch.nn.Module:
    """Return a causal model of two layers with four experts each, and random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return holdfast.sparsify(transformers.LlamaForCausalLM(config), experts=4, k=2, router=router)


def training_step(router: str) -> Passed:
    """Return what one forward, backward and step of an optimizer pass."""
    model, ids = tiny_model(router).train(), torch.randint(256, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Passed().watching() as passed:
        step()
    return passed


def what_if(router: str) -> Passed:
    """Return what `holdfast audit MODEL --what-if ROUTER` passes, on a tiny model in a temporary folder."""
    import tokenizers

    from holdfast.cli.main import main as command

    bytes_of_text = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_of_text.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    bytes_of_text.add_tokens(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_of_text)
        holdfast.save(tiny_model("smoe").eval(), f"{folder}/model", tokenizer=tokenizer)
        text = Path(folder, "text.txt")
        text.write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
        options = ["--source", str(text), "--tokens", "256", "--length", "32", "--what-if", router]
        arguments = ["audit", f"{folder}/model", *options]
        if command(arguments):
            raise SystemExit("the audit failed, see above.")
        with Passed().watching() as passed:
            command(arguments)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="smooth", help="the router to train, and to try in the audit")
    parser.add_argument("--list", action="store_true", help="print the files too, with the number of calls in each")
    arguments = parser.parse_args()
    operations: dict[str, Callable[[str], Passed]] = {
        f"a training step with {arguments.router}": training_step,
        f"audit --what-if {arguments.router}": what_if,
    }
    for name, run in operations.items():
        passed = run(arguments.router)
        print(f"{name}: {len(passed.calls)} files, {passed.moves} moves between them")
        if arguments.list:
            print(*(f"    {calls:6} {file}" for file, calls in sorted(passed.calls.items())), sep="\n")


if __name__ == "__main__":
    main()
