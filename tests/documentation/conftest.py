"""The built site, and the browser of the tests of reports."""

import subprocess
import sys
from pathlib import Path

import pytest
from report.conftest import chromium as chromium

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, elsewhere."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder
