"""Length: a cost per token."""


def length_cost(num_response_tokens: int, max_tokens: int) -> float:
    """-num_response_tokens / max_tokens, no less than -1."""
    return -min(num_response_tokens, max_tokens) / max_tokens
