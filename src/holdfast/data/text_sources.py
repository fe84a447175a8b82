"""Text sources by name or path: the embedded text, files of the user, and public datasets.

A file or folder of the user is one of (`text_corpus`):

    one text file          split by position
    one table              split by row: a column of a CSV or TSV file with a header, or a field of a JSON-lines file
    a folder of texts      one file for each split (train.txt, valid.txt and test.txt), or any .txt files, split by file

All files may be compressed (.gz or .xz). A table with a column of labels is refused unless the column of texts is named:
somebody who has labels usually wants to classify (`labelled_texts`).

The embedded text, `python-docs`, is the English in a Python installation: its language reference and its docstrings. The
standard library is parsed and never imported, because importing some of its modules opens browsers and windows. Its modules
differ between builds of Python, and so does the checksum of the corpus.

Public datasets are read from a folder, or through Hugging Face's `datasets`, which downloads them once.
"""

import ast
import gc
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast.data.datasets import DATASETS, Dataset, Load, datasets_for, find_dataset, require_splits
from holdfast.data.documents import SPLITS, Corpus, Document, LazyDocuments, split_by_position, split_by_title
from holdfast.data.files import (
    PACKED,
    find_file,
    find_splits,
    is_table,
    open_unpacked,
    read_bytes,
    read_table,
    read_text,
    source_folders,
    unpacked_name,
)
from holdfast.errors import MissingExtra, missing_extra_message

# Packages with little English, or with copies of other packages.
SKIPPED = {"ensurepip", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "turtledemo"}
REPEATED = 8  # words: repeated paragraphs of at least this length are removed. Shorter ones are headings, and stay.

ENWIK8 = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}  # bytes, in this order

ABOUT = {
    "python-docs": "the English in a Python installation, language reference and docstrings; embedded",
    "wikitext-2": "2 million words of good Wikipedia articles",
    "wikitext-103": "103 million words of good Wikipedia articles",
    "enwik8": "the first 100 million bytes of an English Wikipedia dump, with markup",
    "c4": "cleaned web pages in English; streamed, because it is too large to download",
}

MOST_OTHERS = 100_000  # files in a folder of texts that are not texts: to find them takes about a second
# If no column is named, the first of these that the table has is read.
TEXT_COLUMNS = ("text", "sentence", "content", "document", "body", "article")
# Columns that have labels rather than texts.
LABEL_COLUMNS = ("label", "labels", "category", "class", "intent", "target", "sentiment", "gold_label", "is_duplicate")

BLANK = re.compile(r"\n\s*\n")


def corpora() -> dict[str, str]:
    """Return the names of the text sources, each with one line of help."""
    return datasets_for("text")


def corpus(name: str | Path, *, folder: str | Path | None = None, column: str | None = None) -> Corpus:
    """Return the text source of this name, or the text file or folder at this path; `reviews.csv:review` names a column.

    Named sources are searched for in `folder`; without one, they are fetched through `datasets` if it has them.

    column      of the texts, if the source is a table
    """
    place = None if folder is None else Path(folder)
    if isinstance(name, str) and (found := find_dataset(name, "text")):
        if column is not None:
            raise ValueError(f"data.text names the column {column}, but {name} is not a table.")
        return _as_corpus(found, found.load(place))
    path = Path(name)
    if name != "" and path.exists():
        return text_corpus(path, column)
    table, colon, named = str(name).rpartition(":")  # as in reviews.csv:review
    if colon and named and is_table(Path(table)) and Path(table).is_file():
        return _table_corpus(Path(table), named)
    if isinstance(name, Path) or os.sep in name or path.suffix in {".txt", *PACKED} or is_table(path):
        raise ValueError(f"{path} does not exist.")
    if found := find_dataset(name, "text", installed=True):
        return _as_corpus(found, found.load(place))
    raise ValueError(f"there is no file or folder {name}; {DATASETS.unknown(name, corpora())}")


def _as_corpus(dataset: Dataset, loaded: Any) -> Corpus:
    """Return what the function of a dataset has loaded as a corpus."""
    if isinstance(loaded, Corpus):
        return loaded
    require_splits(dataset.name, loaded, SPLITS, "texts")
    name, splits = dataset.name, {split: list[Document]() for split in SPLITS}
    for split, documents in splits.items():
        is_one = isinstance(loaded[split], str)
        for number, text in enumerate([] if is_one else loaded[split]):
            if not isinstance(text, str | Document):
                raise ValueError(f"dataset {name!r}, {split}: text {number} is {type(text).__name__}; expected a string.")
            try:
                title = f"{name}/{split}/{number}"
                documents.append(text if isinstance(text, Document) else Document(title, text.encode()))
            except UnicodeEncodeError as error:
                raise ValueError(f"dataset {name!r}, {split}: text {number} is not valid Unicode: {error.reason}.") from None
        if not any(document.data.strip() for document in documents):
            one = ": it is one string, so put it into a list" if is_one else ""
            raise ValueError(f"dataset {name!r} has no text in its split {split}{one}.")
    return Corpus(name, dataset.about, splits)


