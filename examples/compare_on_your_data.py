"""Compare routers on a text of yours: train each with several seeds from equal weights, attack it, print a table.

    python examples/compare_on_your_data.py TEXTS --routers smoe,symphony,smooth --out comparison

TEXTS is a .txt file, a folder of them or a table. docs/tutorials/compare-routers.md explains what is printed.
"""

import argparse

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", help="a .txt file, a folder of them, or a .csv, .tsv or .jsonl file with a column `text`")
    parser.add_argument("--routers", default="smoe,symphony,smooth", help="names with commas; the first is the baseline")
    parser.add_argument("--recipe", default="tiny", help="a shipped recipe or a .yaml file (tiny)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each router (3)")
    parser.add_argument("--steps", type=int, help="training steps; those of the recipe by default")
    parser.add_argument("--out", default="comparison", help="the folder for results, which a second call resumes")
    given = parser.parse_args()

    changes = {"data.source": given.texts} | ({} if given.steps is None else {"training.steps": given.steps})
    results = holdfast.compare(given.routers, recipe=given.recipe, seeds=given.seeds, out=given.out, changes=changes)
    print(f"{'router':<20} {'experts':>7} {'perplexity':>11}  difference (95%); cost of the attack on untouched words")
    for row in results.rows:
        change = "baseline" if row.clean_difference is None else row.clean_difference.words
        cost = "not measured" if row.cost is None else row.cost.words
        print(f"{row.router:<20} {row.experts_per_token:>7.2f} {row.clean:>11.2f}  {change}; {cost}")
    print(f"{given.out}/report.html")


if __name__ == "__main__":
    main()
