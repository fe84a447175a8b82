"""Check pages with axe-core, the accessibility checker of Deque. npm downloads it once, into .axe of the checkout."""

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "4.14.0"
SHA256 = "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"
CACHE = Path(__file__).parent.parent.parent / ".axe"  # ignored by git
SERIOUS = ("serious", "critical")

RUN = """
const done = arguments[arguments.length - 1];
const named = ({ target, failureSummary }) => `${target.join(" ")}: ${failureSummary.replace(/\\s+/g, " ")}`;
axe.run(document, { resultTypes: ["violations"] }).then(
  ({ violations }) => done(violations.map(({ id, impact, nodes }) => ({ id, impact, nodes: nodes.map(named) }))),
  (error) => done(String(error)),
);
"""


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the source of axe-core. Skip the test where it is not stored and npm cannot download it."""
    file = CACHE / f"axe-core-{VERSION}.min.js"
    if not file.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed, so axe-core cannot be downloaded")
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            line = [npm, "pack", f"axe-core@{VERSION}", "--silent"]
            run = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)
            packed = Path(folder, f"axe-core-{VERSION}.tgz")
            if run.returncode != 0 or not packed.exists():
                pytest.skip(f"npm could not download axe-core: {run.stderr.strip()[-200:]}")
            with tarfile.open(packed) as archive:
                source = archive.extractfile("package/axe.min.js")
                assert source is not None
                Path(folder, file.name).write_bytes(source.read())
            os.replace(Path(folder, file.name), file)  # several workers may download it at the same time
    content = file.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256, f"{file} is not axe-core {VERSION}; delete it"
    return content.decode()


def violations(browser: Any, axe: str) -> list[str]:
    """Return what axe finds on the visible part of the page that is serious or critical, one sentence for each element."""
    browser.set_script_timeout(300)  # seconds, on a busy machine
    browser.execute_script(axe)
    found = browser.execute_async_script(RUN)
    assert isinstance(found, list), found
    return [f"{one['id']}: {node}" for one in found if one["impact"] in SERIOUS for node in one["nodes"]]


def violations_of_every_tab(browser: Any, axe: str) -> list[str]:
    """Open all <details> and one tab after the other, and return what axe finds in any state. A page may have no tabs."""
    browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    found = violations(browser, axe)
    for tab in browser.find_elements("css selector", "[role=tab]"):
        browser.execute_script("arguments[0].click()", tab)
        found += violations(browser, axe)
    return list(dict.fromkeys(found))
