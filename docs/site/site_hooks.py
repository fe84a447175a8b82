"""What `mkdocs build` needs besides mkdocs.yml.

- Pages of the repository's top folder (README.md, CONTRIBUTING.md, ...) become pages of the site.
- The leaderboard and the reports of docs/examples become pages as commands write them (report_pages.py).
- The reference has one page for each package, with what its `__init__.py` exports.
- Formulas become MathML (site_math.py).
- Our Markdown is written for GitHub. Python-Markdown needs a blank line before a list or a table, four spaces before a
  nested list, and no backslash before a pipe in code.
"""

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import site_math
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.append(str(Path(__file__).parent))

import report_pages

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "src" / "holdfast"
DOCS = "docs/"

# Files of the top folder, and what they are called on the site.
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}

# Packages with a page of the reference, in the order of docs/design.md; kernels and commands have no public functions.
PACKAGES = (
    "routing",
    "layers",
    "hub",
    "replaying",
    "planning",
    "data",
    "attacks",
    "metrics",
    "certificates",
    "geometry",
    "testing",
    "train",
    "auditing",
    "mismatch",
    "report",
)

FENCE = re.compile(r"^\s*(```|~~~)")
LIST_ITEM = re.compile(r"^(?P<indent> *)(?:[-*]|\d+\.) ")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let Markdown read formulas."""
    config.markdown_extensions.append(site_math.Formulas())  # type: ignore[arg-type]  # mkdocs passes it on to Markdown
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [site_math.FENCE]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "reference/holdfast.md", content=front_page()))
    for place, content in report_pages.files().items():
        files.append(File.generated(config, place, content=content))
    for package in PACKAGES:
        files.append(File.generated(config, f"reference/{package}.md", content=package_page(package)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Return the Markdown of a page with links of the site, as Python-Markdown reads it."""
    place = page.file.src_uri
    written = {site: name for name, site in OUTSIDE.items()}.get(place, f"{DOCS}{place}")
    return for_python_markdown(with_site_links(markdown, written, place))


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Name the search for screen readers, which the theme does not."""
    return output.replace(' role="dialog"', ' role="dialog" aria-label="Search"')


def with_site_links(markdown: str, written: str, place: str) -> str:
    """Return the Markdown of the file `written` of the repository, with links as they must be on the page `place`.

    A link to a file that is not part of the site, such as a script, becomes its text. The text
    `docs/glossary.md` of a link becomes `glossary`.
    """

    def link(found: re.Match[str]) -> str:
        target, hash_sign, anchor = found["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(written), target))
        if path in OUTSIDE:
            path = OUTSIDE[path]
        elif not (ROOT / path).exists():
            return found[0]  # mkdocs reports it
        elif path.startswith(DOCS):
            path = path.removeprefix(DOCS)
        else:
            return found["text"]
        relative = posixpath.relpath(path, posixpath.dirname(place) or ".")
        text = Path(path).stem.replace("-", " ") if found["text"].endswith(".md") else found["text"]
        return f"{found['image']}[{text}]({relative}{hash_sign}{anchor})"

    return "\n".join(line if code else LINK.sub(link, line) for line, code in lines_and_code(markdown))


def for_python_markdown(markdown: str) -> str:
    """Return Markdown of GitHub as Python-Markdown must be given it to read the same lists and tables."""
    lines: list[str] = []
    before, in_list = "", False
    for line, code in lines_and_code(markdown):
        item = None if code else LIST_ITEM.match(line)
        table = not code and line.startswith("|")
        after_text = before.strip() and not in_list and not before.startswith(("|", "#"))
        if (item or table) and after_text:
            lines.append("")
        if item and 0 < len(item["indent"]) < 4:
            line = " " * 4 + line.lstrip()
        if table:
            line = re.sub(r"`[^`]+`", lambda span: span[0].replace("\\|", "|"), line)
        in_list = bool(item) or (in_list and bool(line.strip()))
        lines.append(line)
        before = line
    return "\n".join(lines)


def lines_and_code(markdown: str) -> list[tuple[str, bool]]:
    """Return each line, and whether it belongs to a fenced block of code."""
    found, inside = [], False
    for line in markdown.split("\n"):
        fence = bool(FENCE.match(line))
        found.append((line, inside or fence))
        inside ^= fence
    return found


def exported(init: Path) -> list[str]:
    """Return the public names of a package, in the order of its `__init__.py`: `__all__`, or what it imports and defines."""
    body = ast.parse(init.read_text(encoding="utf-8")).body
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.append(node.name)
    return names


def front_page() -> str:
    """Return the reference page of the names that `import holdfast` brings."""
    names = [name for name in exported(SOURCE / "__init__.py") if name not in PACKAGES]
    functions = [name for name in names if name[0].islower()]
    classes = [name for name in names if name[0].isupper()]
    lines = ["# holdfast", "", "What `import holdfast` brings.", "", "## Functions", ""]
    lines += [f"::: holdfast.{name}" for name in functions]
    lines += ["", "## Classes", "", *(f"::: holdfast.{name}" for name in classes)]
    return "\n".join(lines) + "\n"


def package_page(package: str) -> str:
    """Return the reference page of a package. A name that `import holdfast` brings too is a link to its description."""
    names = exported(SOURCE / package / "__init__.py")
    front = [name for name in exported(SOURCE / "__init__.py") if name in names]
    lines = [f"# holdfast.{package}", "", f"::: holdfast.{package}", "    options:", "      members: []"]
    lines += ["      show_root_heading: false", "      show_root_toc_entry: false", ""]
    if front:
        lines += ["Also here: " + ", ".join(f"[`{name}`][holdfast.{name}]" for name in front) + ".", ""]
    lines += [f"::: holdfast.{package}.{name}" for name in names if name not in front]
    return "\n".join(lines) + "\n"
