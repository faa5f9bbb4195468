"""Live torch objects: taken apart to be saved, filled when restored. The only place that imports torch with data."""
