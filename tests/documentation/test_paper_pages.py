"""docs/papers.md and the pages of the papers are made from the presets."""

from paper_pages import pages


def test_the_stored_pages_are_what_the_script_writes() -> None:
    """If this fails, run `python docs/site/paper_pages.py` and look at the difference."""
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, path
