"""Write docs/routers/NAME.md, a page for each router that Holdfast registers.

    python docs/site/router_pages.py            # write them again, after a change of a router, of results or of times

By hand are only the idea, the formulas, warnings and the papers, in router_texts.yaml. Everything else is read from
where it is true:

    options             docstrings and constructors of the router's parts
    picture             what the router does on the line between two tokens (router_slices.py), drawn to pictures/NAME.svg
    traits, needs       what the router declares, built at the sizes below
    cost                what its parts declare at the sizes below, and the times in docs/performance.md
    certificate         what `certify` answers for the router
    results             the rows of docs/results.md, and of the demo in docs/comparing.md, that name it
    when to take it     the problems of docs/which-router.md that it is advised for
"""

import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from router_slices import picture, slices
from site_docstrings import option_texts, texts

from holdfast.certificates import certify
from holdfast.cli.routers import HEADS, VOCABULARY, WARM_UP, embedded_tokens, synthetic_context
from holdfast.planning.model_shape import own_flops
from holdfast.routing import Router
from holdfast.routing.declarations import LayerSizes, NoCertificate
from holdfast.routing.grammar import option_name
from holdfast.routing.parts import Part
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import DEFAULT_PARTS, FAMILIES, GIVEN, NOISE, Preset

DOCS = Path(__file__).resolve().parent.parent
PAGES = DOCS / "routers"
PICTURES = PAGES / "pictures"
TEXTS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("router_texts.yaml").read_text(encoding="utf-8"))

STAGES = {"expert": "inform, expert side", "token": "inform, token side", "capacity": "capacity, around select"}
TRAITS = {
    "causal": "causal: a later token does not change the routing of an earlier one",
    "batch_invariant": "batch-invariant: other sequences and padding do not change it",
    "cacheable": "cacheable: decoding token by token gives the routing of one forward",
    "sequence_aware": "sequence-aware: reads other tokens of the sequence",
}
READS = {
    "attention": "the attention before the layer",
    "attention.mask": "which tokens the attention lets see each other",
    "attention.projection": "the output projection of that attention",
    "previous": "the routing of the previous MoE layer",
    "token_ids": "token ids",
    "modality": "the modality of each token",
}

# The sizes of the costs: those of the tables in docs/performance.md (olmoe).
K, HIDDEN = 8, 1024
SIZES = LayerSizes(
    dim=2048,
    experts=64,
    length=2048,
    heads=16,
    key_width=128,
    value_width=128,
    number=2,
    expert_parameters=3 * 2048 * HIDDEN,
    causal=True,
)
EXPERT_FLOPS = 6.0 * SIZES.dim * HIDDEN  # of one gated expert and one token, forward

DEMO = "[The demo](../comparing.md#the-demo), a tiny model and 150 steps, perplexity"

# The sizes of the routers that are built to ask for traits and certificates.
DIM, EXPERTS, SEQUENCES = 64, 16, 2


@dataclass(frozen=True)
class Table:
    """A Markdown table, and the heading that it stands under."""

    heading: str
    columns: list[str]
    rows: list[list[str]]


def page(preset: Preset) -> str:
    """Return the page of a router as Markdown."""
    parts = _parts(preset)
    router, contexts = _built(preset.name)
    sections = [
        f"# {preset.name}",
        "<!-- Written by docs/site/router_pages.py: change the code, router_texts.yaml or results.md, and run it again. -->",
        f"{preset.about[0].upper()}{preset.about[1:]}. "
        f"Family: {preset.family}, {FAMILIES[preset.family]}. Replaces stage: {_stages(preset)}. {_use(preset, router)}",
        "## Idea",
        " ".join(TEXTS[preset.name]["idea"].split()),
        _advice(preset.name),
        "## Formula",
        *_formulas(preset.name, parts),
        "## Picture",
        *_picture(preset.name),
        "## Options",
        _options(preset, parts, router),
        "## Traits",
        _traits(router, TEXTS[preset.name].get("traits", "")),
        "## Cost",
        _cost(preset),
        *_times(preset.name),
        "## Certificate",
        _certificate(router, contexts),
        "## Results",
        *_results(preset.name),
        "## Papers",
        "\n".join(f"- {paper}" for paper in TEXTS[preset.name]["papers"]),
        "See also: [all routers](../routers.md), [which router when](../which-router.md), [tables of papers](../papers.md).",
    ]
    return "\n\n".join(sections) + "\n"


def write_pictures(folder: Path) -> list[Path]:
    """Draw all pictures in `folder`, and remove those of routers that are gone."""
    return _write_all(folder, ".svg", {preset.name: picture(preset.name, slices(preset.name)) for preset in own_presets()})


def write_pages(folder: Path) -> list[Path]:
    """Write all pages to `folder`, and remove pages of routers that are gone."""
    return _write_all(folder, ".md", {preset.name: page(preset) for preset in own_presets()})


