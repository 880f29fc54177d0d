"""`python -m equivtest` is the `equivtest` command."""

from equivtest.cli.main import main

if __name__ == "__main__":
    main()
