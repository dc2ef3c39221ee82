"""How a file holds its tags: a file for each encoding, and the way back."""

from typing import Literal

Encoding = Literal["metadata", "attributes", "functions"]
