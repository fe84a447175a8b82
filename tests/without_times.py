"""Results that can be compared: two runs give the same numbers, but take different times."""

import json
from typing import Any

OF_ONE_RUN = ("origin", "step_seconds", "command")


def without_times(results: Any) -> Any:
    """Return results, or a part of them, without times, dates, machines and commands."""
    if isinstance(results, dict):
        return {key: without_times(value) for key, value in results.items() if key not in OF_ONE_RUN}
    return [without_times(value) for value in results] if isinstance(results, list) else results


def as_text(results: Any) -> str:
    """Return the numbers of results as text."""
    return json.dumps(without_times(results), sort_keys=True)
