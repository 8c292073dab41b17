"""Beside training: `doctor`, `bench`, `scaling`, `migrate`, `export`."""
