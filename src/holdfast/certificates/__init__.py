"""Certificates: up to which perturbation, and in which arithmetic, a token keeps its selected experts.

`certify` returns a radius for each token: exact, a lower bound, or, for the majority vote of any router, one that is correct
with a stated confidence. `certify_predictions` does the last for the class that a classifier gives. `certify_output` bounds
how much the output of a layer changes. `undecided` returns which tokens rounding alone could flip. docs/certificates.md has
the formulas.
"""

from holdfast.certificates.certificates import Certificates as Certificates
from holdfast.certificates.certificates import Kind as Kind
from holdfast.certificates.outputs import LayerParts as LayerParts
from holdfast.certificates.outputs import Networks as Networks
from holdfast.certificates.outputs import OutputCertificate as OutputCertificate
from holdfast.certificates.outputs import certify_output as certify_output
from holdfast.certificates.radii import certify as certify
from holdfast.certificates.radii import undecided as undecided
from holdfast.certificates.router_conditions import Gate as Gate
from holdfast.certificates.voting import MajorityVote as MajorityVote
from holdfast.certificates.voting import PredictionCertificates as PredictionCertificates
from holdfast.certificates.voting import Smoothing as Smoothing
from holdfast.certificates.voting import certify_predictions as certify_predictions
from holdfast.certificates.voting import certify_vote as certify_vote
from holdfast.routing.bounds import NORMS as NORMS
from holdfast.routing.bounds import Norm as Norm
from holdfast.routing.declarations import NoCertificate as NoCertificate
