"""The four remedies of `holdfast mismatch` on a small trained model: the figures of docs/mismatch.md.

    python benchmarks/mismatch.py --text FILE [--steps 120] [--decode] [--out FOLDER]

Train the OLMoE of replay.py on the bytes of a text. Measure float32 training against a rollout in bfloat16, one sequence
at a time, on other bytes of the text.
"""

import argparse
import lzma
from pathlib import Path
from typing import Any

import torch
import transformers
from replay import CONFIG, LENGTH, rows_of, train

import holdfast
from holdfast.cli.mismatch import print_mismatch
from holdfast.report import write_mismatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a text file, .xz or plain")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--decode", action="store_true", help="roll out one token at a time, with a KV cache; this is slow")
    parser.add_argument("--out", type=Path, help="write mismatch.json and mismatch.html to this folder")
    given = parser.parse_args()
    raw = given.text.read_bytes()
    data = torch.frombuffer(bytearray(lzma.decompress(raw) if given.text.suffix == ".xz" else raw), dtype=torch.uint8).long()
    held_out = len(data) // 10
    torch.manual_seed(0)
    model: Any = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**CONFIG))
    print(f"loss after {given.steps} steps: {train(model, data[:-held_out], given.steps):.3f}", flush=True)
    batches = [{"input_ids": rows_of(data[-held_out:], given.sequences, LENGTH)}]
    report = holdfast.measure_mismatch(model, batches, rollout_decode=given.decode, name="a small OLMoE")
    print_mismatch(report)
    if given.out is not None:
        write_mismatch(report.save(given.out / "mismatch.json"), given.out / "mismatch.html", force=True)


if __name__ == "__main__":
    main()
