"""Stored results and audits, each as one HTML file with plots. Reads JSON, never a live model."""

from holdfast.report.audit_page import render_audit, write_audit
from holdfast.report.comparison_page import render, write_report
from holdfast.report.stored_comparison import Results, read_results

__all__ = ["Results", "read_results", "render", "render_audit", "write_audit", "write_report"]
