"""Parameters: which ``state_dict`` entry an initializer is or is computed from, and where its bytes are."""

from typing import Literal

WeightsMode = Literal["auto", "link", "copy", "none"]
