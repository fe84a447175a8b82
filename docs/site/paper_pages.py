"""Write docs/papers.md and docs/papers/NAME.md from the presets of the papers (src/holdfast/train/papers/*.yaml).

python docs/site/paper_pages.py            # write them again, after a change of a preset
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.report.comparison_tables import published_table
from holdfast.train.papers import Paper, Preset, load_papers

DOCS = Path(__file__).resolve().parent.parent
NOTICE = "<!-- Written by docs/site/paper_pages.py from src/holdfast/train/papers: change those. -->\n"
INTRODUCTION = """# The papers' tables, and how to run them here

Each table or figure of the papers that compares routers is a preset: the paper's own experiment, with its published
figures and a list of everything that a run here does otherwise.

```console
$ holdfast papers                                  # list them, with data and GPU hours
$ holdfast papers acmoe:table1-switch              # one of them: recipe, published figures, deviations
$ holdfast compare --paper acmoe:table1-switch --rehearse --out rehearsal   # the same routers in a small model, minutes
$ holdfast compare --paper acmoe:table1-switch --steps 3000 --seeds 2 --data DATA --out runs/acmoe
```

Texts lie in `--data FOLDER` or are downloaded; for ImageNet and DomainBed set `data.source` to their folder
(`--set data.source=FOLDER`). Some presets fine-tune: each router and seed starts from its own cell of another preset, whose
folder `--from` names. Table and page of the comparison show the published figure beside ours, and the deviations. What we
have run is in [results.md](results.md).

Not every experiment is exact: what is missing here stands under "not built here" of its page.

| paper | presets |
|---|---|
"""


def escaped(text: object) -> str:
    return str(text).replace("|", "\\|")


def index(papers: dict[str, Paper]) -> str:
    """Return docs/papers.md."""
    rows = [
        f"| [{paper.title}](papers/{name}.md) ({paper.authors}) | {', '.join(f'`{name}:{key}`' for key in paper.presets)} |"
        for name, paper in papers.items()
    ]
    return NOTICE + INTRODUCTION + "\n".join(rows) + "\n"


def page(paper: Paper) -> str:
    """Return the page of a paper."""
    return NOTICE + "\n".join(_page(paper)) + "\n"


def _page(paper: Paper) -> Iterator[str]:
    yield f"# {paper.title}\n\n{paper.authors}. Presets: [the papers' tables](../papers.md).\n"
    if paper.reading:
        yield "## How the paper is read\n"
        yield from (f"- {sentence}" for sentence in paper.reading)
        yield ""
    shared = list(paper.sentences.values())
    if shared:
        yield "## Deviations of several presets, and what is not built\n"
        yield from (f"{number}. {sentence}" for number, sentence in enumerate(shared, 1))
        yield ""
    for key, preset in paper.presets.items():
        yield from _preset(f"{paper.paper}:{key}", preset, shared)
    if paper.left_out:
        yield "## Left out\n"
        yield from (f"- {sentence}" for sentence in paper.left_out)


def _preset(name: str, preset: Preset, shared: Sequence[str]) -> Iterator[str]:
    yield f"## {name.partition(':')[2]}\n\n{preset.title} ({', '.join(preset.covers)}).\n"
    if preset.command is not None:
        yield f"```console\n$ {preset.command}\n```\n"
    elif preset.recipe is None:
        yield "It cannot be run here.\n"
    else:
        start = "" if preset.start is None else f" --from runs/{preset.start}"
        yield f"```console\n$ holdfast compare --paper {name}{start}\n```\n"
        changed = "".join(f", `{key}={value}`" for key, value in preset.set.items())
        seeds = f"{preset.seeds} seed{'s' if preset.seeds > 1 else ''}"
        swept = "".join(f"; for each router the best `{key}` of {values}" for key, values in preset.sweep.items())
        routers = ", ".join(f"`{router}`" for router in preset.routers)
        yield f"Recipe `{preset.recipe}`{changed}; {seeds}{swept}. Routers: {routers}.\n"
    if preset.published.rows:
        table = published_table(preset.published)
        yield "| " + " | ".join(map(escaped, table.columns)) + " |"
        yield "|" + "---|" * len(table.columns)
        yield from ("| " + " | ".join(map(escaped, row)) + " |" for row in table.rows)
        yield ""
    for title, sentences in (("Deviations", preset.deviations), ("Not built here", preset.needs)):
        if sentences:
            numbers = ", ".join(str(shared.index(sentence) + 1) for sentence in sentences if sentence in shared)
            yield f"{title}: {numbers}\n" if numbers else f"{title}:\n"
            yield from (f"- {sentence}" for sentence in sentences if sentence not in shared)
            yield ""


def pages() -> dict[Path, str]:
    """Return the text of every page by its path."""
    papers = load_papers()
    return {DOCS / "papers.md": index(papers)} | {DOCS / "papers" / f"{name}.md": page(one) for name, one in papers.items()}


if __name__ == "__main__":
    (DOCS / "papers").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
