"""Parameters: which entry an initializer is, how it is computed from it, where its bytes lie."""

from typing import Literal

WeightsMode = Literal["auto", "link", "copy", "none"]
