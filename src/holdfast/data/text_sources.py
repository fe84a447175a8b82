"""The embedded text: the English that a stock Python carries, which is its language reference and its docstrings.

The standard library is parsed and never imported: importing some of its modules opens browsers and windows. Which modules
there are, and what they say, differs between builds of Python; the checksum of the corpus tells them apart.


Rows of public datasets through Hugging Face's `datasets`, which downloads them once and keeps them.

Text sources by name or path.
"""

import ast
import functools
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, final

from holdfast.data.documents import SPLITS, Corpus, Document, Lazy, by_title
from holdfast.data.files import PACKED, find, opened, places, read_bytes
from holdfast.data.text_files import is_table, split_files, table_and_column, table_corpus, text_corpus
from holdfast.errors import MissingExtra, lacking, unknown

# No English to speak of, or other people's code.
SKIPPED = {"ensurepip", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "turtledemo"}
REPEATED = 8  # words: the reference says whole paragraphs twice, and so do modules. Shorter ones are headings, and stay.
_BLANK = re.compile(r"\n\s*\n")


def python_docs() -> dict[str, str]:
    """Documents by title, sorted: `modules/...` and `topics/...`. No longer paragraph occurs twice."""
    return dict(_python_docs())


@functools.cache
def _python_docs() -> tuple[tuple[str, str], ...]:
    documents = {f"modules/{name}": text for name, text in python_docstrings().items()}
    documents |= {f"topics/{name}": text for name, text in python_topics().items()}
    return tuple(without_repetition(sorted(documents.items())))


def python_topics() -> dict[str, str]:
    """The language reference, as the interpreter ships it for `help()`: documents by title, sorted."""
    from pydoc_data.topics import topics  # half a megabyte: read when asked for

    if not topics:
        raise ValueError("this Python was built without its documentation topics (pydoc_data.topics is empty).")
    return dict(sorted(topics.items()))


def python_docstrings() -> dict[str, str]:
    """What the docstrings of each module of the standard library say, in the order of its source; modules sorted."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = {}
    with warnings.catch_warnings(), _no_collector():
        warnings.simplefilter("ignore")  # old modules are full of odd escapes
        for name, path in sorted(_modules(library)):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # a build may leave templates behind
                continue
            if text := "\n\n".join(docstrings(tree)):
                documents[name] = text
    if not documents:
        raise ValueError(
            f"this Python has no sources of its standard library in {library}, so the text python-docs is not there; "
            "give the path of another text."
        )
    return documents


@contextmanager
def _no_collector() -> Iterator[None]:
    """A syntax tree is many objects without a cycle: the collector would take as long as the parser and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _modules(library: Path) -> Iterator[tuple[str, Path]]:
    """Names and sources of the standard library's modules, packages' modules included."""
    for name in sys.stdlib_module_names - SKIPPED:
        if (single := library / f"{name}.py").is_file():
            yield name, single
        for path in (library / name).rglob("*.py"):
            place = path.relative_to(library).with_suffix("").parts
            if SKIPPED.isdisjoint(place) and all(part.isidentifier() for part in place):
                yield ".".join(place).removesuffix(".__init__"), path


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Of the module, its classes and functions, in the order of the source."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield text
        # Definitions hide in statements only. Looking into expressions too would take most of the time.
        for block in ("finalbody", "orelse", "handlers", "body"):
            inner = getattr(node, block, None)
            if isinstance(inner, list):
                pending += reversed(inner)