def text_corpus(path: Path, column: str | None = None) -> Corpus:
    """Return the corpus of a text file, of a table with a `column` of texts, or of a folder of text files."""
    if not path.is_dir() and is_table(path):
        return _table_corpus(path, column)
    if column is not None:
        raise ValueError(f"data.text names the column {column}, but {path} is not a table (.csv, .tsv or .jsonl).")
    if path.is_dir():
        return _folder_corpus(path)
    parts = split_by_position(read_text(path))
    if parts is None:
        raise ValueError(
            f"{path} has too few lines to be split into train, valid and test; "
            "give a longer text, or a folder with train.txt, valid.txt and test.txt."
        )
    splits = {split: (Document(f"{path.name}/{split}", part),) for split, part in zip(SPLITS, parts, strict=True)}
    return Corpus(path.name, f"the text of {path.name}, split by position", splits)


def _folder_corpus(folder: Path) -> Corpus:
    name = folder.resolve().name
    named = find_splits(folder, ".txt")
    if len(named) == len(SPLITS):
        return _split_files(name, f"the texts of {name}", named)
    files: dict[str, Path] = {}
    others = 0
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if not unpacked_name(path).endswith(".txt") or not path.is_file():
                others += 1
                if others > MOST_OTHERS:  # as a disk has
                    raise ValueError(
                        f"{folder} has over {MOST_OTHERS:,} files that are not texts (.txt); name a folder of texts."
                    )
                continue
            title = path.relative_to(folder).with_name(unpacked_name(path)).as_posix()
            if title in files:
                twice = " and as ".join(sorted((files[title].name, path.name)))
                raise ValueError(f"{folder} has {title} twice, as {twice}; remove one.")
            files[title] = path
    if len(files) < len(SPLITS):
        raise ValueError(
            f"{folder} has {len(files)} text files (.txt, or packed as .txt{' or .txt'.join(PACKED)}); "
            "splitting a folder by file needs 3, or train.txt, valid.txt and test.txt; a single file can be given by name."
        )
    split_of = split_by_title(dict.fromkeys(files, 1))  # not by size: packing a file must not move it to another split

    def read(split: str) -> Iterator[Document]:
        return (Document(title, read_text(files[title])) for title in sorted(files) if split_of[title] == split)

    return _lazy_corpus(name, f"the {len(files)} texts of {name}, split by file", read)


def _split_files(name: str, about: str, paths: dict[str, Path]) -> Corpus:
    """Return a corpus with one file per split; each file is read at first use."""
    return _lazy_corpus(name, about, lambda split: [Document(f"{name}/{split}", read_text(paths[split]))])


def _table_corpus(path: Path, column: str | None = None) -> Corpus:
    """Return the corpus of a table: every row is a document, and a hash of its line number decides its split."""
    table = read_table(path)
    label = table.column(None, LABEL_COLUMNS) if column is None else None
    chosen = table.column(column, TEXT_COLUMNS)
    if label is not None:
        text = chosen or "TEXT"
        raise ValueError(
            f"{path} has a column of labels, {label}, which a language model would ignore; use a recipe with `task: "
            "labels`, such as labels-tiny, to classify its texts, or name the column of texts to learn them as prose "
            f"(data.text={text}, or {path}:{text})."
        )
    if chosen is None:
        raise ValueError(
            f"{path} has the columns {', '.join(table.columns)}, none of them {', '.join(TEXT_COLUMNS[:-1])} or "
            f"{TEXT_COLUMNS[-1]}; name the text column, as in {path}:{table.columns[0] if table.columns else 'text'}."
        )
    rows = ((line, table.text(line, row, chosen)) for line, row in table.rows)
    texts = {f"{path.name}/{line}": text.encode() for line, text in rows if text.strip()}
    if len(texts) < len(SPLITS):
        raise ValueError(f"{path} has {len(texts)} rows with a text; train, valid and test need at least {len(SPLITS)}.")
    return _split_corpus(path.name, f"{len(texts):,} texts of {path.name}, split by row", texts)


