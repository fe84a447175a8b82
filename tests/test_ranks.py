"""The runner of several processes itself: an error in one process ends all of them."""

from pathlib import Path

import pytest
from ranks import on_ranks


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    first = "    if os.environ['RANK'] == '1':\n        raise ValueError('this is why')\n"
    script.write_text(f"import os, time\nif __name__ == '__main__':\n{first}    time.sleep(600)\n")
    with pytest.raises(AssertionError, match="this is why"):
        on_ranks(script)
