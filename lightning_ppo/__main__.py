"""The command `lightning-ppo`, also `python -m lightning_ppo`: starts before anything that takes time to import."""

import sys


def main() -> int:
    """Run the command line.

    Returns:
        The exit code; see `lightning_ppo.cli`.
    """
    try:
        # seconds, in which Ctrl-C is no error
        from lightning_ppo.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
