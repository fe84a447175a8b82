"""Audits: how much of a model depends on near-ties, measured under perturbations.

`audit` returns an `AuditReport`, `diagnose` what is wrong with the model, `what_if` what another router would change, and
`certify_model` the certificates of every layer. docs/audit.md explains every attribute of the report. `measure_geometry`
returns a `GeometryReport`: how near tokens are to the discontinuities of routers, with pictures (docs/geometry-pages.md).
"""

from holdfast.auditing.findings import Condition as Condition
from holdfast.auditing.findings import Finding as Finding
from holdfast.auditing.findings import diagnose as diagnose
from holdfast.auditing.findings import parse_condition as parse_condition
from holdfast.auditing.geometry_run import measure_geometry as measure_geometry
from holdfast.auditing.layer_certificates import LayerCertificates as LayerCertificates
from holdfast.auditing.layer_certificates import ModelCertificates as ModelCertificates
from holdfast.auditing.layer_certificates import certify_model as certify_model
from holdfast.auditing.reports import AuditReport as AuditReport
from holdfast.auditing.reports import GeometryReport as GeometryReport
from holdfast.auditing.reports import GeometrySettings as GeometrySettings
from holdfast.auditing.reports import Settings as Settings
from holdfast.auditing.reports import WhatIf as WhatIf
from holdfast.auditing.reports import differences as differences
from holdfast.auditing.run import PERTURBATIONS as PERTURBATIONS
from holdfast.auditing.run import audit as audit
from holdfast.auditing.run import audit_settings as audit_settings
from holdfast.auditing.run import what_if as what_if
