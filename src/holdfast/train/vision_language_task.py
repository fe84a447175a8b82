"""Pictures with questions: dialogues to learn, and questions to answer, clean and with corrupted pictures.

The metric is the error in percent of the answers by likelihood (`question_scoring`): 100 (1 - right / questions). Beside it
stand three others, of which the first two say what the error would be without seeing:

    answer prior        the error of the most frequent answer of each kind of question (`data.questions`)
    without pictures    the error of the same model where every picture is uniformly grey, the middle of the pixel range
    by generation       the error of greedy answers

A test that differs on purpose from the training data, such as the held-out combinations of `scenes`, and every set of
questions of `data.tests` after the first, is a shifted test. The attack of a comparison is the common corruptions.

**Stages** (`stages`, section `stages` of a recipe) make the dense model of a recipe that starts from nothing:

    vision      the vision tower and two linear heads learn which shape and which colour is in each patch of a drawn scene:
                the sum of the two cross entropies. The heads are thrown away
    language    the language model learns the next token of the dialogues, without their pictures
    captions    the connector and the language model learn to name what is in each cell of a drawn scene
    connector   the connector learns the answers; the tower and the language model are frozen

Then the model is upcycled, and all of it learns the answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from holdfast.attacks import CORRUPTIONS, corrupt, misspell
from holdfast.data import Document, PixelScaling, QuestionSet, Tokenizer, question_set
from holdfast.data.documents import Corpus
from holdfast.data.encoded_texts import IGNORED, QuestionEncoder, Row
from holdfast.data.images import Images
from holdfast.data.question_files import read_tests
from holdfast.data.questions import PICTURE, Question, cell_targets, prior_error
from holdfast.data.tokenizers import saved_tokenizer, token_texts
from holdfast.errors import unknown_name
from holdfast.hub import has_routers
from holdfast.hub.tracing import layers_of_images, require_positions
from holdfast.metrics.token_routes import Example, View, tokens_to_show
from holdfast.train.image_attacks import ATTACK_SEED, FROST, Corrupted, error_of, per_image
from holdfast.train.image_reading import written_processor
from holdfast.train.modality_routes import ModalityRoutes
from holdfast.train.question_scoring import (
    Asked,
    Pictures,
    chosen_by_likelihood,
    encode,
    generate,
    log_likelihoods,
    right_options,
    with_pictures,
    wrong_by_generation,
    wrong_by_likelihood,
)
from holdfast.train.recipe import Recipe, StagePart
from holdfast.train.snapshots import Changed, record_routes, shown_routes
from holdfast.train.start import padding_token, start_model, start_scaling
from holdfast.train.task import (
    Examples,
    HeldOut,
    Inputs,
    Measure,
    Stage,
    Task,
    evaluating,
    evenly_spaced,
    without_attack_warnings,
)
from holdfast.train.text_task import recipe_tokenizer

HEAD = "vision-language"
CONVERTED = ("rope_theta", "vision_use_head")  # entries that transformers reads, and not every config has
PARTS = {"vision": "vision_tower", "connector": "multi_modal_projector", "language": "language_model"}  # modules of LLaVA
VALIDATION = 512  # dialogues at most
PROBE, VIEW, AUDIT, AUDIT_BATCH = 16, 4, 64, 16  # questions
VIEWED = "fog"  # the corruption whose routes the Explorer shows
STAGES = {  # and the parts that they train
    "vision": ("vision",),
    "language": ("language",),
    "captions": ("connector", "language"),
    "connector": ("connector",),
}
PRIOR, BLIND, GENERATED = "error of the answer prior, %", "error without pictures, %", "error by generation, %"
ABOUT = {
    PRIOR: "error of the most frequent answer of each kind of question",
    BLIND: "error of the same model where every picture is grey",
    GENERATED: "error of greedy answers",
}


@final
class VisionLanguageTask(Task):
    """The pictures and questions of a recipe.

    folder    where named sources are searched for
    known     an existing tokeniser to use instead of making one
    scaling   how the model reads pixels; by default that of the recipe's checkpoint
    tested    questions that a trained model is scored on, in place of the recipe's source and tests
    model     the trained model that is scored; None: the recipe's is trained
    """

    scaling: PixelScaling
    not_images = "this model answers questions; `holdfast evaluate` corrupts its pictures: use fgsm, pgd or routes"
    not_texts = "this model answers questions about pictures: use fgsm, pgd or routes"
    faster = "To make it shorter, set training.steps, training.batch or data.length to less, or use a smaller model."

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None = None,
        *,
        known: Tokenizer | None = None,
        scaling: PixelScaling | None = None,
        tested: QuestionSet | None = None,
        model: Any = None,
    ) -> None:
        self.recipe = recipe
        if recipe.metrics:
            raise ValueError(f"metrics: {', '.join(recipe.metrics)} is of classes or tokens, and this task has questions.")
        if recipe.training.label_smoothing:
            raise ValueError("training.label_smoothing is for classes, and this task learns answers of tokens: set it to 0.")
        found = tested or question_set(recipe.data.source, folder=folder, size=recipe.data.size, count=recipe.data.pictures)
        if tested is None and recipe.data.tests:
            size = found.dialogues("train").pictures.shape[-1]
            found = found.with_tests(read_tests(recipe.data.tests, size))
        self.source = self.question_set = _checked(found)
        self.scaling = start_scaling(recipe.model) if scaling is None else scaling
        self.tokenizer: Tokenizer = known or recipe_tokenizer(recipe, self._training_texts)
        self._trained = model
        self.stage: str | None = None  # the stage that `examples` are for; None: the experts
        self._corrupted: Corrupted | None = None  # the same for all models

    def _training_texts(self) -> Corpus:
        train = self.question_set.dialogues("train")
        said = (
            f"USER: {text.replace(PICTURE, '')} ASSISTANT: {answer}\n"
            for one in (*train.dialogues, *train.captions)
            for text, answer in one.turns
        )
        # Options are shown with letters: all letters and options are words of some training question.
        return Corpus("dialogues", "", {"train": [Document("dialogues", "".join(said).encode("utf-8", "replace"))]})

    @property
    def pictures(self) -> Images:
        """The pictures of the main test, which have the size of all others."""
        return self.question_set.tests["test"].pictures

    @cached_property
    def _shape(self) -> Any:
        """A model of the recipe's sizes, whose weights are not read."""
        with torch.device("meta"):
            return self._trained or self._new_model()

    @cached_property
    def encoder(self) -> QuestionEncoder:
        pad, picture = padding_token(self.tokenizer), int(self._shape.config.image_token_id)
        return QuestionEncoder(self.tokenizer, self._end, picture, patch_tokens(self._shape), pad)

    @property
    def _end(self) -> int:
        """The token after an answer."""
        return padding_token(self.tokenizer) if self.tokenizer.end is None else self.tokenizer.end

    def preprocessor(self) -> Any:
        """Return a processor of pictures and texts; without a token for pictures, a tokeniser, or None as in other tasks."""
        from transformers import LlavaProcessor

        texts = saved_tokenizer(self.tokenizer, PICTURE)
        if texts is None or len(texts) <= self.encoder.picture:
            return texts
        config, shape = self._shape.config, self.pictures.shape
        patch, strategy = config.vision_config.patch_size, config.vision_feature_select_strategy
        return LlavaProcessor(
            written_processor(self.scaling, shape),
            texts,
            patch_size=patch,
            vision_feature_select_strategy=strategy,
            image_token=texts.convert_ids_to_tokens(self.encoder.picture),
            num_additional_image_tokens=self.encoder.patches + (strategy == "default") - (shape[-1] // patch) ** 2,
        )

    def _new_model(self) -> Any:
        part, size = self.recipe.model, self.pictures.shape[-1]
        if part.checkpoint is not None:
            model = start_model(part, HEAD, vocab_size=len(self.tokenizer))
            if getattr(model.config, "model_type", None) != "llava":
                raise ValueError(f"{part.checkpoint} is a {model.config.model_type} model; this task trains llava models.")
        else:
            # One more token than the tokeniser has: that of pictures.
            texts = {"vocab_size": len(self.tokenizer) + 1, "eos_token_id": self._end}
            given = {"text_config": texts, "vision_config": {"image_size": size}}
            own = _required(part.config)
            part = replace(part, config={**own, **{name: {**sizes, **own[name]} for name, sizes in given.items()}})
            if part.family != "llava":
                raise ValueError(f"model.family is {part.family}; the task vision-language trains llava models.")
            is_clip = part.config["vision_config"].get("model_type", "").startswith("clip")
            usual = {"vision_feature_select_strategy": "default" if is_clip else "full"}
            model = start_model(part, HEAD, image_token_index=len(self.tokenizer), **usual)
        own = model.config.vision_config.image_size
        if own != size:
            raise ValueError(
                f"the model reads pictures of {own} pixels per side, and these have {size}; set data.size to {own}."
            )
        return model

    def initial_model(self) -> Any:
        model = self._new_model()
        length, patches = max(self.width, self.longest_question), self.encoder.patches
        can_help = self.recipe.model.checkpoint is None and 2 * patches > length  # a checkpoint decides on its own size
        hint = f"; {patches} of these tokens are of a picture: set data.size to less" if can_help else ""
        require_positions(model, length, hint)
        if self.start is not None and torch.get_default_device().type != "meta":
            model.load_state_dict(self.start)
        return model

    @property
    def measure(self) -> Measure:
        severities = ", ".join(map(str, self.recipe.attack.severities))
        plural = "ies" if len(self.recipe.attack.severities) > 1 else "y"
        long = "share of test questions that are answered wrongly, by likelihood, in percent"
        return Measure("error, %", long, f"common corruptions of the pictures, severit{plural} {severities}")

    @property
    def other_metrics(self) -> list[dict[str, str]]:
        return [{"name": name, "about": about, "better": "lower"} for name, about in ABOUT.items()]

    def describe(self) -> dict[str, Any]:
        part, count = self.recipe.attack, len(self.question_set.tests["test"].questions)
        how = {"attack": "corruptions", "severities": part.severities, "seed": ATTACK_SEED}
        return {"data": self.question_set.describe(), "attack": {**how, "examples": min(count, self._corrupted_count)}}

    @property
    def _corrupted_count(self) -> int:
        return self.recipe.attack.corrupted_examples or self.recipe.attack.examples

    def state(self) -> dict[str, Any]:
        scaling = {} if self.scaling == PixelScaling() else {"scaling": asdict(self.scaling)}
        return {"tokenizer": self.tokenizer.describe(), "checksum": self.question_set.checksum, **scaling}

    # Training

    @cached_property
    def training(self) -> list[tuple[Row, list[bool]]]:
        """The tokens of the training dialogues, and which of them are learned."""
        return self._encoded("train")

    def _encoded(self, split: str) -> list[tuple[Row, list[bool]]]:
        dialogues, length = self.question_set.dialogues(split).dialogues, self.recipe.data.length
        found = [self.encoder.dialogue(one, length) for one in dialogues]
        if not any(any(learned) for _, learned in found):
            raise ValueError(
                f"data.length is {length}, and no dialogue has an answer within so many tokens; set it to more."
            )
        return found

    @cached_property
    def width(self) -> int:
        """The number of tokens of training batches, with those of a picture: one for all, so that a step can be captured."""
        return max(self.encoder.width(row) for row, _ in self.training) if self.question_set.splits else self.encoder.patches

    @cached_property
    def text_width(self) -> int:
        """The number of tokens of training batches without pictures."""
        return max(len(row) - row.count(self.encoder.picture) for row, _ in self.training)

    @cached_property
    def longest_question(self) -> int:
        """The number of tokens of the longest test question with an option, with those of its picture."""
        asked = [one for some in self.asked.values() for one in some]
        return max(self.encoder.width(one.row) + max(map(len, one.options)) for one in asked)

    def token_counts(self) -> Tensor:
        encoder = self.encoder
        tokens = torch.tensor([token for row, _ in self.training for token in row])
        counts = torch.bincount(tokens, minlength=max(len(self.tokenizer), encoder.picture) + 1)
        counts[encoder.picture] *= encoder.patches
        return counts

    def stages(self) -> list[Stage]:
        parts: dict[str, StagePart | None] = {name: getattr(self.recipe.stages, name) for name in STAGES}
        return [self._stage(name, part) for name, part in parts.items() if part is not None]

    def _stage(self, name: str, part: StagePart) -> Stage:
        task = self.with_recipe(replace(self.recipe, training=part.training(self.recipe.training)))
        task.stage = name
        prepare: Callable[[Any], AbstractContextManager[None]] = partial(only_parts, parts=STAGES[name])
        if name in ("vision", "captions"):
            if self.question_set.dialogues("train").cells is None:
                raise ValueError(
                    f"stages.{name} learns what is in each cell of scenes, which {self.question_set.name} does not say: "
                    "use data.source=scenes, or a checkpoint without this stage."
                )
            prepare = seeing_cells if name == "vision" else prepare
        return Stage(name, task, prepare)

    def examples(self, seed: int) -> Examples:
        numbers = self._numbers()
        own = {"language": self._texts, "vision": self._cells, "captions": self._captions}
        read = own.get(str(self.stage), partial(self._inputs, "train", self.training, width=self.width))
        return self._examples(len(numbers), seed, lambda chosen: read(numbers[chosen]))

    def _numbers(self) -> Tensor:
        """Return the numbers of the training dialogues that the stage learns from; others have no gradient."""
        rows = range(len(self.training))
        if self.stage in ("vision", "language", "captions"):
            return torch.tensor(rows, device="cpu")
        found = [number for number in rows if any(self.training[number][1])]
        if self.stage == "connector":
            found = [number for number in found if self.encoder.picture in self.training[number][0]]
            if not found:
                raise ValueError(
                    f"stages.connector learns from pictures, and no dialogue has one and an answer within data.length of "
                    f"{self.recipe.data.length} tokens; set it to more, or leave out the stage."
                )
        return torch.tensor(found, device="cpu")

    def _inputs(
        self, split: str, encoded: Sequence[tuple[Row, list[bool]]], numbers: Tensor, width: int | None = None
    ) -> Inputs:
        some = numbers.tolist()
        part, rows = self.question_set.dialogues(split), [encoded[number] for number in some]
        inputs = self.encoder.batch([row for row, _ in rows], width, [learned for _, learned in rows])
        # A picture that stands after the first `data.length` tokens is cut off.
        shown = [part.dialogues[number].picture if self.encoder.picture in encoded[number][0] else None for number in some]
        return with_pictures(inputs, shown, self._read(part.pictures))

    def _texts(self, numbers: Tensor) -> Inputs:
        """Return training dialogues without their pictures; every token is learned."""
        rows = [self.training[number][0] for number in numbers.tolist()]
        rows = [[token for token in row if token != self.encoder.picture] for row in rows]
        inputs = self.encoder.batch(rows, self.text_width)
        labels = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], IGNORED)
        return {**inputs, "labels": labels}

    def _captions(self, numbers: Tensor) -> Inputs:
        """Return pictures with what is in each of their cells, in words. All captions have the same number of words."""
        part = self.question_set.dialogues("train")
        some = [part.captions[number] for number in numbers.tolist()]
        rows, learned = zip(*(self.encoder.dialogue(one) for one in some), strict=True)
        inputs = self.encoder.batch(rows, learned=learned)
        return with_pictures(inputs, [one.picture for one in some], self._read(part.pictures))

    def _cells(self, numbers: Tensor) -> Inputs:
        """Return training pictures with what is in each patch."""
        part = self.question_set.dialogues("train")
        assert part.cells is not None
        shown = [part.dialogues[number].picture for number in numbers.tolist()]
        side = round(self.encoder.patches**0.5)
        return {"pixel_values": self._read(part.pictures)(shown), "labels": cell_targets(part.cells[shown], side)}

    def _read(self, pictures: Images) -> Pictures:
        return lambda numbers: self.scaling(pictures.pixels(list(numbers)))

    def validation(self) -> Dataset[Inputs]:
        encoded = self._encoded("valid")
        learned = [number for number, (_, some) in enumerate(encoded) if any(some)]
        numbers = [learned[place] for place in evenly_spaced(len(learned), VALIDATION)]
        return HeldOut(numbers, partial(self._inputs, "valid", encoded))

    # Scores

    @cached_property
    def asked(self) -> dict[str, list[Asked]]:
        """The questions of every test as token ids."""
        return {name: encode(test.questions, self.encoder) for name, test in self.question_set.tests.items()}

    def score(self, model: Any) -> dict[str, Any]:
        test, asked, encoder = self.question_set.tests["test"], self.asked["test"], self.encoder
        pictures = self._read(test.pictures)
        with evaluating(model) as measured:
            wrong = wrong_by_likelihood(log_likelihoods(model, asked, pictures, encoder), asked)
        with evaluating(model, routing=False):
            blind = wrong_by_likelihood(log_likelihoods(model, asked, self._grey, encoder), asked)
            generated = wrong_by_generation(generate(model, asked, pictures, encoder), asked, encoder)
            shifts = {name: self._score_of(model, name) for name in self.question_set.tests if name != "test"}
        with evaluating(model) as under_corruption:
            trial = self._corruptions(model)
        with evaluating(model, routing=False):
            trials = {"corruptions": trial, "reworded questions": self._reworded(model)}
            modalities = self._modalities(model)
        kinds = {
            kind: error_of(wrong[[one.kind == kind for one in test.questions]])
            for kind in dict.fromkeys(one.kind for one in test.questions)
        }
        metrics = {PRIOR: prior_error(test.questions), BLIND: error_of(blind), GENERATED: error_of(generated)}
        clean = {"figure": error_of(wrong), "examples": len(asked), "per_example": per_image(wrong), "kinds": kinds}
        found = {"clean": {**clean, "metrics": metrics, "without_pictures": per_image(blind), **measured}}
        attacked = {**trial, **under_corruption}
        found["clean"] |= {"modalities": modalities} if modalities else {}
        return {**found, "attacked": attacked, "trials": trials, **({"shifts": shifts} if shifts else {})}

    def _grey(self, numbers: Sequence[int]) -> Tensor:
        """Return grey pictures, the middle of the range of pixels."""
        return self.scaling(torch.full((len(numbers), *self.pictures.shape), 0.5))

    def _score_of(self, model: Any, name: str) -> dict[str, Any]:
        test, asked = self.question_set.tests[name], self.asked[name]
        scores = log_likelihoods(model, asked, self._read(test.pictures), self.encoder)
        wrong = wrong_by_likelihood(scores, asked)
        found = {"figure": error_of(wrong), "measure": "error, %", "better": "lower", "examples": len(asked)}
        return {**found, "prior": prior_error(test.questions), "per_example": per_image(wrong)}

    def seeing(self, count: int) -> list[int]:
        """Return the numbers of some test questions that have a picture, evenly spaced."""
        seeing = [number for number, one in enumerate(self.asked["test"]) if one.picture is not None]
        return [seeing[place] for place in evenly_spaced(len(seeing), count)]

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        """Return the pictures of these test questions, which all have one."""
        shown = [self.asked["test"][number].picture for number in numbers]
        return self.pictures.pixels([one for one in shown if one is not None])

    def _corruptions(self, model: Any) -> dict[str, Any]:
        """Return the mean error over corruptions and severities, the error by corruption, and the share of other answers."""
        encoder, asked = self.encoder, [self.asked["test"][number] for number in self.seeing(self._corrupted_count)]
        places = [replace(one, picture=place) for place, one in enumerate(asked)]  # among the corrupted pictures
        corrupted = self._corrupted_pictures()

        def answers(pixels: Tensor) -> Tensor:
            pictures = lambda numbers: self.scaling(pixels[list(numbers)])  # noqa: E731
            return chosen_by_likelihood(log_likelihoods(model, places, pictures, encoder))

        severities, right = sorted(set(self.recipe.attack.severities)), right_options(asked)
        found = {(name, one): answers(corrupted.images(name, one)) for name in CORRUPTIONS for one in severities}
        each = {name: fmean(error_of(found[name, one] != right) for one in severities) for name in CORRUPTIONS}
        every, clean = torch.stack(list(found.values())), answers(corrupted.pixels)
        counted = {"figure": fmean(each.values()), "clean": error_of(clean != right), "examples": len(asked)}
        how = {"severities": severities, "note": FROST, "predictions_changed": float((every != clean).double().mean())}
        return {**counted, **how, "each": each, "per_example": per_image((every != right).double().mean(0))}

    def _corrupted_pictures(self) -> Corrupted:
        """Return the pictures of the questions that are asked with corrupted pictures, in their order."""
        if self._corrupted is None:
            self._corrupted = Corrupted(self.pixels(self.seeing(self._corrupted_count)))
        return self._corrupted

    def _reworded(self, model: Any) -> dict[str, Any]:
        """Return the error on reworded questions, and how answers change; those that are asked with corrupted pictures."""
        test, numbers = self.question_set.tests["test"], self.seeing(self._corrupted_count)
        asked, pictures = [self.asked["test"][number] for number in numbers], self._read(test.pictures)
        reworded = encode(reword([test.questions[number] for number in numbers]), self.encoder, numbers)
        before, after = (
            chosen_by_likelihood(log_likelihoods(model, each, pictures, self.encoder)) for each in (asked, reworded)
        )
        right = right_options(asked)
        wrong, changed = after != right, float((after != before).double().mean())
        counted = {"figure": error_of(wrong), "clean": error_of(before != right), "examples": len(asked)}
        return {**counted, "predictions_changed": changed, "per_example": per_image(wrong)}

    def _modalities(self, model: Any) -> list[dict[str, Any]]:
        """Return how tokens of images and texts are routed, layer by layer; empty for a dense model."""
        if not has_routers(model):
            return []
        found, corrupted = ModalityRoutes(model, self.encoder.picture), self._corrupted_pictures()
        test, numbers = self.question_set.tests["test"], self.seeing(self._corrupted_count)
        places = evenly_spaced(len(numbers), AUDIT)  # among the corrupted pictures
        views = [(name, severity) for name in CORRUPTIONS for severity in sorted(set(self.recipe.attack.severities))]
        for start in range(0, len(places), AUDIT_BATCH):
            some = places[start : start + AUDIT_BATCH]
            own = [numbers[place] for place in some]
            questions, seen = [test.questions[number] for number in own], self.scaling(corrupted.pixels[some])
            clean, reworded = (
                {**self.encoder.batch([one.row for one in encode(each, self.encoder, own)]), "pixel_values": seen}
                for each in (questions, reword(questions))
            )
            changed = ({**clean, "pixel_values": self.scaling(corrupted.images(*view)[some])} for view in views)
            found.add(clean, changed, reworded)
        return found.result()

    # Instruments

    def probe(self) -> Inputs:
        return self._few(PROBE)

    def _few(self, count: int) -> Inputs:
        some = [self.asked["test"][number] for number in self.seeing(count)]
        rows = self.encoder.batch([one.row for one in some])
        return with_pictures(rows, [one.picture for one in some], self._read(self.pictures))

    def audit_inputs(self, tokens: int) -> Iterator[Inputs]:
        every = self._few(AUDIT)
        for start in range(0, len(every["input_ids"]), AUDIT_BATCH):
            yield {name: tensor[start : start + AUDIT_BATCH] for name, tensor in every.items()}

    def view(self, model: Any) -> View:
        """Return a few questions with the routes of their tokens; a patch is ▦. Layers of the tower route patches only."""
        inputs, of_images = self._few(VIEW), layers_of_images(model)
        recorded = record_routes(model, inputs)
        ids, width, count = inputs["input_ids"].flatten(), inputs["input_ids"].shape[1], len(inputs["input_ids"])
        rows = inputs["attention_mask"].flatten().nonzero().flatten()[: tokens_to_show(len(recorded.routings))]
        is_patch = ids == self.encoder.picture
        patch = torch.where(is_patch, is_patch.cumsum(0) - 1, -1)  # its number among the patches of all pictures
        found = []
        for layer, routing in enumerate(recorded.routings):
            before = len(routing.experts) // count - self.encoder.patches  # tokens before the patches, such as CLIP's first
            shift = (1 + patch // self.encoder.patches) * before
            found.append(torch.where(patch < 0, -1, patch + shift)[rows] if layer in of_images else rows)
        examples = []
        for number in (rows // width).unique().tolist():
            own = ids[rows[rows // width == number]]
            texts = iter(token_texts(self.tokenizer.decode, own[own != self.encoder.picture].tolist()))
            examples.append(Example(["▦" if token == self.encoder.picture else next(texts) for token in own.tolist()]))
        severity, pixels = max(self.recipe.attack.severities), self.pixels(self.seeing(count))
        other = {"pixel_values": self.scaling(corrupt(pixels, VIEWED, severity=severity, seed=ATTACK_SEED).images)}
        changed = Changed(f"{VIEWED} of severity {severity} on each picture", {**inputs, **other})
        return View(examples, shown_routes(model, inputs, recorded, found, {"corruption": changed}))

    def size_line(self, model: Any) -> str | None:
        return f"{self.width} tokens per dialogue, {self.encoder.patches} of them of its picture"


def reword(questions: Sequence[Question]) -> list[Question]:
    """Return questions in other words: those that their source has, or else with a typo in each word that may have one."""
    with without_attack_warnings():  # a question may have no such word
        misspelt = misspell([one.text for one in questions], rate=1.0, seed=ATTACK_SEED).texts
    return [replace(one, text=one.reworded or other) for one, other in zip(questions, misspelt, strict=True)]


def _checked(found: QuestionSet) -> QuestionSet:
    """Return a set of questions; raise ValueError unless every question of its tests can be scored."""
    if "test" not in found.tests:
        raise ValueError(
            f"{found.name} has dialogues and no questions to score: add data.tests=[LAYOUT=PATH], such as pope=pope.json."
        )
    trained = [one.picture for one in found.splits["train"].dialogues] if found.splits else [0]
    for where, pictures in (
        ("training dialogues", trained),
        ("questions of the main test", [one.picture for one in found.tests["test"].questions]),
    ):
        if all(picture is None for picture in pictures):
            raise ValueError(f"the {where} of {found.name} have no picture; this task needs some with a picture.")
    for name, test in found.tests.items():
        for number, one in enumerate(test.questions):
            if one.answer not in one.options:
                raise ValueError(f"{found.name}, {name}: question {number} has an answer that is not one of its options.")
    return found


def _required(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a new model, checked: transformers would keep an unknown entry, and ignore it."""
    import transformers

    for name in ("vision_config", "text_config"):
        inner = config.get(name)
        if not isinstance(inner, dict) or inner.get("model_type") not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"model.config.{name}.model_type is missing or unknown; name a family, such as siglip_vision_model or llama."
            )
        usual = transformers.AutoConfig.for_model(inner["model_type"])
        for key in inner:
            if not hasattr(usual, key) and key not in CONVERTED:
                raise ValueError(f"model.config.{name}.{key}: {unknown_name('entry', key, usual.to_dict())}")
    return dict(config)


def patch_tokens(model: Any) -> int:
    """Return how many tokens a LLaVA model has for a picture."""
    tower = model.model.vision_tower
    positions = next(module.num_positions for module in tower.modules() if hasattr(module, "num_positions"))
    return int(positions) - (model.config.vision_feature_select_strategy == "default")


@contextmanager
def only_parts(model: Any, parts: Sequence[str]) -> Iterator[None]:
    """Inside the `with`, only some parts of a LLaVA model are trained; the head belongs to the language model."""
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        own = next((key for key, place in PARTS.items() if f"{place}." in name), "language")
        parameter.requires_grad_(own in parts)
    yield
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before[name])


@contextmanager
def seeing_cells(model: Any) -> Iterator[None]:
    """Inside the `with`, the forward of a LLaVA model returns the loss of telling what is in each patch of a picture."""
    from holdfast.data.scenes import COLOURS, SHAPES

    width, kinds = model.config.vision_config.hidden_size, (1 + len(SHAPES), 1 + len(COLOURS))
    plain, accepts = model.forward, getattr(model, "accepts_loss_kwargs", None)
    with only_parts(model, STAGES["vision"]):
        model.scene_heads = nn.Linear(width, sum(kinds)).to(model.device)

        def forward(self: Any, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            states = self.model.vision_tower(pixel_values, output_hidden_states=True).hidden_states
            patches = states[self.config.vision_feature_layer]
            if self.config.vision_feature_select_strategy == "default":
                patches = patches[:, 1:]
            shapes, colours = self.scene_heads(patches).float().split(kinds, -1)
            terms = (cross_entropy(one.flatten(0, 1), labels[..., at].flatten()) for at, one in enumerate((shapes, colours)))
            return {"loss": sum(terms)}  # type: ignore[dict-item]

        model.forward, model.accepts_loss_kwargs = MethodType(forward, model), False
        yield
        model.forward, model.accepts_loss_kwargs = plain, accepts
        del model.scene_heads
    if accepts is None:
        del model.accepts_loss_kwargs
    del model.forward
