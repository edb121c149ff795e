"""Training data: corpora, downloads, tokenizers, batches."""

from .batches import *  # noqa: F403
from .corpus import *  # noqa: F403
