"""`holdfast certify`: print radii up to which no perturbation of a router's input flips a token."""

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
    """Certify a model's routing: for every token and layer, print a radius up to which no perturbation of the router's input
    changes the selected experts, and which tokens rounding may flip.

    Examples: `holdfast certify comparison/cells/symphony-seed0`, `holdfast certify path/to/olmoe --norm linf --out l.json`,
    `holdfast certify path/to/model --sigma 0.1` (a majority vote under noise, for routers without a certificate)
    """

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    source: str | None = None
    """Use this text or image set instead of the one the model was trained on: a name or a path."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    class_index: Path | None = None
    """For folders of images that are named by WordNet id, if the model's classes have names: ImageNet's folder of class
    folders, LOC_synset_mapping.txt or imagenet_class_index.json."""
    tokens: int = 4096
    """How many tokens of the text to read, rounded to whole batches."""
    length: int = 128
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per batch."""
    norm: Literal["l2", "linf"] = "l2"
    """Norm of perturbations: their Euclidean length, or the largest change of any feature."""
    rounding: Literal["worst", "likely"] = "worst"
    """Rounding error to subtract from the radii: the worst case, or a bound that one case in 10^9 exceeds."""
    sigma: float | None = None
    """Standard deviation of the noise of a majority vote, for routers without a certificate."""
    samples: int = 1000
    """Number of draws of that noise."""
    alpha: float = 0.001
    """The probability that a token's certificate from that vote is wrong."""
    seed: int = 0
    """Seed of that noise."""
    out: Path | None = None
    """Write all numbers to this JSON file."""
    force: bool = False
    """Overwrite that file if it exists."""
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
            print("Interrupted: these are the results of the finished batches.")
            raise KeyboardInterrupt

    def _certify(self) -> tuple[ModelCertificates, dict[str, Any]]:
        from holdfast.auditing import certify_model
        from holdfast.certificates import Smoothing
        from holdfast.hub.tracing import require_positions
        from holdfast.train.saved_model import AuditData, load_model_and_task
        from holdfast.train.training import quiet

        noise = {"samples": self.samples, "alpha": self.alpha, "seed": self.seed}
        smoothing = None if self.sigma is None else Smoothing(sigma=self.sigma, **noise)  # type: ignore[arg-type]
        quiet()
        where: dict[str, Any] = {"source": self.source, "data": self.data, "class_index": self.class_index}
        model, task = load_model_and_task(self.model, **where, loading=self.loading.options())
        material = AuditData(task, self.tokens)
        if material.tokenizer is not None:
            require_positions(model, self.length)
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
    """Print the certificates of each layer as a table, and why layers were skipped."""
    known = [layer for layer in found["layers"] if layer["skipped"] is None]
    if known:
        levels = list(known[0]["share_at"])
        title = f"{found['model']['name']}: {found['tokens']} tokens, {found['how']['norm']}"
        caption = (
            f"median, 5%: quantiles of the relative radius. {', '.join(levels)}: share of tokens certified to keep their "
            "experts under any perturbation of that share of their norm. bf16, fp16: share of undecided tokens, which "
            "rounding may flip."
        )
        shown = slim_table(title, "layer", "kind", "median", "5%", *levels, "bf16", "fp16", caption=caption)
        for layer in known:
            radii = (_radius(layer["relative"][name]) for name in ("50%", "5%"))
            shares = (f"{layer['share_at'][level]:.1%}" for level in levels)
            alarms = (layer["undecided"].get(name) for name in ("bf16", "fp16"))
            rounded = ("" if alarm is None else f"{alarm:.2%}" for alarm in alarms)
            shown.add_row(str(layer["layer"]), layer["kind"], *radii, *shares, *rounded)
        show(shown)
    for layer in found["layers"]:
        if layer["skipped"] is not None:
            print(f"layer {layer['layer']} is not certified: {layer['skipped']}")


def _radius(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2g}"
