"""Record the routes of a model and replay them: the same experts again, with live weights and gradients.

routes.py           `Routes`: recorded experts, from a trace, from an inference engine's sequences or from a file;
                    `RoutedModel`: the MoE layers that they belong to
forwards.py         `replay`, for one forward, and `record`, during `generate`
trl.py              `RolloutReplay`, for TRL's GRPO trainer
"""

from holdfast.replaying.forwards import Recorder as Recorder
from holdfast.replaying.forwards import record as record
from holdfast.replaying.forwards import replay as replay
from holdfast.replaying.routes import RoutedModel as RoutedModel
from holdfast.replaying.routes import Routes as Routes
from holdfast.replaying.trl import RolloutReplay as RolloutReplay
