"""Model folders: converting and locating the weights that the engine loads."""
