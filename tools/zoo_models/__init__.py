"""Small models of many kinds, with random weights."""

from zoo_models import layers, semantics, sequences, transformer, vision
from zoo_models.registry import MODELS, Call, Model

__all__ = ["MODELS", "Call", "Model", "layers", "semantics", "sequences", "transformer", "vision"]
