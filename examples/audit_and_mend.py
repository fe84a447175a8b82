"""Audit a mixture-of-experts checkpoint, see what another router changes, and save a copy with it.

    python examples/audit_and_mend.py MODEL TEXTS --out mended     # MODEL: a folder or a name on the hub; TEXTS: a .txt file

The gate's weights stay; no training is needed. docs/tutorials/audit-and-mend.md explains every number that is printed.
"""

import argparse
from pathlib import Path

import transformers

import holdfast
from holdfast.auditing import diagnose, what_if


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of Hugging Face, or a name on the hub, with experts")
    parser.add_argument("texts", type=Path, help="a text that the model has not seen, paragraphs apart by empty lines")
    parser.add_argument("--router", default="smooth", help='the router to try, for example "smooth[eps=0.05]" (smooth)')
    parser.add_argument("--tokens", type=int, default=4096, help="audit so many tokens (4096)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (128)")
    parser.add_argument("--out", type=Path, help="save the model with its new router in this folder")
    given = parser.parse_args()
    if not given.texts.is_file():
        parser.error(f"{given.texts} is not a file.")

    model = transformers.AutoModelForCausalLM.from_pretrained(given.model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    texts = [part for part in given.texts.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    settings = {"tokenizer": tokenizer, "tokens": given.tokens, "length": given.length}

    before = holdfast.audit(model, texts, **settings)
    for finding in diagnose(before):
        print(f"{finding.severity}: {finding}")

    trial = what_if(model, texts, given.router, before=before, **settings)
    for name, pair in trial.cost.items():
        print(f"{name}: {pair.before:.4g} -> {pair.after:.4g}")
    print(f"output change from top-k to {given.router}: by flips, and in total, which need not fall with it")
    for name, pair in trial.flip_output.items():
        if pair.before:
            changes = [f"{each.before:>9.4%} -> {each.after:<9.4%}" for each in (pair, trial.output[name])]
            print(f"{name:<24}", *changes)

    if given.out is not None:
        holdfast.reroute(model, given.router)
        holdfast.save(model, given.out, tokenizer=tokenizer)
        print(f"saved in {given.out}; load it with holdfast.load")


if __name__ == "__main__":
    main()
