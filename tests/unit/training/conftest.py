"""One thread for tests of tiny tensors: a second one costs more than it brings, and spins while others work."""

import torch

torch.set_num_threads(1)
