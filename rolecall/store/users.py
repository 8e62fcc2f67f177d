"""The store's users: one for each role that uses it, and what the server lets it do. The reward role has none.

A server bounds keys and commands, and holds every command inside a script to the bounds of whoever runs it. It does not
bound scripts: a role that may run ours may run one of its own. So what holds against a role that was broken into is
this table, not the rules of the scripts:

    controller   anything to the keys of its run; nothing to other runs or to the server
    rollout      the streams and hashes of groups and workers, and rows; only reads ctl, step and attested versions. Not
                 sealed batches, the run's position, success rates, garbage, dead letters
    actor, critic   reads ctl and sealed batches; reads rows and adds columns to them, overwrites and deletes none
    reference    the same, without the batches

Names of keys are nobody's secret: the controller's SCAN, for the audit, is shown those of every run.
"""

ROLES = ("controller", "actor", "critic", "reference", "rollout")
"""The roles that use the store."""
REPLAYING = "user default off ~* &* +@all"
"""Nobody can log in as it, but many servers replay the transactions in their file with its rights, and discard what
those do not allow.
"""
_CLIENT = "+ping +cluster|slots +command"
"""What the client itself asks, of a cluster also where the slots are."""
_SCRIPTS = "+eval +evalsha"
_ROLLOUT = (
    "+exists +expire +hdel +hget +hincrby +hset +info +persist +ttl +xack +xadd +xclaim +xdel +xinfo|groups +xpending "
    "+xrange +xread +xreadgroup"
)
_TRAINER = "+exists +hget +hmget +hsetnx"


def rights(role: str, run: str) -> str:
    """Returns what `role` may do in the store of `run`, as rules of ACL SETUSER."""
    ledger, rows = f"{{rl:{run}}}:", f"~{{rl:{run}:*}}:row:*"
    match role:
        case "controller":
            # Those of the first line belong to the check of the server's settings.
            return f"~{ledger}* {rows} +@all -@admin -@dangerous +info +config|get +acl|getuser"
        case "rollout":
            keys = ("prompts", "trajectories", "history", "suspects", "played")
            written = " ".join(f"~{ledger}{key}" for key in keys)
            # the ledger's scripts are given its prefix as their key
            return (
                f"~{ledger} {written} ~{ledger}g:* ~{ledger}w:* %R~{ledger}run %R~{ledger}versions {rows} "
                f"{_CLIENT} {_SCRIPTS} {_ROLLOUT}"
            )
        case "reference":
            return f"%R~{ledger}run {rows} {_CLIENT} {_SCRIPTS} {_TRAINER}"
        case "actor" | "critic":
            return f"%R~{ledger}run %R~{ledger}batch:* {rows} {_CLIENT} {_SCRIPTS} {_TRAINER}"
    raise ValueError(f"role {role!r} does not use the store")
