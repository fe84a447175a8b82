"""Routers: a pipeline of parts that scores, clusters, informs and selects experts for tokens.

router.py           the pipeline
records.py          its input `Context` and its output `Routing`
parts.py            the base class of each stage
scores.py, clustering.py, expert_graph.py, token_graph.py, selection.py, smoothing.py,
fixed.py, sparsemax.py, hierarchy.py, modality.py   the parts
state.py            parts that update state without gradients
registry.py, presets.py, plugins.py                 routers by name
declarations.py, conditions.py, bounds.py           what parts declare for certificates and plans
"""

from holdfast.routing.clustering import Clustered as Clustered
from holdfast.routing.expert_graph import ExpertGraph as ExpertGraph
from holdfast.routing.fixed import Distilled as Distilled
from holdfast.routing.fixed import EqualWeights as EqualWeights
from holdfast.routing.fixed import HashedIds as HashedIds
from holdfast.routing.hierarchy import Hierarchical as Hierarchical
from holdfast.routing.modality import ModalityLinear as ModalityLinear
from holdfast.routing.parts import Informer as Informer
from holdfast.routing.parts import LinearScore as LinearScore
from holdfast.routing.parts import Part as Part
from holdfast.routing.parts import Score as Score
from holdfast.routing.parts import Scores as Scores
from holdfast.routing.parts import Selection as Selection
from holdfast.routing.parts import Selector as Selector
from holdfast.routing.parts import Traits as Traits
from holdfast.routing.plugins import load_plugin as load_plugin
from holdfast.routing.presets import create_router as create_router
from holdfast.routing.presets import list_routers as list_routers
from holdfast.routing.presets import register as register
from holdfast.routing.records import Attention as Attention
from holdfast.routing.records import Context as Context
from holdfast.routing.records import Previous as Previous
from holdfast.routing.records import RouterCache as RouterCache
from holdfast.routing.records import Routing as Routing
from holdfast.routing.router import Router as Router
from holdfast.routing.scores import Cosine as Cosine
from holdfast.routing.scores import Frozen as Frozen
from holdfast.routing.scores import Linear as Linear
from holdfast.routing.selection import ReLU as ReLU
from holdfast.routing.selection import TopK as TopK
from holdfast.routing.selection import TopP as TopP
from holdfast.routing.smoothing import SmoothTopK as SmoothTopK
from holdfast.routing.sparsemax import Sparsemax as Sparsemax
from holdfast.routing.state import StatefulPart as StatefulPart
from holdfast.routing.token_graph import AttentionPosterior as AttentionPosterior
from holdfast.routing.token_graph import Similarity as Similarity
