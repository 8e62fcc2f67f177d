"""Parts of engine.py: its arguments, and what of vLLM's engine takes more than a call."""
