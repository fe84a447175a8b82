"""HTML reports of stored comparisons, audits, geometry and mismatch reports: one file each, from JSON, not a model."""

from holdfast.report.audit_page import render_audit as render_audit
from holdfast.report.audit_page import write_audit as write_audit
from holdfast.report.comparison_page import render as render
from holdfast.report.comparison_page import write_report as write_report
from holdfast.report.geometry_page import render_geometry as render_geometry
from holdfast.report.geometry_page import write_geometry as write_geometry
from holdfast.report.mismatch_page import render_mismatch as render_mismatch
from holdfast.report.mismatch_page import write_mismatch as write_mismatch
from holdfast.report.tables import Table as Table