def own_presets() -> list[Preset]:
    """Return the presets of the package; those of plugins have no page."""
    return [preset for preset in REGISTRY if preset.family != "plugins"]


def _parts(preset: Preset) -> dict[str, type[Part]]:
    """Return the classes of the parts that a preset brings, by stage; `smoe` brings none and has the default parts."""
    return dict(preset.parts or DEFAULT_PARTS)


def _stages(preset: Preset) -> str:
    return ", ".join(STAGES.get(stage, stage) for stage in preset.parts) or "none, these are the defaults"


def _use(preset: Preset, router: Router) -> str:
    if router.select.layer_kind != "moe":
        return f'Use it with `holdfast.sparsify(model, experts=16, router="{preset.name}")`: it is a layer of its own.'
    return f'Use it with `holdfast.reroute(model, "{preset.name}")`, or joined to others with `+`.'


def _advice(name: str) -> str:
    """Return the problems that docs/which-router.md advises the router for, each with a link to its evidence.

    A problem counts as its own if the router is the first that the row names. In other rows another one comes first.
    """
    (table,) = [one for one in tables((DOCS / "which-router.md").read_text(encoding="utf-8")) if one.columns[1] == "take"]
    first, later = list[str](), list[str]()
    for row in table.rows:
        if name in names_in(row[1]):
            codes = re.findall(r"`[^`]+`", row[1])
            problem = row[0].replace("](#", "](../which-router.md#")
            if "+" in codes[0]:
                problem = f"joined as {codes[0]}: {problem}"
            (first if name in router_names(codes[0]) else later).append(problem)
    lists = [f"**When to take it**: {'; '.join(first)}."] if first else []
    if later:
        about = "another router is named first there, and no advantage over it is shown"
        lists.append(f"**Also possible** ({about}): {'; '.join(later)}.")
    if lists:
        return "\n\n".join(lists)
    return (
        "**When to take it**: [which router when](../which-router.md) advises it for no problem. "
        "Take it to compare routers, or to follow its paper."
    )


def names_in(text: str) -> set[str]:
    """Return the names of routers in all code of a text."""
    return set[str]().union(*(router_names(code) for code in re.findall(r"`[^`]+`", text)))


def _formulas(name: str, parts: dict[str, type[Part]]) -> Iterator[str]:
    """Yield the formulas, the names of the parts, and what their docstrings say after the first sentence, a formula too."""
    yield TEXTS[name]["formula"].rstrip()
    yield f"In Python: {', '.join(f'`{part.__name__}`' for part in parts.values())}."
    for part in parts.values():
        yield from texts(inspect.getdoc(part) or "")[1:]


def _picture(name: str) -> Iterator[str]:
    """Yield the stored picture, and its caption."""
    found = re.search("<desc>(.+)</desc>", (PICTURES / f"{name}.svg").read_text(encoding="utf-8"))
    assert found, name
    yield f"![Weights of the experts of {name} between two tokens](pictures/{name}.svg)"
    others = {"smoe": "[`smoe`](smoe.md), plain top-k", "smooth": "[`smooth`](smooth.md), without jumps"}
    compared = " and ".join(text for other, text in others.items() if other != name)
    yield (
        "The weights of the experts, one on top of the other, while a token moves straight from token A to token B; the "
        f"numbers are those of the experts. {found[1]} Every router is drawn with the same two tokens and 6 experts, and "
        f"those with linear scores have the same vectors of experts: compare with {compared}."
    )


def _options(preset: Preset, parts: dict[str, type[Part]], router: Router) -> str:
    """Return a table of options: names, values and defaults from the constructors of parts, texts from their docstrings."""
    rows: dict[str, str] = {}
    described = {name: text for part in parts.values() for name, text in _described(part).items()}
    for part in parts.values():
        hints = typing.get_type_hints(part.__init__)
        for parameter in inspect.signature(part).parameters.values():
            option = option_name(parameter.name)
            if parameter.name in (*GIVEN, *NOISE) or option in rows:
                continue
            default = preset.defaults.get(option, parameter.default)
            shown = _default(default)
            if parameter.name in part.pretrained_defaults:
                trained = part.pretrained_defaults[parameter.name]
                shown += "; with trained weights " + ("see the meaning" if trained is None else _default(trained))
            cells = [f"`{option}`", _values(hints[parameter.name]), shown, described.get(parameter.name, "")]
            rows[option] = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    of_top_k = {"k": "experts per token", **_described(REGISTRY.part_classes("smoe")[-1])}
    for option, value in preset.defaults.items():
        rows.setdefault(option, f"| `{option}` | | {_default(value)} | {of_top_k[option]} |")
    table = ["| option | values | default | meaning |", "|---|---|---|---|", *rows.values()]
    used = {"`k`": REGISTRY.uses_k(preset.name), "`noise`": router.select.declares.takes_noise}
    shared = ", ".join(name for name, is_used in used.items() if is_used)
    shared = f"{shared} and the options" if shared else "The options"
    shared += " of the other stages are those of every router ([routers](../routers.md))."
    if not used["`k`"]:
        shared += " It has no `k`: one in its name is an error."
    if not rows:
        return f"None of its own. {shared}"
    return "\n".join(table) + f"\n\n{shared}"


