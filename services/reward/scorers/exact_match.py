"""Exact match: the response is the ground truth, surrounding white space aside."""


def whole_answer(response_text: str, *, ignore_case: bool) -> str:
    """The stripped text, case-folded with `ignore_case`."""
    stripped = response_text.strip()
    return stripped.casefold() if ignore_case else stripped


def exact_match(response_text: str, ground_truth: str, *, ignore_case: bool) -> float:
    """1.0 when the stripped texts are equal (case-folded with `ignore_case`), else 0.0."""
    return float(
        whole_answer(response_text, ignore_case=ignore_case) == whole_answer(ground_truth, ignore_case=ignore_case)
    )
