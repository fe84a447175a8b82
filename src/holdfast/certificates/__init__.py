"""Certificates: how far a token may be moved, or how coarsely computed, and still go to the same experts.

`certify` gives a radius for each token: exact, a lower bound, or, for the majority vote of any router, one that holds with a
stated confidence. `undecided` says which tokens rounding alone could send elsewhere. docs/certificates.md has the formulas.
"""

from holdfast.certificates.certificates import Certificates as Certificates
from holdfast.certificates.certificates import Kind as Kind
from holdfast.certificates.radii import certify as certify
from holdfast.certificates.radii import rounding_errors as rounding_errors
from holdfast.certificates.radii import undecided as undecided
from holdfast.certificates.subjects import Gate as Gate
from holdfast.certificates.voting import MajorityVote as MajorityVote
from holdfast.certificates.voting import Smoothing as Smoothing
from holdfast.certificates.voting import certify_vote as certify_vote
from holdfast.routing.bounds import NORMS as NORMS
from holdfast.routing.bounds import Norm as Norm
from holdfast.routing.declarations import NoBound as NoBound
