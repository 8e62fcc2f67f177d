"""The files that a run reads: datasets, tokenizers and model directories. No torch."""
