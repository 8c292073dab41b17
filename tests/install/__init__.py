"""Tests that install the package from the index."""
