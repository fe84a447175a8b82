"""`holdfast certify`: how far the routers' inputs of a model may move before tokens go to other experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from holdfast.cli.common import Loading, PluginFiles, bar, require_free, show, slim_table, write_out

if TYPE_CHECKING:
    from holdfast.auditing import ModelCertificates


@dataclass(frozen=True)
class Certify:
    """Certify a model's routing: for every token and layer, a radius within which no move of the router's input changes its
    experts, and which tokens rounding could send elsewhere.

    Examples: `holdfast certify comparison/cells/symphony-seed0`, `holdfast certify path/to/olmoe --norm linf --out l.json`,
    `holdfast certify path/to/model --sigma 0.1` (a majority vote under noise, where no bound is known)
    """

    model: Positional[str]
    """What `holdfast train` or `compare` left, or any Hugging Face folder or name."""
    source: str | None = None
    """Another text or set of pictures than the model was trained on: a name or a path."""
    data: Path | None = None
    """Where named sources lie, if they are not to be fetched."""
    tokens: int = 4096
    """About how much of a text is read: it ends with a whole batch."""
    length: int = 128
    """Tokens of a sequence."""
    batch: int = 8
    """Sequences of a batch."""
    norm: Literal["l2", "linf"] = "l2"
    """Of moves: their length, or the largest change of any feature."""
    rounding: Literal["worst", "likely"] = "worst"
    """What rounding errors take off the radii: all that could be, or what once in 10^9 cases is exceeded."""
    sigma: float | None = None
    """Noise of a majority vote, for routers that no bound is known for."""
    samples: int = 1000
    """Draws of that noise."""
    alpha: float = 0.001
    """The chance that a token's certificate of that vote is wrong."""
    seed: int = 0
    """Of that noise."""
    out: Path | None = None
    """A JSON file for all figures."""
    force: bool = False
    """Overwrite that file if it is there."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.version import versions

        self.plugins.load()
        require_free(self.out, self.force)
        found, source = self._certify()
        summary = found.summary()
        print_certificates(summary)
        write_out(self.out, {**summary, "data": source, "versions": versions()})
        if found.status == "interrupted":
            print("Interrupted: these are the figures of what was finished.")
            raise KeyboardInterrupt

    def _certify(self) -> tuple[ModelCertificates, dict[str, Any]]:
        from holdfast.auditing import certify_model
        from holdfast.certificates import Smoothing
        from holdfast.hub.tracing import require_room
        from holdfast.train.saved_model import Material, subject
        from holdfast.train.training import quiet

        noise = {"samples": self.samples, "alpha": self.alpha, "seed": self.seed}
        smoothing = None if self.sigma is None else Smoothing(sigma=self.sigma, **noise)  # type: ignore[arg-type]
        quiet()
        model, task = subject(self.model, source=self.source, data=self.data, loading=self.loading.options())
        material = Material(task, self.tokens)
        if material.tokenizer is not None:
            require_room(model, self.length)
        with bar(self.tokens if material.tokenizer is not None else None, leave=False) as tell:
            found = certify_model(
                model,
                material,
                tokenizer=material.tokenizer,
                norm=self.norm,
                rounding=self.rounding,
                smoothing=smoothing,
                batch=self.batch,
                length=self.length,
                tokens=self.tokens,
                name=self.model,
                progress=lambda done, what: tell(done, f"{self.model}: {what}"),
            )
        return found, material.source


def print_certificates(found: dict[str, Any]) -> None:
    known = [layer for layer in found["layers"] if layer["skipped"] is None]
    if known:
        levels = list(known[0]["share_at"])
        title = f"{found['model']['name']}: {found['tokens']} tokens, {found['how']['norm']}"
        caption = (
            f"Relative radius: of the median token, of the 5th of 100. {', '.join(levels)}: tokens certified to keep their "
            "experts under any move of that share of their length. bf16, fp16: tokens that rounding may send elsewhere."
        )
        shown = slim_table(title, "layer", "kind", "median", "5th", *levels, "bf16", "fp16", caption=caption)
        for layer in known:
            radii = (_figure(layer["relative"][name]) for name in ("50%", "5%"))
            shares = (f"{layer['share_at'][level]:.1%}" for level in levels)
            alarms = (layer["undecided"].get(name) for name in ("bf16", "fp16"))
            rounded = ("" if alarm is None else f"{alarm:.2%}" for alarm in alarms)
            shown.add_row(str(layer["layer"]), layer["kind"], *radii, *shares, *rounded)
        show(shown)
    for layer in found["layers"]:
        if layer["skipped"] is not None:
            print(f"layer {layer['layer']} is not certified: {layer['skipped']}")


def _figure(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2g}"
