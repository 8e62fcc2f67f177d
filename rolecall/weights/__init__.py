"""The weight channel: policy parameters from the actor to every rollout worker, versioned by epochs, fingerprinted,
abortable.
"""
