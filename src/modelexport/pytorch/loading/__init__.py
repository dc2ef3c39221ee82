"""MODEL, as a person names it, loaded as a module."""

from modelexport.pytorch.loading.loaded import LoadedModel
from modelexport.pytorch.loading.model_by_name import load_model

__all__ = ["LoadedModel", "load_model"]
