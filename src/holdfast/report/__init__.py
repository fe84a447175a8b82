"""HTML reports of stored comparisons and audits, each one file with plots, rendered from JSON and never from a model."""

from holdfast.report.audit_page import render_audit, write_audit
from holdfast.report.comparison_page import render, write_report
from holdfast.report.stored_comparison import Results, read_results

__all__ = ["Results", "read_results", "render", "render_audit", "write_audit", "write_report"]
