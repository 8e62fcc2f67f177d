"""The part that names the run and its roles to a mesh and to cert-manager: a kustomize component each, beside the
base.
"""

from collections.abc import Iterable
from typing import Any

from rolecall.manifests.completed import PORT
from rolecall.manifests.environment import agents_port, are_named, places_of
from rolecall.manifests.policies import COMPONENT, PEOPLE, callers_by_role
from rolecall.manifests.render import comment, dump_all, render
from rolecall.rpc.callers import rules
from rolecall.settings import RunSettings


def certificates(run: str, roles: list[str], settings: RunSettings) -> dict[str, str]:
    """cert-manager's certificates: one for each role and kind of people, with the identity that rpc.spiffe_id says."""
    made: list[dict[str, Any]] = [
        _object("cert-manager.io/v1", "Issuer", "self-signed", {"selfSigned": {}}),
        _object("cert-manager.io/v1", "Certificate", "ca", {
            "isCA": True, "commonName": f"rolecall {run}", "secretName": "tls-ca", "duration": "8760h",
            "privateKey": {"algorithm": "ECDSA", "size": 256}, "issuerRef": {"name": "self-signed", "kind": "Issuer"},
        }),
        _object("cert-manager.io/v1", "Issuer", "run", {"ca": {"secretName": "tls-ca"}}),
    ]  # fmt: skip
    names = {"reference": [f"reference-{name}" for name in settings.references]}
    environments = {place.name: [place.host] for place in places_of(settings) if place.is_ours}
    names |= environments
    if are_named(settings):
        names["rollout"] = ["rollout", f"*.rollout.{run}.svc.cluster.local"]
    for role in (*roles, *PEOPLE, *environments):
        identity = settings.rpc.spiffe_id.removesuffix("/{instance}").replace("{run}", run).replace("{role}", role)
        spec = {
            "secretName": f"tls-{role}",
            "duration": "24h",
            "renewBefore": "8h",
            "dnsNames": [*names.get(role, [role]), "localhost"],
            **({} if role in environments else {"uris": [identity]}),  # an environment calls no role
            "usages": ["server auth", "client auth"],
            "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            "issuerRef": {"name": "run", "kind": "Issuer"},
        }
        made.append(_object("cert-manager.io/v1", "Certificate", role, spec))
    head = comment(
        "A CA of the run and a certificate for each role, which every pod of it shares: the SPIFFE URI is what the "
        "others know it by, and `localhost` is for the probes. Renewed every 16 hours; the roles read the new files by "
        "themselves. Secrets: tls-<role>."
    )
    return {
        "cert-manager/kustomization.yaml": render("cert-manager-kustomization.yaml", {}),
        "cert-manager/certificates.yaml": head + dump_all(made),
    }


def istio(roles: list[str], hosts: list[str], settings: RunSettings) -> dict[str, str]:
    """Istio's words for the services `hosts` and the environments: who may call what, by the same table, and no
    timeout, no retry of the mesh's.
    """
    run, of_agents = settings.run.name, agents_port(settings)
    ours = [place for place in places_of(settings) if place.is_ours]
    callers = callers_by_role(roles)
    policies = [_object("security.istio.io/v1", "AuthorizationPolicy", "deny-all", {})]
    policies += [_allowed(run, role, sorted(callers[role])) for role in roles if callers[role]]
    policies += _ways(settings)
    routes = []
    for host in dict.fromkeys([*hosts, *(place.host for place in ours)]):
        names = [host, *([f"*.rollout.{run}.svc.cluster.local"] if host == "rollout" else [])]
        ways = [_route(host)]
        if host == "rollout" and of_agents is not None:
            ways = [_route(host, PORT), _route(host, of_agents)]
        routes.append(_object("networking.istio.io/v1", "VirtualService", host, {"hosts": names, "http": ways}))
    traffic = {
        "connectionPool": {"http": {"http2MaxRequests": 10000}},
        "tls": {"mode": "ISTIO_MUTUAL"},
    }
    ports = dict.fromkeys(
        [PORT, *(port for place in ours for port in place.mesh_ports), *([of_agents] if of_agents is not None else [])]
    )
    host = f"*.{run}.svc.cluster.local"
    rest = [
        _object("security.istio.io/v1", "PeerAuthentication", "strict", {"mtls": {"mode": "STRICT"}}),
        _object("networking.istio.io/v1", "DestinationRule", "run", {"host": host, "trafficPolicy": traffic}),
    ]
    rules_head = comment(
        "The table of who may call what (proto/rolecall/v1), which the roles hold, too. Health is for all of the run."
    )
    traffic_head = comment(
        "Train, Generate and a watch last as long as they last: calls have deadlines of their own, and are repeated by "
        "whoever knows what may be. So no timeout of the mesh's, no retry, no bound that a busy run meets."
    )
    return {
        "istio/kustomization.yaml": render("istio-kustomization.yaml", {}),
        "istio/annotations.yaml": render("istio-annotations.yaml", {"ports": ",".join(map(str, ports))}),
        "istio/network.yaml": render("istio-network.yaml", {}),
        "istio/operator.yaml": render("istio-operator.yaml", {}),
        "istio/authorization.yaml": rules_head + dump_all(policies),
        "istio/traffic.yaml": traffic_head + dump_all(rest + routes),
    }


