"""Routers: a pipeline of parts that scores, clusters, informs and selects experts for tokens.

router.py           the pipeline
records.py          its input `Context` and its output `Routing`
parts.py            the base class of each stage
scores.py, clustering.py, expert_graph.py, selection.py, thresholds.py, smoothing.py, hierarchy.py    the parts
noise.py, dropout.py                                what training adds to scores, and the experts that it drops
token_graph.py      the parts in which tokens share gates
balanced.py, transport.py, capacity.py              the selectors that look at the whole batch
fixed.py            experts by token id
soft.py                                             the routers of SoftMoE and SMEAR layers
state.py            parts that update state without gradients
cache.py            what earlier tokens stored while decoding
replaying.py        recorded experts with live weights
registry.py, presets.py, grammar.py                 routers by name
declarations.py, bounds.py                          what parts declare for certificates and plans
"""

from holdfast.kernels.fp32_linear import linear_float32 as linear_float32
from holdfast.kernels.select import top as top
from holdfast.routing.balanced import BaseAssignment as BaseAssignment
from holdfast.routing.balanced import ExpertChoice as ExpertChoice
from holdfast.routing.balanced import Sinkhorn as Sinkhorn
from holdfast.routing.bounds import gamma as gamma
from holdfast.routing.bounds import unit as unit
from holdfast.routing.cache import RouterCache as RouterCache
from holdfast.routing.capacity import Capacity as Capacity
from holdfast.routing.clustering import Clustered as Clustered
from holdfast.routing.declarations import ActiveExperts as ActiveExperts
from holdfast.routing.declarations import Conditions as Conditions
from holdfast.routing.declarations import Cost as Cost
from holdfast.routing.declarations import LayerSizes as LayerSizes
from holdfast.routing.declarations import Mixing as Mixing
from holdfast.routing.declarations import Order as Order
from holdfast.routing.declarations import Shares as Shares
from holdfast.routing.declarations import Values as Values
from holdfast.routing.declarations import keep_above as keep_above
from holdfast.routing.declarations import keep_best as keep_best
from holdfast.routing.dropout import ExpertDropout as ExpertDropout
from holdfast.routing.dropout import StepDropout as StepDropout
from holdfast.routing.dropout import TokenDropout as TokenDropout
from holdfast.routing.expert_graph import ExpertGraph as ExpertGraph
from holdfast.routing.fixed import Distilled as Distilled
from holdfast.routing.fixed import EqualWeights as EqualWeights
from holdfast.routing.fixed import HashedIds as HashedIds
from holdfast.routing.hierarchy import Grouped as Grouped
from holdfast.routing.hierarchy import Hierarchical as Hierarchical
from holdfast.routing.hierarchy import TwoLevelLinear as TwoLevelLinear
from holdfast.routing.noise import GaussianNoise as GaussianNoise
from holdfast.routing.noise import GumbelNoise as GumbelNoise
from holdfast.routing.noise import UniformNoise as UniformNoise
from holdfast.routing.parts import Declarations as Declarations
from holdfast.routing.parts import Informer as Informer
from holdfast.routing.parts import InformerDeclarations as InformerDeclarations
from holdfast.routing.parts import LinearScore as LinearScore
from holdfast.routing.parts import Noise as Noise
from holdfast.routing.parts import Part as Part
from holdfast.routing.parts import Score as Score
from holdfast.routing.parts import ScoreDeclarations as ScoreDeclarations
from holdfast.routing.parts import Selector as Selector
from holdfast.routing.parts import SelectorDeclarations as SelectorDeclarations
from holdfast.routing.parts import Traits as Traits
from holdfast.routing.presets import create_router as create_router
from holdfast.routing.presets import list_routers as list_routers
from holdfast.routing.presets import register as register
from holdfast.routing.records import Attention as Attention
from holdfast.routing.records import Context as Context
from holdfast.routing.records import Previous as Previous
from holdfast.routing.records import Routing as Routing
from holdfast.routing.records import VisibleTokens as VisibleTokens
from holdfast.routing.router import Router as Router
from holdfast.routing.router import join_routers as join_routers
from holdfast.routing.rules import Scores as Scores
from holdfast.routing.rules import Selection as Selection
from holdfast.routing.rules import gather_slots as gather_slots
from holdfast.routing.scores import Cosine as Cosine
from holdfast.routing.scores import Frozen as Frozen
from holdfast.routing.scores import Linear as Linear
from holdfast.routing.scores import ModalityLinear as ModalityLinear
from holdfast.routing.scores import TwoLayer as TwoLayer
from holdfast.routing.selection import TopK as TopK
from holdfast.routing.smoothing import SmoothTopK as SmoothTopK
from holdfast.routing.state import StatefulPart as StatefulPart
from holdfast.routing.state import sum_over_ranks as sum_over_ranks
from holdfast.routing.thresholds import ReLU as ReLU
from holdfast.routing.thresholds import Sparsemax as Sparsemax
from holdfast.routing.thresholds import TopP as TopP
from holdfast.routing.token_graph import AttentionPosterior as AttentionPosterior
from holdfast.routing.token_graph import Similarity as Similarity
from holdfast.routing.token_graph import TokenGraph as TokenGraph
