"""The bound of exponentials of log-ratios. No imports: the controller's numpy and the trainers' torch share it."""

LOG_RATIO_BOUND = 20.0
"""A log-ratio is held below this, or within +-this, where it is exponentiated and nowhere else.

One stray token then cannot make a loss or a reward inf. e^20 is far beyond any useful ratio and still finite in
float32.
"""
