"""The embedded text: Python's own language reference, as the interpreter ships it for `help()`."""


def python_docs() -> dict[str, str]:
    """Documents by title, in a fixed order."""
    from pydoc_data.topics import topics  # half a megabyte: read when asked for

    if not topics:
        raise ValueError("this Python was built without its documentation topics (pydoc_data.topics is empty).")
    return dict(sorted(topics.items()))
