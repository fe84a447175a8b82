"""Stored results as one HTML file with plots. Reads JSON, never a live model."""

from holdfast.report.page import render, write_report
from holdfast.report.results import Results, read_results

__all__ = ["Results", "read_results", "render", "write_report"]
