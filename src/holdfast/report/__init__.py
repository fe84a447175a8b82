"""HTML reports of stored comparisons, audits, geometry and mismatch reports: one file each, from JSON, not a model."""

from holdfast.report.audit_page import render_audit, write_audit
from holdfast.report.comparison_page import render, write_report
from holdfast.report.geometry_page import render_geometry, write_geometry
from holdfast.report.mismatch_page import render_mismatch, write_mismatch
from holdfast.report.tables import Table

__all__ = [
    "Table",
    "render",
    "render_audit",
    "render_geometry",
    "render_mismatch",
    "write_audit",
    "write_geometry",
    "write_mismatch",
    "write_report",
]
