"""How far a training forward is from a rollout of the same model, and what replay, `smooth` and float32 routing change.

rollout.py     `Rollout`: token ids, routes and log-probabilities of an inference engine
forwards.py    run a model over sequences under stated conditions
remedies.py    the live router and three remedies, and how a model gets each of them
estimates.py   shares, means and tails, with intervals
run.py         `measure_mismatch`
report.py      `MismatchReport`
"""

from holdfast.mismatch.report import MismatchReport as MismatchReport
from holdfast.mismatch.rollout import Rollout as Rollout
from holdfast.mismatch.run import MismatchSettings as MismatchSettings
from holdfast.mismatch.run import measure_mismatch as measure_mismatch
