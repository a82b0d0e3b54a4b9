"""`python -m kvferry`."""

from kvferry.cli import main

if __name__ == "__main__":
    main()
