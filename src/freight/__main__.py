"""`python -m freight` is the `freight` command."""

from freight.cli import main

if __name__ == "__main__":
    main()
