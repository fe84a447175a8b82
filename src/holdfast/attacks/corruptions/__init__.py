"""The common corruptions of Hendrycks & Dietterich 2019."""

from holdfast.attacks.corruptions.corrupt import CorruptedImages as CorruptedImages
from holdfast.attacks.corruptions.corrupt import corrupt as corrupt
from holdfast.attacks.corruptions.table import CORRUPTIONS as CORRUPTIONS
from holdfast.attacks.corruptions.table import Corruption as Corruption
