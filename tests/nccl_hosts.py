"""Two NCCL ranks on one GPU: NCCL refuses them on one host, so each process says that it is another."""

ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What joins the two: sockets over loopback, which NCCL leaves out where there is anything else."""


def as_host(name: str) -> dict[str, str]:
    """The environment of a process that NCCL takes for the host `name`. NCCL reads it at a process's first
    communicator.
    """
    return {**ONE_MACHINE, "NCCL_HOSTID": name}
