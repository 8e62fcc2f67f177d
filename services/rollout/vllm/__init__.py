"""Parts of engine.py: what of vLLM's engine takes more than a call."""
