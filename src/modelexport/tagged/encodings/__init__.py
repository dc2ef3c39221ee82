"""The encodings of tags in a file: a Python file for writing each of them, and one for reading them."""

from typing import Literal

Encoding = Literal["metadata", "attributes", "functions"]
