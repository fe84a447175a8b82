"""What a forward under way notes down, for each thread its own: a model may serve several at once."""

import threading
from typing import Any


class PerThread(threading.local):
    """Attributes that every thread has its own values of, from those of the class on. Copies and pickles start anew."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
