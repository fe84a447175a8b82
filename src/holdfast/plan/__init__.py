"""What a model with other routers would cost, before there is one: parameters, FLOPs, memory, communication."""

from holdfast.plan.appendix import Overhead as Overhead
from holdfast.plan.appendix import symphony_by_the_paper as symphony_by_the_paper
from holdfast.plan.appendix import symphony_here as symphony_here
from holdfast.plan.planning import Plan as Plan
from holdfast.plan.planning import Workload as Workload
from holdfast.plan.planning import plan as plan
from holdfast.plan.skeleton import Choice as Choice
