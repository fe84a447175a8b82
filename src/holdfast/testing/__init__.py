"""For people who write routers: the conformance suite that every registered router passes."""

from holdfast.testing.suite import CHECKS as CHECKS
from holdfast.testing.suite import Report as Report
from holdfast.testing.suite import check_router as check_router
