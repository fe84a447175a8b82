"""The table of images and texts, of vision-language models."""

from report.stored import by_column, parse, stored

from holdfast.report import render
from holdfast.report.comparison_tables import MODALITY_COLUMNS, modalities_table


def test_the_table_has_means_over_layers_that_have_such_tokens_and_over_seeds() -> None:
    content = stored(["smoe", "smooth"], seeds=2)
    for cell in content["cells"]:
        own = 0.1 * cell["seed"] + (0.2 if cell["router"] == "smooth" else 0.0)
        tower = {"name": "tower", "overlap": None, "one_modality": None, "image_corrupted": 0.5 + own}
        words = {
            "name": "words",
            "overlap": 0.25 + own,
            "one_modality": 0.125,
            "image_corrupted": 0.1,
            "text_corrupted": own,
        }
        cell["clean"]["modalities"] = [tower, {**words, "image_reworded": 0.0, "text_reworded": 0.3}]
    results = parse(content)
    first, second = by_column(modalities_table(results))
    assert list(first)[1:] == list(MODALITY_COLUMNS) and second["router"] == "smooth"
    assert list(first.values())[1:] == ["30.00%", "12.50%", "32.50%", "5.00%", "0.00%", "30.00%"]
    assert list(second.values())[1:] == ["50.00%", "12.50%", "42.50%", "25.00%", "0.00%", "30.00%"]
    assert "Images and texts" in render(results)


def test_other_tasks_have_no_table_of_images_and_texts() -> None:
    results = parse(stored())
    assert modalities_table(results).rows == [] and "Images and texts" not in render(results)
