"""The built site, and the browser of the tests of reports."""

import subprocess
import sys
from pathlib import Path

import pytest
from report.conftest import chromium as chromium
from report.conftest import screen as screen

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, elsewhere."""
    for package in ("mkdocs", "latex2mathml"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder
