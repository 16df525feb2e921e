"""`python -m stormline`: the same as the command."""

from stormline.cli.main import main

if __name__ == "__main__":
    main()
