"""Attacks on words, pixels and routing. They take records and callables, never a concrete model.

Every result is a frozen record with its budget, its seed, what the attack realised, and flags that say when not to trust
it. Store its `summary()` as JSON.

    text      swap_words, misspell                  the result says which words changed
              synonyms, guided_typos                the same, guided by the losses of a model
    tokens    search_tokens                         the tokens that raise any value most, given its slopes
    inputs    fgsm, pgd, spsa, worst_of             images in [0,1], or embeddings with bounds=None
              adaptive, universal                   follow loss and routes; one perturbation for all inputs
              attack_curve                          one of these at several budgets
              attack_smoothed                       a majority vote under noise
    images    corrupt                               fifteen common corruptions; frost has a texture of ours
    routing   attack_routes                         the smallest perturbation that flips a token, or gets it a chosen expert
              attack_load                           overload of one expert, uneven loads
    outputs   attack_outputs                        the largest change of a layer's output, against `certify_output`

`register_attack` gives an attack a name; those of the package have theirs in `registry`.
"""

from holdfast.attacks.adaptive import RoutedModel as RoutedModel
from holdfast.attacks.adaptive import adaptive as adaptive
from holdfast.attacks.adaptive import attack_smoothed as attack_smoothed
from holdfast.attacks.corruptions import CORRUPTIONS as CORRUPTIONS
from holdfast.attacks.corruptions import CorruptedImages as CorruptedImages
from holdfast.attacks.corruptions import corrupt as corrupt
from holdfast.attacks.expert_load import OBJECTIVES as OBJECTIVES
from holdfast.attacks.expert_load import AttackedLoad as AttackedLoad
from holdfast.attacks.expert_load import attack_load as attack_load
from holdfast.attacks.flags import AttackWarning as AttackWarning
from holdfast.attacks.flags import Flag as Flag
from holdfast.attacks.flags import check_model as check_model
from holdfast.attacks.guided_words import Scored as Scored
from holdfast.attacks.guided_words import Version as Version
from holdfast.attacks.guided_words import guided_typos as guided_typos
from holdfast.attacks.guided_words import listed_words as listed_words
from holdfast.attacks.guided_words import nearest_words as nearest_words
from holdfast.attacks.guided_words import synonyms as synonyms
from holdfast.attacks.inputs import AttackedInputs as AttackedInputs
from holdfast.attacks.inputs import Threat as Threat
from holdfast.attacks.inputs import attack_curve as attack_curve
from holdfast.attacks.inputs import worst_of as worst_of
from holdfast.attacks.outputs import AttackedOutputs as AttackedOutputs
from holdfast.attacks.outputs import attack_outputs as attack_outputs
from holdfast.attacks.pixels import PAPER_BUDGET as PAPER_BUDGET
from holdfast.attacks.pixels import PAPER_STEPS as PAPER_STEPS
from holdfast.attacks.pixels import fgsm as fgsm
from holdfast.attacks.pixels import pgd as pgd
from holdfast.attacks.pixels import spsa as spsa
from holdfast.attacks.pixels import universal as universal
from holdfast.attacks.registry import ATTACKS as ATTACKS
from holdfast.attacks.registry import Attack as Attack
from holdfast.attacks.registry import attack_pixels as attack_pixels
from holdfast.attacks.registry import attack_texts as attack_texts
from holdfast.attacks.registry import find_attack as find_attack
from holdfast.attacks.registry import register_attack as register_attack
from holdfast.attacks.routes import AttackedRoutes as AttackedRoutes
from holdfast.attacks.routes import attack_routes as attack_routes
from holdfast.attacks.text import GENERIC as GENERIC
from holdfast.attacks.text import STOP_WORDS as STOP_WORDS
from holdfast.attacks.text import AttackedText as AttackedText
from holdfast.attacks.text import Change as Change
from holdfast.attacks.text import change_words as change_words
from holdfast.attacks.text import misspell as misspell
from holdfast.attacks.text import swap_words as swap_words
from holdfast.attacks.text import swappable as swappable
from holdfast.attacks.text import words_in as words_in
from holdfast.attacks.token_search import FoundTokens as FoundTokens
from holdfast.attacks.token_search import random_tokens as random_tokens
from holdfast.attacks.token_search import search_tokens as search_tokens
