"""DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13). Its filter of truncated samples is the controller's affair."""


def overlong_penalty(num_response_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, then linear to -1 at max_tokens and beyond."""
    over = num_response_tokens - (max_tokens - buffer_tokens)
    return 0.0 if over <= 0 else -min(over / buffer_tokens, 1.0)
