"""The program: ``modelexport``, which is ``python -m modelexport``."""

import sys


def main() -> None:
    """Run the command; one that Ctrl-C ends while it is imported says so in a line, too."""
    try:
        from modelexport.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("modelexport: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
