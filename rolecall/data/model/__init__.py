"""Model directories on disk, by their JSON and headers: what they hold, and what trainers and vLLM make of it."""
