"""Audits: a model, perturbed in every way that applies, and how much of it hangs on near-ties.

`audit` gives an `AuditReport`, `diagnose` says what is wrong with the model, `what_if` what another router would change.
docs/audit.md explains every key of the report.
"""

from holdfast.audit.certifying import LayerCertificates as LayerCertificates
from holdfast.audit.certifying import ModelCertificates as ModelCertificates
from holdfast.audit.certifying import certify_model as certify_model
from holdfast.audit.conditions import Condition as Condition
from holdfast.audit.conditions import parse as parse
from holdfast.audit.findings import Finding as Finding
from holdfast.audit.findings import diagnose as diagnose
from holdfast.audit.report import AuditReport as AuditReport
from holdfast.audit.report import differences as differences
from holdfast.audit.running import audit as audit
from holdfast.audit.table import PERTURBATIONS as PERTURBATIONS
from holdfast.audit.table import Settings as Settings
from holdfast.audit.what_if import WhatIf as WhatIf
from holdfast.audit.what_if import what_if as what_if
