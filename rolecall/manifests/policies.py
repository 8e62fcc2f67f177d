"""NetworkPolicies of a run, from the table of who may call what (`rolecall/rpc/callers.py`) and from which roles read
the store and hold weights.
"""

from collections.abc import Iterable
from typing import Any

from rolecall.manifests.completed import PORT, RANKS_PORT, nodes_of
from rolecall.manifests.environment import agents_port, places_of
from rolecall.manifests.render import comment, dump_all
from rolecall.rpc.callers import Caller, rules
from rolecall.settings import RunSettings, TrainerSection

COMPONENT = "app.kubernetes.io/component"
PEOPLE = (Caller.OPERATOR.value, Caller.VIEWER.value)
STORE_PORT = 6379
_NODE_LOCAL = "169.254.20.10/32"
"""Where NodeLocal DNSCache answers, from a pod with the node's network, which no selector of pods is sure to match."""


def callers_by_role(roles: Iterable[str]) -> dict[str, set[str]]:
    """Returns who of the run's roles and people may open a connection to each role: whoever may call any of its
    methods. Reward services are public by contract; ours is called by the controller.
    """
    opened: dict[str, set[str]] = {role: set() for role in roles}
    there = {*opened, *PEOPLE}
    for method, callers in rules().items():
        served_by = method.split("/")[1].removeprefix("rolecall.v1.").removesuffix("Service").lower()
        if served_by in opened:
            opened[served_by] |= {caller.value for caller in callers} & there
    if "reward" in opened:
        opened["reward"].add(Caller.CONTROLLER.value)
    return opened


def network_policies(settings: RunSettings, roles: list[str]) -> str:
    """Everything is denied; what follows opens, in both directions."""
    callers = callers_by_role(roles)
    first, last = map(int, (settings.weights.ports or "").split("-"))
    weights = [_port(first, last)]
    ranks = [_port(RANKS_PORT), *weights]
    places, of_agents = places_of(settings), agents_port(settings)
    called_back = [_port(of_agents)] if of_agents is not None else []
    policies = [_policy("deny-all", {}, [], _resolvers())]
    apart = _roles_on_several_nodes(settings)
    for role in (*roles, *PEOPLE):
        opens = [(_peers([other for other in roles if role in callers[other]]), [_port(PORT)])]
        takes = [(_peers(sorted(callers.get(role, ()))), [_port(PORT)])]
        if role in roles and role != "reward":
            opens.append((_peers(["store"]), [_port(STORE_PORT)]))
        if role in ("actor", "rollout"):
            # each end listens: the actor's rendezvous, and every rank of the collective
            others = _peers(["rollout" if role == "actor" else "actor", *(["rollout"] if role == "rollout" else [])])
            opens.append((others, weights))
            takes.append((others, weights))
        if role in apart:
            opens.append((_peers([role]), ranks))
            takes.append((_peers([role]), ranks))
        for place in places if role == "rollout" else ():
            opens.append((list(place.peers), [_port(port) for port in place.ports]))
            takes.append((list(place.peers), called_back))
        policies.append(_policy(role, {COMPONENT: role}, takes, opens))
    storing = [role for role in roles if role != "reward"]
    policies.append(_policy("store", {COMPONENT: "store"}, [(_peers(storing), [_port(STORE_PORT)])], []))
    rollouts = _peers(["rollout"])
    for place in places:
        if place.is_beside:
            takes, opens = [(rollouts, [_port(port) for port in place.ports])], [(rollouts, called_back)]
            policies.append(_policy(place.name, {COMPONENT: place.name}, takes, opens))
    head = comment(
        "Who may connect to whom: the table of who may call what (proto/rolecall/v1), the store, the weight channel "
        "between actor and rollouts, the nodes of a trainer among themselves, and environments, where there are some. "
        "Names are looked up in kube-system, at NodeLocal DNSCache and in OpenShift's openshift-dns. "
        "Scorers elsewhere, trackers, collectors and object stores need an egress rule of your own, in an overlay. A "
        "pod of people's carries app.kubernetes.io/component: operator or viewer; `kubectl port-forward` needs none."
    )
    return head + dump_all(policies)


def _roles_on_several_nodes(settings: RunSettings) -> set[str]:
    sections: list[tuple[str, TrainerSection | None]] = [("actor", settings.actor), ("critic", settings.critic)]
    sections += [("reference", section) for section in settings.references.values()]
    return {role for role, section in sections if section is not None and nodes_of(section) > 1}


def _resolvers() -> list[Any]:
    """The places where names are looked up: CoreDNS, the cache of a node, and OpenShift, whose policies see the port of
    pods.
    """
    coredns, openshift = (
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}]
        for name in ("kube-system", "openshift-dns")
    )
    dns, of_pods = ([{"port": port, "protocol": protocol} for protocol in ("UDP", "TCP")] for port in (53, 5353))
    return [([*coredns, {"ipBlock": {"cidr": _NODE_LOCAL}}], dns), (openshift, of_pods)]


def _policy(name: str, selected: dict[str, str], takes: list[Any], opens: list[Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": selected} if selected else {},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers, "ports": ports} for peers, ports in takes if peers and ports],
            "egress": [{"to": peers, "ports": ports} for peers, ports in opens if peers and ports],
        },
    }


def _peers(roles: list[str]) -> list[dict[str, Any]]:
    """One selector for all of them; none for nobody."""
    if not roles:
        return []
    return [{"podSelector": {"matchExpressions": [{"key": COMPONENT, "operator": "In", "values": roles}]}}]


def _port(first: int, last: int | None = None) -> dict[str, Any]:
    return {"port": first, "protocol": "TCP"} if last is None else {"port": first, "endPort": last, "protocol": "TCP"}
