"""How Markdown and docstrings become pages of the site."""

import re

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed")

import site_docstrings
import site_hooks
import site_math
from markdown import Markdown


def test_a_link_between_documents_leads_to_the_page_of_the_site() -> None:
    readme = "[models](docs/models.md#families), [docs/results.md](docs/results.md), ![p](docs/pictures/slice.svg)"
    assert site_hooks.with_site_links(readme, "README.md", "overview.md") == (
        "[models](models.md#families), [results](results.md), ![p](pictures/slice.svg)"
    )
    assert (
        site_hooks.with_site_links("[how](../CONTRIBUTING.md)", "docs/routers.md", "routers.md") == "[how](contributing.md)"
    )
    below = site_hooks.with_site_links("[all](../routers.md) [n](../../README.md)", "docs/routers/ac.md", "routers/ac.md")
    assert below == "[all](../routers.md) [n](../overview.md)"


def test_a_link_to_a_file_that_is_not_on_the_site_becomes_text_and_a_broken_one_stays() -> None:
    text = "[a script](../benchmarks/verdicts.py) [gone](gone.md) [page](https://example.org/a.md) [here](#names)"
    assert site_hooks.with_site_links(text, "docs/results.md", "results.md") == (
        "a script [gone](gone.md) [page](https://example.org/a.md) [here](#names)"
    )


def test_links_in_code_are_not_touched() -> None:
    text = "```\n[a](docs/models.md)\n```"
    assert site_hooks.with_site_links(text, "README.md", "index.md") == text


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("text\n- a\n- b", "text\n\n- a\n- b"),
        ("- a\n  goes on\n- b", "- a\n  goes on\n- b"),
        ("- a\n  - nested", "- a\n    - nested"),
        ("1. a\n   - nested", "1. a\n    - nested"),
        ("## Head\n- a", "## Head\n- a"),
        ("text\n| a |\n|---|\n| `b\\|c` \\| d |", "text\n\n| a |\n|---|\n| `b|c` \\| d |"),
        ("```\ntext\n- a\n  - b\n```", "```\ntext\n- a\n  - b\n```"),
    ],
    ids=["list after text", "list item of two lines", "nested", "nested in numbers", "after a heading", "table", "code"],
)
def test_markdown_of_github_is_read_as_on_github(written: str, read: str) -> None:
    assert site_hooks.for_python_markdown(written) == read


def rendered(text: str) -> str:
    """Return Markdown as HTML, with the two extensions that read code and formulas on the site."""
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed")
    fences = {"pymdownx.superfences": {"custom_fences": [site_math.FENCE]}}
    names = ["pymdownx.superfences", "pymdownx.inlinehilite", "tables", site_math.Formulas()]
    return Markdown(extensions=names, extension_configs=fences).convert(text)


def test_formulas_become_mathml_and_code_and_money_stay() -> None:
    assert re.match('<p>with <math display="inline"><mrow><msub>.*</math>[.]</p>', rendered("with $w_i > 0$."))
    assert "<math" not in rendered("`$a$`, $5 and $6, \\$x\\$, a$b$c")
    block = rendered("```math\n\\begin{aligned}\na &= b \\\\\nc &= \\operatorname{softmax}(d)\n\\end{aligned}\n```")
    assert block.count("<mtr>") == 2 and 'display="block"' in block and "<mi>softmax</mi>" in block
    assert "<math" in rendered("| a |\n|---|\n| $x$ |")


def test_a_formula_with_an_unknown_command_is_refused() -> None:
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed")
    with pytest.raises(ValueError, match="does not know"):
        site_math.mathml(r"\unknowncommand x")


def test_aligned_columns_of_a_docstring_become_a_list() -> None:
    assert site_docstrings.as_markdown("Do it.\n\nstage    what it\n         fills\nk, norm  sizes\n\nThe end.") == (
        "Do it.\n\n- `stage`: what it fills\n- `k, norm`: sizes\n\nThe end."
    )


def test_an_example_of_a_docstring_becomes_code_and_other_text_stays() -> None:
    assert site_docstrings.as_markdown('Example:\n    a = b["c"]["d"]') == 'Example:\n\n```python\na = b["c"]["d"]\n```'
    assert site_docstrings.as_markdown("The formula:\n    y = x") == "The formula:\n\n```text\ny = x\n```"
    text = "Two lines\nof text.\n\n    a formula   with spaces"
    assert site_docstrings.as_markdown(text) == text


def test_every_package_has_a_page_or_is_left_out_on_purpose() -> None:
    packages = {path.parent.name for path in site_hooks.SOURCE.glob("*/__init__.py")}
    assert packages - set(site_hooks.PACKAGES) == {"cli", "kernels"}
