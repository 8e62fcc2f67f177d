"""What a run reads: datasets, tokenizers and model directories. No torch."""
