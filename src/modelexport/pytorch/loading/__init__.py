"""MODEL, as a person names it, loaded as a module."""

from modelexport.pytorch.loading.by_name import load_model
from modelexport.pytorch.loading.loaded import LoadedModel

__all__ = ["LoadedModel", "load_model"]
