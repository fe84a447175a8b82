"""Texts and images for training and testing, and tokenisers. The embedded defaults need no download."""

from holdfast.data.blocks import Batch as Batch
from holdfast.data.blocks import Blocks as Blocks
from holdfast.data.blocks import Order as Order
from holdfast.data.documents import Corpus as Corpus
from holdfast.data.documents import Document as Document
from holdfast.data.documents import words as words
from holdfast.data.images import Images as Images
from holdfast.data.images import ImageSet as ImageSet
from holdfast.data.images import PixelScaling as PixelScaling
from holdfast.data.images import image_set as image_set
from holdfast.data.images import image_sets as image_sets
from holdfast.data.label_sources import text_set as text_set
from holdfast.data.label_sources import text_sets as text_sets
from holdfast.data.labelled_texts import LabelledText as LabelledText
from holdfast.data.labelled_texts import TextSet as TextSet
from holdfast.data.text_sources import corpora as corpora
from holdfast.data.text_sources import corpus as corpus
from holdfast.data.text_sources import python_docs as python_docs
from holdfast.data.text_sources import python_topics as python_topics
from holdfast.data.tokenizers import Bytes as Bytes
from holdfast.data.tokenizers import HubTokenizer as HubTokenizer
from holdfast.data.tokenizers import Tokenizer as Tokenizer
from holdfast.data.tokenizers import Vocabulary as Vocabulary
from holdfast.data.tokenizers import tokenizer as tokenizer
from holdfast.data.tokenizers import tokenizer_from as tokenizer_from
from holdfast.data.tokenizers import tokenizers as tokenizers
