"""SafeTensors checkpoints as Hugging Face's libraries write them, converted and quantised slice by slice."""

from .conversion import CONVERSION_VERSION, Conversion
from .folder import Checkpoint, is_checkpoint
from .quantising import Quantiser, Recipe

__all__ = ["CONVERSION_VERSION", "Checkpoint", "Conversion", "Quantiser", "Recipe", "is_checkpoint"]
