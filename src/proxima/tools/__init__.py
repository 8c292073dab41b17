"""Tools around training: `doctor`, `bench`, `scaling`, `migrate`, `export`."""
