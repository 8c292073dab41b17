"""Tools that keep the docs true; not part of the package."""
