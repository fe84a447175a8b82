"""Routers: records, the pipeline, its parts, and the table of names."""

from holdfast.routing.cache import RouterCache as RouterCache
from holdfast.routing.parts import Informer as Informer
from holdfast.routing.parts import LinearScore as LinearScore
from holdfast.routing.parts import Part as Part
from holdfast.routing.parts import Score as Score
from holdfast.routing.parts import Scores as Scores
from holdfast.routing.parts import Selection as Selection
from holdfast.routing.parts import Selector as Selector
from holdfast.routing.parts import Traits as Traits
from holdfast.routing.presets import register as register
from holdfast.routing.presets import router as router
from holdfast.routing.presets import routers as routers
from holdfast.routing.records import Attention as Attention
from holdfast.routing.records import Context as Context
from holdfast.routing.records import Previous as Previous
from holdfast.routing.records import Routing as Routing
from holdfast.routing.router import Router as Router
from holdfast.routing.scores import Cosine as Cosine
from holdfast.routing.scores import Frozen as Frozen
from holdfast.routing.scores import Linear as Linear
from holdfast.routing.selection import ReLU as ReLU
from holdfast.routing.selection import TopK as TopK
from holdfast.routing.selection import TopP as TopP
from holdfast.routing.state import StatefulPart as StatefulPart