def _described(part: type[Part]) -> dict[str, str]:
    """Return the text of each option in the docstring of a part or of the classes it derives from."""
    found: dict[str, str] = {}
    for cls in part.__mro__:
        for name, text in option_texts(inspect.cleandoc(cls.__doc__ or "")).items():
            if not text.startswith("see `"):
                found.setdefault(name, text)
    return found


def _values(hint: Any) -> str:
    """Return the values that an option takes, as they are written in brackets."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return ", ".join(_values(argument) for argument in arguments if argument is not type(None))
    if hint is bool:
        return "`true`, `false`"
    if origin is not None:
        return "numbers"
    return {int: "a whole number", float: "a number", str: "a text"}.get(hint, "numbers")


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "the model's"
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


@functools.cache
def _batches() -> list[tuple[Any, Any]]:
    """Return a few batches of text as tokens, with their contexts."""
    batches = embedded_tokens(WARM_UP + 1, SEQUENCES, DIM, 0)
    return [(tokens, synthetic_context(tokens, ids, EXPERTS)) for tokens, ids in batches]


def _built(name: str) -> tuple[Router, list[tuple[Any, Any]]]:
    """Return the router in evaluation mode after a few batches of text, and the batches with their contexts."""
    torch.manual_seed(0)
    given = {"heads": HEADS, "vocabulary": VOCABULARY}
    options: dict[str, Any] = {key: value for key, value in given.items() if key in REGISTRY.options(name)}
    router = REGISTRY.build(name, dim=DIM, experts=EXPERTS, **options)
    with torch.no_grad():
        for tokens, context in _batches()[:-1]:
            router.train()(tokens, context)
    return router.eval(), _batches()


def _traits(router: Router, exception: str) -> str:
    def word(value: bool) -> str:
        return "yes" if value else "no"

    rows = [
        f"| {text} | {word(getattr(router.traits, name))} | {word(getattr(router.training_traits, name))} |"
        for name, text in TRAITS.items()
    ]
    table = "\n".join(["| trait | in evaluation | in training |", "|---|---|---|", *rows])
    reads = sorted(READS[name] for name in router.reads)
    needs = f"Besides its tokens it reads {' and '.join(reads)}." if reads else "It reads nothing but its tokens."
    return "\n\n".join(filter(None, [table, " ".join(exception.split()), needs]))


def _cost(preset: Preset) -> str:
    """Return what the parts declare, and their FLOPs, for a layer of the sizes of docs/performance.md."""
    given = {"heads": SIZES.heads, "vocabulary": 50304}
    options: dict[str, Any] = {key: value for key, value in given.items() if key in REGISTRY.options(preset.name)}
    with torch.device("meta"):
        router = REGISTRY.build(preset.name, dim=SIZES.dim, experts=SIZES.experts, k=K, **options)
    costs = [cost(SIZES) for part in router.all_parts if (cost := part.declares.cost) is not None]
    flops = [counted for part in router.all_parts if (counted := own_flops(part, SIZES, torch.device("meta"))) is not None]
    forward, training = sum(part.forward for part in flops), sum(part.training for part in flops)
    declared = router.select.declares.active
    active = None if declared is None else declared(SIZES)
    experts = float(SIZES.experts) if active is None else active.inference
    why = f" ({active.about.rstrip('.')})" if active is not None and active.about else ""
    share = f", {100 * forward / (experts * EXPERT_FLOPS):.2g}% of the experts'" if forward else ""
    buffers = {id(buffer): buffer for part in router.parts for buffer in part.buffers()}.values()
    state = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    rows = {
        "experts per token": f"{experts:.3g}{why}",
        "FLOPs of the router per token, forward": f"{_count(forward)}{share}",
        "FLOPs of the router per token, training step": _count(training),
        "trained parameters of the router": _count(sum(weight.numel() for weight in router.parameters())),
        "state and fixed tables": _count(state, "B"),
        "kept per token while decoding": _count(sum(cost.cached for cost in costs), "B"),
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    return (
        f"Declared by its parts, for a layer of {SIZES.dim} features, {SIZES.experts} experts of {HIDDEN} hidden features, "
        f"k = {K}, sequences of {SIZES.length} tokens; `holdfast plan` computes it for your model.\n\n{table}"
    )


def _count(number: float, unit: str = "") -> str:
    """Return a number with three digits and k, M or G."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def _times(name: str) -> Iterator[str]:
    """Yield the measured times of docs/performance.md."""
    found: dict[str, list[str]] = {}
    for table in tables((DOCS / "performance.md").read_text(encoding="utf-8")):
        if table.heading != "Routers":
            continue
        for row in table.rows:
            for at, cell in enumerate(row[:-1]):
                if table.columns[at] == "router" and table.columns[at + 1] == "ms" and name in router_names(cell):
                    found.setdefault(cell, []).append(row[at + 1])
    if found:
        times = "; ".join(f"{cell}: {' and '.join(numbers)} ms" for cell, numbers in found.items())
        yield (
            "Measured on an H200, forward and backward of the router together at these sizes, "
            f"where the experts take about 9 ms; two times are of two runs: {times}. "
            "[performance](../performance.md#routers) says how."
        )
    else:
        yield "Its time is not in [performance](../performance.md#routers)."


