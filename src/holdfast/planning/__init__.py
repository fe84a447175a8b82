"""What a model would cost with other routers, from its config alone: parameters, FLOPs, memory, communication."""

from holdfast.planning.meta_model import Choice as Choice
from holdfast.planning.planning import Overhead as Overhead
from holdfast.planning.planning import Plan as Plan
from holdfast.planning.planning import Workload as Workload
from holdfast.planning.planning import plan as plan
from holdfast.planning.planning import symphony_by_the_paper as symphony_by_the_paper
from holdfast.planning.planning import symphony_here as symphony_here
