"""Certificates: how far a token may be moved, or how coarsely computed, and still go to the same experts.

`certify` gives a radius for each token: exact, a lower bound, or, for the majority vote of any router, one that holds with a
stated confidence. `undecided` says which tokens rounding alone could send elsewhere. docs/certificates.md has the formulas.
"""

from holdfast.certify.certificates import certify as certify
from holdfast.certify.deciding import rounding_errors as rounding_errors
from holdfast.certify.deciding import undecided as undecided
from holdfast.certify.norms import NORMS as NORMS
from holdfast.certify.norms import Norm as Norm
from holdfast.certify.reading import Gate as Gate
from holdfast.certify.records import Certificates as Certificates
from holdfast.certify.records import Kind as Kind
from holdfast.certify.scoring import NoBound as NoBound
from holdfast.certify.voting import MajorityVote as MajorityVote
from holdfast.certify.voting import Smoothing as Smoothing
from holdfast.certify.voting import certify_vote as certify_vote
