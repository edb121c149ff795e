"""Training data: corpora, downloads, tokenizers, batches."""

from .batches import Batches as Batches
from .corpus import Corpus as Corpus
from .corpus import load_corpus as load_corpus
from .datasets import list_datasets as list_datasets
from .datasets import prepare as prepare
from .tokenizers import get_tokenizer as get_tokenizer
from .tokens import read_tokens as read_tokens
from .tokens import write_tokens as write_tokens
