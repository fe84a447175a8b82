"""Generate text with a model that was saved with holdfast.save, and print how firmly each token was routed.

    python examples/generate.py FOLDER "The assignment statement" --tokens 20

A small number means that rounding, or another engine, may run other experts for this token (docs/certificates.md).
"""

import argparse

import torch
import transformers

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder that holdfast.save wrote, with the tokeniser")
    parser.add_argument("prompt", help="the text to go on with")
    parser.add_argument("--tokens", type=int, default=20, help="new tokens (20)")
    given = parser.parse_args()

    model = holdfast.load(given.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.folder)
    inputs = tokenizer(given.prompt, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, max_new_tokens=given.tokens, do_sample=False)
    print(tokenizer.decode(tokens[0]))

    found = holdfast.certify(model, [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}])
    relative = torch.stack([layer.certificates.relative for layer in found.layers if layer.certificates is not None])
    print("each token, and the share of its length that a router's input may move in any layer before it flips")
    for token, share in zip(tokens[0].tolist(), relative.amin(0).tolist(), strict=True):
        print(f"{tokenizer.decode([token])!r:<20} {share:.4f}")


if __name__ == "__main__":
    main()
