"""Any text of the user's: one file, split by position, a table, split by row, or a folder of files, split by file."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from holdfast.data.documents import SPLITS, Corpus, Document, Lazy
from holdfast.data.files import PACKED, find, plain_name, read_text
from holdfast.data.splitting import by_position, by_title
from holdfast.data.tables import is_table, table_corpus

NAMES = {"train": ["train.txt"], "valid": ["valid.txt", "validation.txt", "dev.txt"], "test": ["test.txt"]}


def text_corpus(path: Path) -> Corpus:
    """The corpus of a text file, of a table with a column of texts, or of a folder of text files."""
    if path.is_dir():
        return _folder(path)
    return table_corpus(path) if is_table(path) else _file(path)


def split_files(name: str, about: str, paths: dict[str, Path], tokenizer: str = "words") -> Corpus:
    """A corpus of one file a split, each read when it is asked for."""

    def read(split: str) -> list[Document]:
        return [Document(f"{name}/{split}", read_text(paths[split]))]

    return Corpus(name, about, {split: Lazy(partial(read, split)) for split in SPLITS}, tokenizer)


def _file(path: Path) -> Corpus:
    parts = by_position(read_text(path))
    if parts is None:
        raise ValueError(
            f"{path} has too few lines to be split into train, valid and test; "
            "give a longer text, or a folder with train.txt, valid.txt and test.txt."
        )
    splits = {split: (Document(f"{path.name}/{split}", part),) for split, part in zip(SPLITS, parts, strict=True)}
    return Corpus(path.name, f"the text of {path.name}, split by position", splits)


def _folder(folder: Path) -> Corpus:
    name = folder.resolve().name
    named = {split: path for split in SPLITS if (path := find(folder, NAMES[split]))}
    if len(named) == len(SPLITS):
        return split_files(name, f"the texts of {name}", named)
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if _is_text(path):
            title = path.relative_to(folder).with_name(plain_name(path)).as_posix()
            if title in files:
                raise ValueError(f"{folder} holds {title} twice, as {files[title].name} and as {path.name}.")
            files[title] = path
    if len(files) < 3:
        raise ValueError(
            f"{folder} holds {len(files)} text files (.txt, or packed as .txt{' or .txt'.join(PACKED)}); "
            "splitting a folder by file takes 3, or train.txt, valid.txt and test.txt; a single file can be given by name."
        )
    split_of = by_title(dict.fromkeys(files, 1))  # not by size: how a file is packed must not move it to another split

    def read(split: str) -> Iterator[Document]:
        return (Document(title, read_text(files[title])) for title in sorted(files) if split_of[title] == split)

    splits = {split: Lazy(partial(read, split)) for split in SPLITS}
    return Corpus(name, f"the {len(files)} texts of {name}, split by file", splits)


def _is_text(path: Path) -> bool:
    return plain_name(path).endswith(".txt") and path.is_file()
