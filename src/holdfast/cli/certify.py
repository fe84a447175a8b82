"""`holdfast certify`: print radii up to which no perturbation of a router's input flips a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from holdfast.cli.common import MeasuredData, require_folder, require_free, show, write_out

OF_PREDICTIONS = ("selection", "examples", "radii", "steps")  # options that only predictions have
OF_ROUTES = ("norm", "rounding", "tokens", "length", "batch")


@dataclass(frozen=True)
class Certify(MeasuredData):
    """Certify a model's routing: for every token and layer, print a radius up to which no perturbation of the router's input
    changes the selected experts, and which tokens rounding may flip.

    With --predictions, certify the class that a majority vote under noise gives to each test example, attack this vote, and
    write a page (randomised smoothing). The model may then be the folder of a comparison: all its cells are certified. Run
    the same command again to resume.

    Examples: `holdfast certify comparison/cells/symphony-seed0`, `holdfast certify path/to/olmoe --norm linf --out l.json`,
    `holdfast certify path/to/model --sigma 0.1` (a majority vote under noise, for routers without a certificate),
    `holdfast certify comparison --predictions --sigma 0.25 --samples 10000 --out predictions`
    """

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    norm: Literal["l2", "linf"] = "l2"
    """Norm of perturbations: their Euclidean length, or the largest change of any feature."""
    rounding: Literal["worst", "likely"] = "worst"
    """Rounding error to subtract from the radii: the worst case, or a bound that one case in 10^9 exceeds."""
    outputs: tuple[float, ...] = ()
    """Bound how much the output of each layer changes if its input moves by up to these shares of its length."""
    sigma: float | None = None
    """Standard deviation of the noise of a majority vote. For routes: for routers without a certificate. For predictions: of
    pixels between 0 and 1, or of embeddings, as a multiple of the root mean square of their entries."""
    samples: int = 1000
    """Number of draws of that noise."""
    alpha: float = 0.001
    """The probability that the certificate of a token, or of an example, is wrong."""
    predictions: bool = False
    """Certify the predictions of a classifier of images or texts, not its routes."""
    selection: int = 100
    """Predictions: number of other draws, which choose the class."""
    examples: int = 100
    """Predictions: how many test examples, evenly spaced."""
    radii: tuple[float, ...] = ()
    """Predictions: at which radii (l2, in the unit of sigma) to attack the vote; by default at 0.5, 1, 1.5 and 2 sigma."""
    steps: int = 20
    """Predictions: steps of the attack on the vote; 0 for no attack."""
    out: Path | None = None
    """Write all numbers to this JSON file. With --predictions, the folder for all results, by default predictions."""
    take_over: bool = False
    """Predictions: write into the folder although a process of another host has left its note there; make sure that it has
    ended."""

    def run(self) -> None:
        if self.predictions:
            self._certify_predictions()
            return
        from holdfast.auditing import certify_model
        from holdfast.certificates import Smoothing
        from holdfast.version import versions

        for name in (*OF_PREDICTIONS, "take_over"):
            if getattr(self, name) != getattr(Certify, name):
                raise ValueError(f"--{name.replace('_', '-')} is for predictions; add --predictions to certify them.")
        require_free(self.out, self.force)
        noise = {"samples": self.samples, "alpha": self.alpha, "seed": self.seed}
        smoothing = None if self.sigma is None else Smoothing(sigma=self.sigma, **noise)  # type: ignore[arg-type]
        model, material = self.read_model(self.model)
        names = ("norm", "rounding", "outputs", "batch", "length", "tokens")
        given: dict[str, Any] = {"smoothing": smoothing, **{name: getattr(self, name) for name in names}}
        found = certify_model(model, material, tokenizer=material.tokenizer, name=self.model, **given)
        summary = found.summary()
        print_certificates(summary)
        write_out(self.out, {**summary, "data": material.source, "versions": versions()})
        if found.status == "interrupted":
            print("Interrupted: these are the results of the finished batches.")
            raise KeyboardInterrupt

    def _certify_predictions(self) -> None:
        from holdfast.checked import from_mapping
        from holdfast.locking import take_over
        from holdfast.progress import bar, quiet
        from holdfast.report import write_predictions
        from holdfast.report.export import narrow
        from holdfast.report.prediction_page import accuracy_table, sentences
        from holdfast.train.certified_predictions import certify_models, models_at
        from holdfast.train.prediction_report import PredictionSettings
        from holdfast.train.saved_model import load_model_and_task

        for name in OF_ROUTES:
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"--{name} is for routes, not for predictions, whose radii are in l2.")
        if self.sigma is None:
            raise ValueError("--predictions needs --sigma, the standard deviation of the noise: there is no usual one.")
        given = {name: getattr(self, name) for name in ("sigma", "samples", "alpha", "seed", *OF_PREDICTIONS)}
        settings: PredictionSettings = from_mapping(PredictionSettings, {**given, "radii": list(self.radii)})
        out = self.out or Path("predictions")
        require_folder(out)
        if self.take_over:
            take_over(out)
        models = models_at(self.model)
        quiet()
        where: dict[str, Any] = {"source": self.source, "data": self.data, "class_index": self.class_index}

        def load(path: str) -> tuple[Any, Any]:
            return load_model_and_task(path, **where, loading=self.loading.options())

        same = {
            "source": self.source,
            "class_index": self.class_index and str(self.class_index),
            "dtype": self.loading.dtype,
        }
        try:
            with bar(len(models) * settings.examples, leave=False) as tell:
                report = certify_models(models, settings, out, load, tell, **same)
        except KeyboardInterrupt:
            print(f"Interrupted: the finished examples are in {out}; the same command goes on after them.")
            raise
        show(narrow(accuracy_table(report)))
        for path, reason in report.skipped.items():
            print(f"{path} was skipped: {reason}")
        print("\n".join(sentences(report)))
        print(f"All numbers: {out / report.file_name}")
        print(f"Report: {write_predictions(report, (out / report.file_name).with_suffix('.html'), force=True)}")


def print_certificates(found: dict[str, Any]) -> None:
    """Print the certificates of each layer as a table, and why layers were skipped."""
    from holdfast.report.page_shell import percent
    from holdfast.report.tables import Table

    certified = [layer for layer in found["layers"] if layer["skipped"] is None]
    rows = [
        {
            "layer": layer["layer"],
            "kind": layer["kind"],
            "median": _radius(layer["relative"]["50%"]),
            "5%": _radius(layer["relative"]["5%"]),
            **_shares(layer),
            **{dtype: percent(share) for dtype, share in layer["undecided"].items()},
        }
        for layer in certified
    ]
    if rows:
        levels = ", ".join(certified[0]["share_at"])
        note = (
            f"median, 5%: quantiles of the relative radius. {levels}: share of tokens certified to keep their experts under "
            "any perturbation of that share of their norm. bf16, fp16: share of undecided tokens, which rounding may flip."
        )
        show(Table.of(f"{found['model']['name']}: {found['tokens']} tokens, {found['how']['norm']}", rows, note))
    _print_outputs(found)
    for layer in found["layers"]:
        if layer["skipped"] is not None:
            print(f"layer {layer['layer']} is not certified: {layer['skipped']}")


def _print_outputs(found: dict[str, Any]) -> None:
    """Print how much the output of each layer can change, if that was asked for."""
    from holdfast.report.tables import Table

    bounded = [(layer, row) for layer in found["layers"] for row in layer.get("outputs", {}).get("radii", [])]
    rows = [
        {
            "layer": layer["layer"],
            "radius": f"{row['radius']:g}",
            "change": _radius(row["relative_change"]),
            "weights": f"{row['weight_change']:.2g}",
            "experts": row["experts"],
            **_shares(row),
        }
        for layer, row in bounded
    ]
    if rows:
        levels = ", ".join(bounded[0][1]["share_at"])
        note = (
            "An upper bound of the change of a layer's output if its input moves by up to radius times its own length in "
            "l2. Medians over tokens: change, the bound over the output's length; weights, the part of the weights that can "
            f"move; experts, those that can be in use. {levels}: share of tokens whose output changes by at most that share "
            "of its length."
        )
        show(Table.of("layer outputs", rows, note))
    for layer in found["layers"]:
        if layer.get("outputs", {}).get("skipped") is not None:
            print(f"the output of layer {layer['layer']} is not bounded: {layer['outputs']['skipped']}")


def _shares(found: dict[str, Any]) -> dict[str, str]:
    return {level: f"{share:.1%}" for level, share in found["share_at"].items()}


def _radius(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2g}"
