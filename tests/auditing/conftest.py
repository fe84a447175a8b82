"""A model and a text for the commands that measure it."""

from auditing.audited_models import folder as folder
from auditing.audited_models import text as text
