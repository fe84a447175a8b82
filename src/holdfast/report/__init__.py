"""HTML reports of stored comparisons, audits, geometry, mismatch and certified predictions: one file each, from JSON."""

from holdfast.report.audit_page import write_audit as write_audit
from holdfast.report.comparison_page import write_report as write_report
from holdfast.report.geometry_page import write_geometry as write_geometry
from holdfast.report.mismatch_page import write_mismatch as write_mismatch
from holdfast.report.page_shell import render as render
from holdfast.report.prediction_page import write_predictions as write_predictions
from holdfast.report.tables import Table as Table

render_audit = render_geometry = render_mismatch = render_predictions = render
