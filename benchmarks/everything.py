"""Run all benchmarks of speed and memory sequentially, and write their results to one folder.

python benchmarks/everything.py --out speed                     # on a CPU
python benchmarks/everything.py --device cuda --out speed       # on a GPU
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ALL = ("experts", "routers", "blocks", "models", "decoding", "growth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="a folder for one JSON file each")
    parser.add_argument("--only", nargs="*", choices=ALL, default=ALL)
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only:
        begin = time.perf_counter()
        command = [sys.executable, str(HERE / f"{name}.py"), "--device", arguments.device]
        command += ["--out", str(arguments.out / f"{name}.json"), *(["--force"] if arguments.force else [])]
        code = subprocess.run(command).returncode
        print(f"{name}: {time.perf_counter() - begin:.0f} s\n", flush=True)
        failed += [name] if code else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