def _split_corpus(name: str, about: str, texts: Mapping[str, bytes]) -> Corpus:
    """Return a corpus of texts by title; the hash of its title decides the split of each."""
    split_of = split_by_title({title: len(text) for title, text in texts.items()})
    splits = {
        split: tuple(Document(title, text) for title, text in texts.items() if split_of[title] == split) for split in SPLITS
    }
    return Corpus(name, about, splits)


def _python_docs_corpus(_: Path | None) -> Corpus:
    about = f"{ABOUT['python-docs']}; Python {platform.python_version()}"
    return _split_corpus("python-docs", about, {title: text.encode() for title, text in python_docs().items()})


@cache
def python_docs() -> Mapping[str, str]:
    """Return the documents by title, sorted: `modules/...` and `topics/...`. No long paragraph occurs twice."""
    documents = {f"modules/{name}": text for name, text in python_docstrings().items()}
    documents |= {f"topics/{name}": text for name, text in python_topics().items()}
    return MappingProxyType(dict(without_repeated_paragraphs(sorted(documents.items()))))


def python_topics() -> dict[str, str]:
    """Return the language reference that the interpreter ships for `help()`: documents by title, sorted."""
    from pydoc_data.topics import topics  # half a megabyte: imported only when needed

    if not topics:
        raise ValueError("this Python was built without its documentation topics (pydoc_data.topics is empty).")
    return dict(sorted(topics.items()))


def python_docstrings() -> dict[str, str]:
    """Return the docstrings of each module of the standard library, in the order of its source; modules are sorted."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = {}
    enabled = gc.isenabled()
    gc.disable()  # it would double the time of parsing and find no cycles
    try:
        with warnings.catch_warnings(action="ignore"):  # old modules have many invalid escapes
            for name, path in sorted(_modules(library)):
                try:
                    tree = ast.parse(path.read_bytes())
                except (SyntaxError, ValueError):  # some builds contain templates
                    continue
                if text := "\n\n".join(docstrings(tree)):
                    documents[name] = text
    finally:
        if enabled:
            gc.enable()
    if not documents:
        raise ValueError(
            f"this Python has no sources of its standard library in {library}, so the text python-docs is not available; "
            "give the path of another text."
        )
    return documents


def _modules(library: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and source files of the standard library's modules, with those inside packages."""
    for name in sys.stdlib_module_names - SKIPPED:
        if (single := library / f"{name}.py").is_file():
            yield name, single
        for path in (library / name).rglob("*.py"):
            place = path.relative_to(library).with_suffix("").parts
            if SKIPPED.isdisjoint(place) and all(part.isidentifier() for part in place):
                yield ".".join(place).removesuffix(".__init__"), path


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of the module, its classes and functions, in the order of the source."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield text
        # Definitions are only inside statements; visiting expressions too would take most of the time.
        for block in ("finalbody", "orelse", "handlers", "body"):
            inner = getattr(node, block, None)
            if isinstance(inner, list):
                pending += reversed(inner)