def _route(host: str, port: int | None = None) -> dict[str, Any]:
    """The way to a service; `port`: of one that has several."""
    matched = {} if port is None else {"match": [{"port": port}]}
    to = {"host": host, **({} if port is None else {"port": {"number": port}})}
    return {**matched, "route": [{"destination": to}], "timeout": "0s", "retries": {"attempts": 0}}


def _ways(settings: RunSettings) -> list[dict[str, Any]]:
    """Returns what rollouts and environments may ask of each other; AuthorizationPolicies of a pod add up."""
    run, places, of_agents = settings.run.name, places_of(settings), agents_port(settings)
    made = [
        (place.name, place.name, _rule(run, ["rollout"], place.mesh_ports, "/rolecall.v1.EnvironmentService/*"))
        for place in places
        if place.is_ours
    ]
    if of_agents is not None:
        made.append(("agents", "rollout", _rule(run, [place.name for place in places], (of_agents,), "/v1/*")))
    return [
        _object(
            "security.istio.io/v1",
            "AuthorizationPolicy",
            name,
            {"selector": {"matchLabels": {COMPONENT: role}}, "action": "ALLOW", "rules": [rule]},
        )
        for name, role, rule in made
    ]


def _rule(run: str, callers: list[str], ports: Iterable[int], path: str) -> dict[str, Any]:
    return {
        "from": [{"source": {"principals": [f"cluster.local/ns/{run}/sa/{caller}" for caller in callers]}}],
        "to": [{"operation": {"ports": list(map(str, ports)), "paths": [path]}}],
    }


def _allowed(run: str, role: str, callers: list[str]) -> dict[str, Any]:
    """The methods of one role, each group of them with those who may call it."""
    service = f"/rolecall.v1.{role.capitalize()}Service/"
    methods: dict[tuple[str, ...], list[str]] = {}
    for method, may in rules().items():
        if method.startswith(service):
            there = tuple(sorted({caller.value for caller in may} & set(callers)))
            methods.setdefault(there, []).append(method)
    if role == "reward":
        methods[tuple(callers)] = [service + "*"]
    allowed = [
        {"from": [{"source": {"principals": [f"cluster.local/ns/{run}/sa/{caller}" for caller in may]}}],
         "to": [{"operation": {"paths": sorted(paths)}}]}
        for may, paths in sorted(methods.items())
        if may
    ]  # fmt: skip
    health = {
        "from": [{"source": {"namespaces": [run]}}],
        "to": [{"operation": {"paths": ["/grpc.health.v1.Health/*"]}}],
    }
    spec = {"selector": {"matchLabels": {COMPONENT: role}}, "action": "ALLOW", "rules": [*allowed, health]}
    return _object("security.istio.io/v1", "AuthorizationPolicy", role, spec)


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
