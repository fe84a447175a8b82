"""What `holdfast plan` prints: a column for each router."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.cli.terminal import screen, show

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast.planning.planning import Plan as ModelPlan
    from holdfast.planning.planning import Planned

Cell = Callable[["Planned"], str]

SCALES = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
LAYOUTS = {"ddp": "replicated (DDP)", "fsdp": "sharded (FSDP)", "expert": "experts apart"}


def count(value: float) -> str:
    """Three digits, in thousands of thousands."""
    return _scaled(value, SCALES, "")


def size(value: float) -> str:
    """Bytes, in units of 1024."""
    return _scaled(value, BINARY, " B")


def _scaled(value: float, scales: tuple[tuple[float, str], ...], unit: str) -> str:
    for scale, name in scales:
        if value >= scale:
            share = value / scale
            return f"{share:.0f} {name}" if share >= 100 else f"{share:.3g} {name}"
    return f"{value:.0f}{unit}"


def print_plan(plan: ModelPlan, tokens: float | None = None) -> None:
    console, work = screen(), plan.workload
    console.print(
        f"{plan.model} ({plan.model_type}): {plan.sparse_layers} of {plan.layers} layers with {plan.experts} experts each; "
        f"{work.batch} x {plan.sequence} tokens a GPU and step, {work.gpus} GPU{'s' if work.gpus > 1 else ''} of "
        f"{work.gpu_memory:g} GiB, {work.dtype}{', checkpointed' if work.checkpointing else ''}",
        highlight=False,
    )
    for table in (_model(plan), _flops(plan, tokens), _memory(plan), _spread(plan)):
        show(table)
    for column in plan.columns:
        if column.about:
            console.print(f"{column.router}: {column.about}.", highlight=False, markup=False)


def _table(plan: ModelPlan, title: str, rows: list[tuple[str, Cell]], caption: str | None = None) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for column in plan.columns:
        table.add_column(escape(column.router), justify="right")
    for name, cell in rows:
        table.add_row(name, *(cell(column) for column in plan.columns))
    return table


def _model(plan: ModelPlan) -> Table:
    rows: list[tuple[str, Cell]] = [
        ("parameters", lambda c: count(c.parameters)),
        ("active a token", lambda c: count(c.active_parameters)),
        ("of routers", lambda c: count(c.router_parameters)),
        ("experts a token", lambda c: f"{c.experts_a_token:g}"),
        ("router state", lambda c: size(c.training_memory.state)),
    ]
    return _table(plan, "Model", rows)


def _flops(plan: ModelPlan, tokens: float | None) -> Table:
    rows: list[tuple[str, Cell]] = [
        ("attention, projections", lambda c: count(c.forward.projections)),
        ("attention, mixing", lambda c: count(c.forward.mixing)),
        ("dense networks", lambda c: count(c.forward.dense)),
        ("experts", lambda c: count(c.forward.experts)),
        ("logits", lambda c: count(c.forward.head)),
    ]
    parts = list(dict.fromkeys(part for column in plan.columns for part in column.training.parts))
    for part in parts:
        if any(column.training.parts.get(part) for column in plan.columns):
            rows.append((f"router: {part}", lambda c, part=part: _share(c.forward.parts.get(part))))  # type: ignore[misc]
    rows += [("forward", lambda c: count(c.forward.total)), ("training step", lambda c: count(c.training.total))]
    rows.append(("  of it routers", lambda c: f"{100 * c.training.router / c.training.total:.2g}%"))
    if tokens is not None:
        rows.append((f"training of {count(tokens)} tokens", lambda c: count(c.training.total * tokens)))
    return _table(plan, "FLOPs a token", rows, "matrix products, a multiply-add is 2; parts of a router as in the forward")


def _share(value: float | None) -> str:
    return "" if value is None else count(value)


def _memory(plan: ModelPlan) -> Table:
    rows: list[tuple[str, Cell]] = [
        ("weights", lambda c: size(c.training_memory.weights)),
        ("gradients", lambda c: size(c.training_memory.gradients)),
        ("AdamW's moments", lambda c: size(c.training_memory.moments)),
        ("master weights", lambda c: size(c.training_memory.master)),
        ("activations, about", lambda c: size(c.activations["kept"])),
        ("  checkpointed", lambda c: size(c.activations["checkpointed"])),
        ("  of it routers", lambda c: size(c.training_memory.routers)),
        ("training", lambda c: size(c.training_memory.total)),
        ("KV cache", lambda c: size(c.inference_memory.cache)),
        ("routers' cache", lambda c: size(c.inference_memory.router_cache)),
        ("inference", lambda c: size(c.inference_memory.total)),
    ]
    return _table(plan, "Memory, all on one GPU", rows)


def _spread(plan: ModelPlan) -> Table:
    rows: list[tuple[str, Cell]] = []
    one = plan.workload.gpus == 1
    for index, layout in enumerate(plan.columns[0].layouts[: 1 if one else None]):
        name = "all of it" if one else LAYOUTS[layout.name]
        rows += [
            (f"{name}: memory", lambda c, at=index: size(c.layouts[at].total)),  # type: ignore[misc]
            ("  fits", lambda c, key=layout.name: "yes" if c.fits(plan.workload.gpu_memory)[key] else "no"),  # type: ignore[misc]
            ("  sent a step", lambda c, at=index: size(c.layouts[at].traffic)),  # type: ignore[misc]
        ]
    rows.append(("for routers' state", lambda c: size(c.layouts[0].summed)))
    return _table(plan, "One GPU, training" if one else f"Each of {plan.workload.gpus} GPUs, training", rows)