def without_repeated_paragraphs(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the documents without long paragraphs that occur before, in any document; skip documents that become empty.

    Otherwise the training text could contain paragraphs of the test text.
    """
    seen = set()
    for title, text in documents:
        kept = []
        for paragraph in BLANK.split(text):
            joined = " ".join(paragraph.split())
            if joined.count(" ") + 1 >= REPEATED:
                if joined in seen:
                    continue
                seen.add(joined)
            kept.append(paragraph)
        if remaining := "\n\n".join(kept).strip():
            yield title, remaining + "\n"


def _wikitext(number: str, folder: Path | None) -> Corpus:
    name = f"wikitext-{number}"
    layout = f"train.txt, valid.txt and test.txt (or wiki.*.tokens; plain, .gz or .xz) into a folder wikitext{number}"
    if folder is None:
        instead, on_hub = f"put {layout} and name the folder around it", {"valid": "validation"}
        parts = {
            split: hub_rows("Salesforce/wikitext", f"{name}-v1", on_hub.get(split, split), instead=instead)
            for split in SPLITS
        }

        def read(split: str) -> list[Document]:
            lines = (str(row["text"]) for row in parts[split])  # empty lines have no newline
            text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
            return [Document(f"{name}/{split}", text.encode())]

        return _lazy_corpus(name, ABOUT[name], read)
    for place in source_folders(folder, (f"wikitext{number}", name)):
        found = {split: find_file(place, (f"{split}.txt", f"wiki.{split}.tokens")) for split in SPLITS}
        if paths := {split: path for split, path in found.items() if path}:
            if len(paths) < len(SPLITS):
                missing = next(split for split in SPLITS if split not in paths)
                raise ValueError(f"{place} has {name}'s {' and '.join(paths)} but no {missing}.txt.")
            return _split_files(name, ABOUT[name], paths)
    raise ValueError(f"{name} is not in {folder}: put {layout} there, or give no folder to fetch it through `datasets`.")


def _lazy_corpus(name: str, about: str, read: Callable[[str], Iterable[Document]], *, streamed: bool = False) -> Corpus:
    """Return a corpus whose documents are read again whenever they are needed, by a function of the split."""
    return Corpus(name, about, {split: LazyDocuments(partial(read, split)) for split in SPLITS}, streamed)


def _enwik8(folder: Path | None) -> Corpus:
    folders = [] if folder is None else [*source_folders(folder, ("enwik8",)), folder]
    path = next((path for place in folders if (path := find_file(place, ("enwik8",)))), None)
    if path is None:
        raise ValueError(
            f"enwik8 is not in {folder or 'any folder given'}: get enwik8.zip from mattmahoney.net/dc, unpack it and put "
            "the file enwik8 (plain, .gz or .xz) into a folder enwik8 there."
        )

    @cache  # read once for all three splits, and freed with the corpus
    def data() -> bytes:
        found = read_bytes(path)
        if len(found) != sum(ENWIK8.values()):
            raise ValueError(f"{path} has {len(found):,} bytes; enwik8 has exactly {sum(ENWIK8.values()):,}.")
        return found

    def read(split: str) -> list[Document]:
        ends = dict(zip(ENWIK8, itertools.accumulate(ENWIK8.values()), strict=True))
        return [Document(f"enwik8/{split}", data()[ends[split] - ENWIK8[split] : ends[split]])]

    return _lazy_corpus("enwik8", ABOUT["enwik8"], read)


def _c4(folder: Path | None) -> Corpus:
    hub_splits = ("train", "validation")
    rows: dict[str, Callable[[], Iterable[str]]]
    if folder is None:
        instead = "put files c4-train.*.json.gz and c4-validation.*.json.gz into a folder c4 and name the folder around it"
        fetched = {one: hub_rows("allenai/c4", "en", one, instead=instead, streamed=True) for one in hub_splits}
        rows = {one: partial(map, itemgetter("text"), fetched[one]) for one in hub_splits}
    else:
        rows = {one: partial(_json_texts, _c4_files(folder, one)) for one in hub_splits}
    # C4 has no test split: its validation documents alternate between valid and test.
    places = {"train": ("train", 0, 1), "valid": ("validation", 0, 2), "test": ("validation", 1, 2)}

    def read(split: str) -> Iterator[Document]:
        source, start, step = places[split]
        for number, text in itertools.islice(enumerate(rows[source]()), start, None, step):
            yield Document(f"c4/{source}/{number}", text.encode("utf-8", "replace"))

    return _lazy_corpus("c4", ABOUT["c4"], read, streamed=True)


def _c4_files(folder: Path, split: str) -> list[Path]:
    for place in (*source_folders(folder, ("c4",)), folder):
        if found := sorted(path for path in place.glob(f"c4-{split}.*") if ".json" in path.suffixes):
            return found
    raise ValueError(
        f"c4 is not in {folder}: put its files c4-{split}.*.json.gz (allenai/c4, folder en) into a folder c4 there, "
        "or give no folder to stream it through `datasets`."
    )


def _json_texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with open_unpacked(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    yield str(json.loads(line)["text"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: this is not a JSON object with a text.") from error


def hub_rows(dataset: str, config: str, split: str, *, instead: str, streamed: bool = False) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a split. If they cannot be fetched, the error ends with `instead`: what else the user can do."""
    missing = missing_extra_message(f"fetching {dataset}", "datasets")
    if missing is not None:
        raise MissingExtra(f"{missing}; or {instead}.")
    from datasets import load_dataset  # type: ignore[import-untyped]

    try:
        return load_dataset(dataset, config, split=split, streaming=streamed)
    except Exception as error:  # no network, a proxy, a full disk, a moved dataset: each raises another type
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{dataset} ({config}) could not be fetched ({reason}); check the network, or {instead}."
        ) from error


_LOADERS: tuple[Load, ...] = (_python_docs_corpus, partial(_wikitext, "2"), partial(_wikitext, "103"), _enwik8, _c4)
for (_name, _about), _load in zip(ABOUT.items(), _LOADERS, strict=True):
    DATASETS.add(Dataset(_name, _about, "text", _load))
