"""Certificates: how far a token may be moved, or how coarsely computed, and still go to the same experts.

`certify` gives a radius for each token: exact, a lower bound, or, for the majority vote of any router, one that holds with a
stated confidence. `undecided` says which tokens rounding alone could send elsewhere. docs/certificates.md has the formulas.
"""

from holdfast.certificates.certificates import certify as certify
from holdfast.certificates.deciding import rounding_errors as rounding_errors
from holdfast.certificates.deciding import undecided as undecided
from holdfast.certificates.reading import Gate as Gate
from holdfast.certificates.records import Certificates as Certificates
from holdfast.certificates.records import Kind as Kind
from holdfast.certificates.scoring import NoBound as NoBound
from holdfast.certificates.voting import MajorityVote as MajorityVote
from holdfast.certificates.voting import Smoothing as Smoothing
from holdfast.certificates.voting import certify_vote as certify_vote
from holdfast.routing.bounds import NORMS as NORMS
from holdfast.routing.bounds import Norm as Norm
