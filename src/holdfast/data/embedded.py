"""The embedded text: the English that a stock Python carries, which is its language reference and its docstrings.

The standard library is parsed and never imported: importing some of its modules opens browsers and windows. Which modules
there are, and what they say, differs between builds of Python; the checksum of the corpus tells them apart.
"""

import ast
import functools
import gc
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