def _certificate(router: Router, batches: Sequence[tuple[Any, Any]]) -> str:
    tokens, context = batches[-1]
    try:
        found = certify(router, tokens, context)
    except NoCertificate as reason:
        text = str(reason).strip().rstrip(".")
        return f"{text[0].upper()}{text[1:]}. [Certificates](../certificates.md) says what can be done instead."
    infinite = (
        ", and infinite: no change of hidden states changes its experts. Another token id does"
        if found.radius.isinf().all()
        else ""
    )
    meaning = {
        "exact": "the radius is the distance to the nearest decision boundary",
        "lower bound": "no perturbation within the radius changes the selected experts; larger ones may be harmless too",
        "probabilistic": "the radius holds with high probability",
    }[found.kind]
    core = (
        " It is about the hard core, the k experts with the largest weights: within the radius other experts may still "
        "enter and leave, with weights that start at 0. The radius is that of plain top-k with the same scores."
        if _has_core(router)
        else ""
    )
    kind = f"Kind: **{found.kind}**{infinite or f': {meaning}'}.{core}"
    return f"{kind} [Certificates](../certificates.md) says what is certified."


def _has_core(router: Router) -> bool:
    """Return whether a token uses more experts than those that are certified."""
    return router.select.declares.core is not None and router.select.ragged


def _results(name: str) -> Iterator[str]:
    """Yield the rows of docs/results.md and of the demo that name the router, those of its claims too."""
    results = tables((DOCS / "results.md").read_text(encoding="utf-8"))
    demo = [one for one in tables((DOCS / "comparing.md").read_text(encoding="utf-8")) if one.heading == "The demo"]
    if "warning" in TEXTS[name]:
        yield " ".join(TEXTS[name]["warning"].split())
    measured, last = False, ""
    for table in [*results, *demo]:
        rows = [row for row in table.rows if name in names_in(row[0])]
        if not rows:
            continue
        measured |= table in results
        if table.heading != last:
            yield f"**{table.heading}**" if table in results else f"**{DEMO}**"
        last = table.heading
        trained = {re.sub(r"`[^`{]*", "`smoe", row[0], count=1) for row in rows}  # smoe with the same braces
        baseline = [row for row in table.rows if row[0] in trained and row not in rows]
        lines = [table.columns, ["---"] * len(table.columns), *baseline, *rows]
        yield "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("](pictures/", "](../pictures/")
    if measured:
        yield "[results](../results.md) has the setting, the intervals and the limits of these runs."
    else:
        yield "Not measured: [results](../results.md) has no model that was trained with it."


def router_names(cell: str) -> set[str]:
    """Return the names of routers in the code at the beginning of a table's cell: "`symphony+smooth`" has two."""
    code = re.match(r"`([^`]+)`", cell)
    return set(re.sub(r"\[[^\]]*\]|\{[^}]*\}", "", code[1]).split("+")) if code else set()


def tables(markdown: str) -> list[Table]:
    """Return the tables of a document."""
    found: list[Table] = []
    heading, rows = "", list[list[str]]()
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
        elif rows:
            found.append(Table(heading, rows[0], rows[2:]))
            rows = []
        if line.startswith("#"):
            heading = line.lstrip("# ")
    return found


def _write_all(folder: Path, suffix: str, contents: dict[str, str]) -> list[Path]:
    """Write a file for each name, and remove the other files with this suffix."""
    folder.mkdir(exist_ok=True)
    files = {folder / f"{name}{suffix}": content for name, content in contents.items()}
    for file in set(folder.glob(f"*{suffix}")) - set(files):
        file.unlink()
    for file, content in files.items():
        file.write_text(content, encoding="utf-8")
    return list(files)


def main() -> None:
    for file in [*write_pictures(PICTURES), *write_pages(PAGES)]:
        print(file.relative_to(DOCS.parent), file=sys.stderr)


if __name__ == "__main__":
    main()
