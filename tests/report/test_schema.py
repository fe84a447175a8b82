"""What writes a stored report and what reads it have the same schema."""

import json
import re
from pathlib import Path

import holdfast
from holdfast.auditing.stored_report import StoredReport
from holdfast.report.stored_reports import ReportFile


def test_a_new_report_is_readable() -> None:
    written = StoredReport(status="complete", model={}, data={}, settings={}, versions={}, seconds=1.0)
    assert ReportFile.parse(json.loads(written.to_json()), "report.json").status == "complete"


def test_the_schema_of_reports_is_in_one_place() -> None:
    """With a constant for writing and one for reading, raising one would make new reports unreadable."""
    package = Path(holdfast.__file__).parent
    defined = re.compile(r"^(\w*SCHEMA\w*)\b.*= *\d", flags=re.MULTILINE)
    found = {path.relative_to(package).as_posix(): defined.findall(path.read_text()) for path in package.rglob("*.py")}
    assert {path: names for path, names in found.items() if names and path.startswith(("auditing/", "report/"))} == {}
    assert found["files.py"] == ["REPORT_SCHEMA"]
