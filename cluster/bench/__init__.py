"""Measurements: the engine, the core, and their peers. Run by `tandem bench`."""
