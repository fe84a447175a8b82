"""What a model would cost with other routers, from its config alone: parameters, FLOPs, memory, communication."""

from holdfast.planning.planning import Plan as Plan
from holdfast.planning.planning import Workload as Workload
from holdfast.planning.planning import plan as plan
