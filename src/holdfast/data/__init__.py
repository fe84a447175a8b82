"""Text to work on. The embedded default needs no download: the English that every Python carries."""

from holdfast.data.python_docs import python_docs as python_docs
from holdfast.data.words import Vocabulary as Vocabulary
from holdfast.data.words import words as words
