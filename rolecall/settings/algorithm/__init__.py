"""The sections under `algorithm`: advantages, losses, corrections, KL, distillation, shaping."""
