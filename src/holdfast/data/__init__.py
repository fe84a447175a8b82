"""Texts and pictures to work on, and how models read them. The embedded defaults need no download."""

from holdfast.data.blocks import Batch as Batch
from holdfast.data.blocks import Blocks as Blocks
from holdfast.data.cuts import words as words
from holdfast.data.documents import Corpus as Corpus
from holdfast.data.documents import Document as Document
from holdfast.data.embedded import python_docs as python_docs
from holdfast.data.embedded import python_topics as python_topics
from holdfast.data.hub_tokenizer import HubTokenizer as HubTokenizer
from holdfast.data.image_sets import image_set as image_set
from holdfast.data.image_sets import image_sets as image_sets
from holdfast.data.images import Images as Images
from holdfast.data.images import ImageSet as ImageSet
from holdfast.data.order import Order as Order
from holdfast.data.order import TrainingBatches as TrainingBatches
from holdfast.data.sources import corpora as corpora
from holdfast.data.sources import corpus as corpus
from holdfast.data.text_sets import LabelledText as LabelledText
from holdfast.data.text_sets import TextSet as TextSet
from holdfast.data.text_sets import text_set as text_set
from holdfast.data.text_sets import text_sets as text_sets
from holdfast.data.tokenizing import tokenizer as tokenizer
from holdfast.data.tokenizing import tokenizer_from as tokenizer_from
from holdfast.data.tokenizing import tokenizers as tokenizers
from holdfast.data.tokens import Bytes as Bytes
from holdfast.data.tokens import Tokenizer as Tokenizer
from holdfast.data.vocabulary import Vocabulary as Vocabulary
