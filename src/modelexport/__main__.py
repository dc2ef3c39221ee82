"""``python -m modelexport``."""

from modelexport.cli.app import main

main()
