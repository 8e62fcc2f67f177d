"""Exact match: the response is the ground truth, surrounding white space aside."""


def exact_match(response_text: str, ground_truth: str, *, ignore_case: bool = False) -> float:
    """1.0 when the stripped texts are equal (case-folded with `ignore_case`), else 0.0."""
    response, truth = response_text.strip(), ground_truth.strip()
    if ignore_case:
        response, truth = response.casefold(), truth.casefold()
    return float(response == truth)
