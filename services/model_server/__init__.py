"""A model behind vLLM's OpenAI-compatible server, for the judges of a run; see README.md."""
