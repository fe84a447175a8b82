"""How far a training forward is from a rollout of the same model, and what replay, `smooth` and float32 routing change.

rollout.py     `Rollout`: token ids, routes and log-probabilities of an inference engine
forwards.py    run a model over sequences under stated conditions, live or with a remedy
report.py      `MismatchReport`: shares, means and tails, with intervals
run.py         `measure_mismatch`
"""

from holdfast.mismatch.report import MismatchReport as MismatchReport
from holdfast.mismatch.report import MismatchSettings as MismatchSettings
from holdfast.mismatch.rollout import Rollout as Rollout
from holdfast.mismatch.run import measure_mismatch as measure_mismatch
