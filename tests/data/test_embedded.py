"""The embedded text: the English in a Python installation."""

import ast
import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wording import assert_refused

from holdfast.data import corpus, python_docs, python_topics, text_sources


def test_it_is_about_300000_words_of_english_in_a_fixed_order() -> None:
    documents = python_docs()
    assert list(documents) == sorted(documents)
    text = " ".join(documents.values())
    assert 200_000 < len(text.split()) < 400_000
    assert text.count(" the ") > 10_000
    assert "topics/assert" in documents and "modules/json.decoder" in documents


def test_it_has_the_language_reference_alone_too() -> None:
    topics = python_topics()
    assert list(topics) == sorted(topics)
    assert len(" ".join(topics.values()).split()) > 50_000


@pytest.mark.slow
def test_it_loads_in_seconds_and_restores_the_garbage_collector() -> None:
    """Measured in processor time, because other programs may run on this machine; a slow processor needs a few seconds."""
    assert gc.isenabled()
    python_docs.cache_clear()
    start = time.process_time()
    python_docs()
    assert time.process_time() - start < 60
    assert gc.isenabled()


@pytest.mark.slow
def test_another_process_reads_the_same_and_imports_no_module_for_its_docstrings() -> None:
    """Python's own hash differs between processes and must not matter. `antigravity` opens a browser, `this` prints."""
    code = "from holdfast.data import corpus; import sys; print(corpus('python-docs').checksum, *sys.modules)"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "7"})
    checksum, *loaded = other.stdout.split()
    assert checksum == corpus("python-docs").checksum
    assert {"antigravity", "this", "tkinter", "turtle", "smtplib"}.isdisjoint(loaded)
    assert {"transformers", "datasets", "sklearn", "PIL"}.isdisjoint(loaded)  # the default needs none of them


def test_tests_and_vendored_packages_are_not_in_it() -> None:
    parts = {part for title in python_docs() for part in title.split("/")[1].split(".")}
    assert parts.isdisjoint({"test", "tests", "idlelib", "pip", "setuptools", "torch", "site-packages"})


def test_docstrings_have_the_order_of_the_source_inside_statements_too() -> None:
    source = '''
"""one"""
class A:
    """two"""
    def f(self):
        """three"""
        async def inner():
            """four"""
try:
    def g():
        """five"""
except ImportError:
    def g():
        """six"""
else:
    class B:
        """seven"""
if True:
    def h():
        "eight"
def nothing():
    x = """not a docstring"""
'''
    expected = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    assert list(text_sources.docstrings(ast.parse(source))) == expected


def test_no_long_paragraph_occurs_twice_and_headings_stay() -> None:
    long = "a paragraph of nine words that is said twice"
    documents = [("a", f"Notes\n\n{long}"), ("b", f"Notes\n\n{long.replace(' ', '   ')}\n\nanother"), ("c", long)]
    assert dict(text_sources.without_repeated_paragraphs(documents)) == {
        "a": f"Notes\n\n{long}\n",
        "b": "Notes\n\nanother\n",
    }


def test_test_documents_share_no_long_paragraph_with_training_documents() -> None:
    source = corpus("python-docs")
    paragraphs = {
        split: {" ".join(p.split()) for document in source.splits[split] for p in document.text.split("\n\n")}
        for split in source.splits
    }
    common = (paragraphs["valid"] | paragraphs["test"]) & paragraphs["train"]
    assert max(len(paragraph.split()) for paragraph in common) < text_sources.REPEATED


def test_the_splits_are_of_whole_documents_and_four_fifths_train() -> None:
    source = corpus("python-docs")
    titles = {split: {document.title for document in source.splits[split]} for split in source.splits}
    assert sum(map(len, titles.values())) == len(set.union(*titles.values())) == len(python_docs())
    sizes = {split: sum(len(document.data) for document in source.splits[split]) for split in source.splits}
    shares = {split: size / sum(sizes.values()) for split, size in sizes.items()}
    assert 0.78 < shares["train"] < 0.82 and all(0.08 < shares[split] < 0.13 for split in ("valid", "test"))


def test_the_description_names_the_python_version() -> None:
    record = corpus("python-docs").describe()
    assert sys.version.split()[0] in record["about"]
    assert len(record["checksum"]) == 64


def test_a_python_without_its_sources_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert_refused(r"standard library.*path", text_sources.python_docstrings)
