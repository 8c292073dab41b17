"""`python -m proxima` is `proxima`."""

from proxima.cli import main

if __name__ == "__main__":
    main()
