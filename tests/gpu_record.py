"""Run every test that uses a GPU and record the result in gpu_record.json, or check that the record is of this source.

    python tests/gpu_record.py --write [pytest options]    # on a machine with a GPU; `make test-gpu`
    python tests/gpu_record.py --check                     # exits with 1 if the source has changed since

It needs neither git nor the packages of `holdfast[lab]`, which a machine with a GPU may lack.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"


def source_hash(folder: Path = ROOT / "src" / "holdfast") -> str:
    """Return the SHA-256 of the names and contents of all files of the package."""
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            total.update(f"{file.relative_to(folder).as_posix()}\n{file.stat().st_size}\n".encode())
            total.update(file.read_bytes())
    return total.hexdigest()


def gpu_test_files() -> list[str]:
    """Return the test files that ask whether there is a GPU."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "cuda.is_available()" in file.read_text()]
    return [str(file.relative_to(ROOT)) for file in files]


def write(options: list[str]) -> int:
    """Run the tests and write the record. Return pytest's exit code."""
    import torch

    if not torch.cuda.is_available():
        print("There is no GPU here: the record was not written.")
        return 1
    source = source_hash()  # before the tests: a file that is changed meanwhile is not what was tested
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *options, *gpu_test_files()]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode
        cases = list(ElementTree.parse(results).iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    record = {
        "source": source,
        "passed": len(cases) - skipped - len(failed),
        "failed": len(failed),
        "skipped": skipped,
        "failed_tests": failed,
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "transformers", "triton")},
        "date": datetime.now(UTC).date().isoformat(),
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{RECORD.relative_to(ROOT)}: {record['passed']} passed, {record['failed']} failed, {skipped} skipped.")
    return code


def check() -> int:
    """Print one sentence about the record. Return 1 if it is not of this source, or if tests failed."""
    if not RECORD.exists():
        print("The GPU tests have no record: run `make test-gpu` on a machine with a GPU.")
        return 1
    record = json.loads(RECORD.read_text())
    results = f"{record['passed']} passed, {record['failed']} failed on one {record['gpu']} on {record['date']}"
    if record["source"] != source_hash():
        print(f"The GPU tests were not run with this source, run `make test-gpu` (another version: {results}).")
        return 1
    print(f"The GPU tests were run with this source: {results}.")
    return 1 if record["failed"] else 0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--write"]:
        return write(arguments[1:])
    if arguments == ["--check"]:
        return check()
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
