"""Run these tests in one thread, as those of certificates."""

from certificates.conftest import one_thread as one_thread
