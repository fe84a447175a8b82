"""What a model with other routers would cost, before there is one: parameters, FLOPs, memory, communication."""

from holdfast.planning.planning import Overhead as Overhead
from holdfast.planning.planning import Plan as Plan
from holdfast.planning.planning import Workload as Workload
from holdfast.planning.planning import plan as plan
from holdfast.planning.planning import symphony_by_the_paper as symphony_by_the_paper
from holdfast.planning.planning import symphony_here as symphony_here
from holdfast.planning.skeleton import Choice as Choice