def without_repetition(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The documents without the longer paragraphs that came before, in any of them; documents left empty are left out.

    Otherwise a model could have read in training what it is tested on.
    """
    seen = set()
    for title, text in documents:
        kept = []
        for paragraph in _BLANK.split(text):
            said = " ".join(paragraph.split())
            if said.count(" ") + 1 >= REPEATED:
                if said in seen:
                    continue
                seen.add(said)
            kept.append(paragraph)
        if remaining := "\n\n".join(kept).strip():
            yield title, remaining + "\n"


def rows(dataset: str, config: str, split: str, *, instead: str, streamed: bool = False) -> Iterable[Mapping[str, Any]]:
    """The rows of a split. Where they cannot be had, the error ends with `instead`: what else the user can do."""
    missing = lacking(f"fetching {dataset}", "datasets")
    if missing is not None:
        raise MissingExtra(f"{missing}; or {instead}.")
    from datasets import load_dataset  # type: ignore[import-untyped]

    try:
        found: Iterable[Mapping[str, Any]] = load_dataset(dataset, config, split=split, streaming=streamed)
    except Exception as error:  # no network, a proxy, a full disk, a moved dataset: each has a type of its own
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{dataset} ({config}) could not be fetched ({reason}); check the network, or {instead}."
        ) from error
    return found


ENWIK8 = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}  # bytes, in this order


@final
@dataclass(frozen=True)
class Source:
    about: str
    load: Callable[[Path | None], Corpus]  # from a folder, or None to do without


def corpora() -> dict[str, str]:
    """Names of the text sources, with one line each."""
    return {name: source.about for name, source in SOURCES.items()}


def corpus(name: str | Path, *, folder: str | Path | None = None) -> Corpus:
    """The text source of this name, or the text file or folder at this path; `reviews.csv:review` names a table's column.

    Named sources are looked for in `folder`; without one, they are fetched through `datasets` where it has them.
    """
    if isinstance(name, str) and name in SOURCES:
        return SOURCES[name].load(None if folder is None else Path(folder))
    path = Path(name)
    if name != "" and path.exists():
        return text_corpus(path)
    if found := table_and_column(str(name)):
        return table_corpus(*found)
    if isinstance(name, Path) or os.sep in name or path.suffix in {".txt", *PACKED} or is_table(path):
        raise ValueError(f"{path} does not exist.")
    raise ValueError(unknown("text source", name, SOURCES))


def _embedded_docs(_: Path | None) -> Corpus:
    documents = [Document(title, text.encode()) for title, text in python_docs().items()]
    split_of = by_title({document.title: len(document.data) for document in documents})
    splits = {split: tuple(document for document in documents if split_of[document.title] == split) for split in SPLITS}
    return Corpus("python-docs", f"{SOURCES['python-docs'].about}; Python {platform.python_version()}", splits)


def _wikitext(number: str, folder: Path | None) -> Corpus:
    name = f"wikitext-{number}"
    layout = f"train.txt, valid.txt and test.txt (or wiki.*.tokens; plain, .gz or .xz) into a folder wikitext{number}"
    if folder is None:
        return _fetched_wikitext(name, f"put {layout} and say where that is")
    for place in places(folder, (f"wikitext{number}", name)):
        found = {split: find(place, _wikitext_names(split)) for split in SPLITS}
        if paths := {split: path for split, path in found.items() if path}:
            if len(paths) < len(SPLITS):
                missing = next(split for split in SPLITS if split not in paths)
                raise ValueError(f"{place} has {name}'s {' and '.join(paths)} but no {missing}.txt.")
            return split_files(name, SOURCES[name].about, paths, "lines")
    raise ValueError(f"{name} is not in {folder}: put {layout} there, or give no folder to fetch it through `datasets`.")


def _fetched_wikitext(name: str, instead: str) -> Corpus:
    theirs = {"train": "train", "valid": "validation", "test": "test"}
    parts = {split: rows("Salesforce/wikitext", f"{name}-v1", theirs[split], instead=instead) for split in SPLITS}

    def read(split: str) -> list[Document]:
        lines = (str(row["text"]) for row in parts[split])  # the empty ones come without their newline
        text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
        return [Document(f"{name}/{split}", text.encode())]

    return Corpus(name, SOURCES[name].about, {split: Lazy(partial(read, split)) for split in SPLITS}, "lines")


def _wikitext_names(split: str) -> list[str]:
    return [f"{split}.txt", f"wiki.{split}.tokens"]


def _enwik8(folder: Path | None) -> Corpus:
    looked = [] if folder is None else [*places(folder, ("enwik8",)), folder]
    path = next((path for place in looked if (path := find(place, ("enwik8",)))), None)
    if path is None:
        raise ValueError(
            f"enwik8 is not in {folder or 'any folder given'}: get enwik8.zip from mattmahoney.net/dc, unpack it and put "
            "the file enwik8 (plain, .gz or .xz) into a folder enwik8 there."
        )

    @cache  # once for all three splits, and gone with the corpus
    def data() -> bytes:
        found = read_bytes(path)
        if len(found) != sum(ENWIK8.values()):
            raise ValueError(f"{path} has {len(found):,} bytes; enwik8 has exactly {sum(ENWIK8.values()):,}.")
        return found

    def read(split: str) -> list[Document]:
        ends = dict(zip(ENWIK8, itertools.accumulate(ENWIK8.values()), strict=True))
        return [Document(f"enwik8/{split}", data()[ends[split] - ENWIK8[split] : ends[split]])]

    return Corpus("enwik8", SOURCES["enwik8"].about, {split: Lazy(partial(read, split)) for split in SPLITS}, "bytes")


def _c4(folder: Path | None) -> Corpus:
    if folder is None:
        instead = "put files c4-train.*.json.gz and c4-validation.*.json.gz into a folder c4 and say where that is"
        parts = {split: rows("allenai/c4", "en", split, instead=instead, streamed=True) for split in ("train", "validation")}

        def texts(split: str) -> Iterator[str]:
            return (row["text"] for row in parts[split])

    else:
        files = {split: _c4_files(folder, split) for split in ("train", "validation")}

        def texts(split: str) -> Iterator[str]:
            return itertools.chain.from_iterable(map(_json_texts, files[split]))

    def read(split: str, start: int, step: int) -> Iterator[Document]:
        for number, text in itertools.islice(enumerate(texts(split)), start, None, step):
            yield Document(f"c4/{split}/{number}", text.encode("utf-8", "replace"))

    # C4 has no test split: its validation documents take turns.
    places_of = {"train": ("train", 0, 1), "valid": ("validation", 0, 2), "test": ("validation", 1, 2)}
    splits = {split: Lazy(partial(read, *place)) for split, place in places_of.items()}
    return Corpus("c4", SOURCES["c4"].about, splits, "words", streamed=True)


def _c4_files(folder: Path, split: str) -> list[Path]:
    for place in (*places(folder, ("c4",)), folder):
        if found := sorted(path for path in place.glob(f"c4-{split}.*") if ".json" in path.suffixes):
            return found
    raise ValueError(
        f"c4 is not in {folder}: put its files c4-{split}.*.json.gz (allenai/c4, folder en) into a folder c4 there, "
        "or give no folder to stream it through `datasets`."
    )


def _json_texts(path: Path) -> Iterator[str]:
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a JSON object with a text.") from error
            yield str(text)


SOURCES = {
    "python-docs": Source(
        "the English that a stock Python carries, language reference and docstrings; embedded", _embedded_docs
    ),
    "wikitext-2": Source("2 million words of good Wikipedia articles", partial(_wikitext, "2")),
    "wikitext-103": Source("103 million words of good Wikipedia articles", partial(_wikitext, "103")),
    "enwik8": Source("the first 100 million bytes of an English Wikipedia dump, markup and all", _enwik8),
    "c4": Source("cleaned web pages in English, far more than anyone reads: streamed", _c4),
}
