"""RoleCall: RL post-training for language models in which every role is a service."""

__version__ = "0.1.0"
