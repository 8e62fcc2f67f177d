"""The manifest of a checkpoint, and the disk or object store that holds it. No torch."""
