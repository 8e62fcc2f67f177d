"""gRPC between the roles: server, channel, errors on the wire, deadlines, TLS, membership and the life of a process.

Everything here is the same for every role; what a role does is in its own `services/<role>/`.
"""
