"""What a checkpoint is: its manifest, and the disk or object store that holds it. No torch."""
