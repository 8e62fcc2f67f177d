"""The configuration of an Envoy that is a role's sidecar, made from roles and ports.

One Envoy stands beside each role, as service meshes place them. In: it ends mutual TLS, asks the table of
`rolecall/rpc/callers.py` whether the caller may, says in `x-forwarded-client-cert` who called, and hands the call to
the role. Out: for each role that its own role calls it listens on an address of its own and begins mutual TLS. Every
participant has two addresses of loopback, `here` for its own role and `there` for the other sidecars; the role itself
listens on 127.0.0.1. The port is the same on all three.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolecall.rpc import callers

ADMIN_PORT = 15000
"""Of each sidecar's own questions and answers, on `here`."""
_API = "type.googleapis.com/envoy.extensions."
_FOREVER = "0s"
ISTIO_RETRIES = {
    "retry_on": "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes",
    "num_retries": 2,
}
"""What Istio does unless it is told otherwise."""


@dataclass(frozen=True)
class Participant:
    """One role, or person, of a mesh."""

    name: str
    """Of the worker."""
    spiffe_id: str
    """Which its certificate names."""
    certificate: Path
    """The folder of tls.crt, tls.key and ca.crt."""
    here: str
    """Address of loopback on which its sidecar takes what it calls."""
    there: str
    """Address of loopback on which its sidecar takes calls for it."""
    port: int = 0
    """Of the role; 0 for people, whom nobody calls."""
    calls: tuple[str, ...] = ()
    """Names of those it calls."""


@dataclass(frozen=True)
class Habits:
    """What the sidecars do with calls."""

    rbac: bool = True
    """Whether a sidecar refuses callers that its role would refuse."""
    timeout: str | None = _FOREVER
    """Of a route; None: Envoy's own, which is 15 s."""
    idle_timeout: str | None = _FOREVER
    """Of a stream on which nothing moves; None: Envoy's own, which is five minutes."""
    retries: Mapping[str, Any] = field(default_factory=dict)
    """Retry policies by the beginning of a method's path."""


def config(own: Participant, others: Mapping[str, Participant], run: str, habits: Habits) -> dict[str, Any]:
    """The whole configuration of the sidecar of `own`."""
    listeners = [_outbound(own, others[name], habits) for name in own.calls]
    clusters = [_to_sidecar(own, others[name]) for name in own.calls]
    if own.port:
        listeners.append(_inbound(own, run, habits))
        clusters.append(_cluster("app", "127.0.0.1", own.port))
    return {
        "admin": {"address": _address(own.here, ADMIN_PORT)},
        "layered_runtime": {"layers": [{"name": "admin", "admin_layer": {}}]},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def policies(run: str) -> dict[str, Any]:
    """The policies of Envoy's RBAC filter that equal the table of callers; who has no row there is open to every
    certificate of the mesh.
    """
    methods: dict[frozenset[callers.Caller], list[str]] = defaultdict(list)
    for method, allowed in callers.rules().items():
        methods[allowed].append(method)
    found = {
        "+".join(sorted(allowed)): _policy(
            [{"url_path": {"path": {"exact": method}}} for method in names],
            [{"prefix": f"spiffe://rolecall/rolecall/{run}/{caller}/"} for caller in sorted(allowed)],
        )
        for allowed, names in methods.items()
    }
    services = {method.rpartition("/")[0] for method in callers.rules()}
    ruled = [{"url_path": {"path": {"prefix": f"{service}/"}}} for service in sorted(services)]
    others = {"not_rule": {"or_rules": {"rules": ruled}}}
    return {**found, "others": _policy([others], [{"prefix": f"spiffe://rolecall/rolecall/{run}/"}])}


def _policy(permissions: Sequence[Any], names: Sequence[Any]) -> dict[str, Any]:
    return {
        "permissions": list(permissions),
        "principals": [{"authenticated": {"principal_name": name}} for name in names],
    }


def _outbound(own: Participant, other: Participant, habits: Habits) -> dict[str, Any]:
    route: dict[str, Any] = {"cluster": other.name}
    if habits.timeout is not None:
        route["timeout"] = habits.timeout
    repeated = {prefix: {**route, "retry_policy": dict(policy)} for prefix, policy in habits.retries.items()}
    chain = {"filters": [_http(f"to_{other.name}", {**repeated, "/": route}, habits, [])]}
    return {"name": f"to_{other.name}", "address": _address(own.here, other.port), "filter_chains": [chain]}


def _inbound(own: Participant, run: str, habits: Habits) -> dict[str, Any]:
    filters = [_fault()]
    if habits.rbac:
        rules = {"action": "ALLOW", "policies": policies(run)}
        filters.insert(0, _filter("rbac", "filters.http.rbac.v3.RBAC", rules=rules))
    # as meshes do: deadlines and retries are the caller's sidecar's
    http = _http("inbound", {"/": {"cluster": "app", "timeout": _FOREVER}}, habits, filters)
    http["typed_config"] |= {
        "forward_client_cert_details": "SANITIZE_SET",
        "set_current_client_cert_details": {"uri": True, "subject": True},
    }
    tls = {
        "@type": _API + "transport_sockets.tls.v3.DownstreamTlsContext",
        "require_client_certificate": True,
        "common_tls_context": _tls(own),
    }
    chain = {"transport_socket": {"name": "tls", "typed_config": tls}, "filters": [http]}
    return {"name": "inbound", "address": _address(own.there, own.port), "filter_chains": [chain]}


def _http(name: str, routes: Mapping[str, Any], habits: Habits, filters: Sequence[Any]) -> dict[str, Any]:
    matches = [{"match": {"prefix": prefix}, "route": route} for prefix, route in routes.items()]
    hosts = [{"name": "all", "domains": ["*"], "routes": matches}]
    idle = {} if habits.idle_timeout is None else {"stream_idle_timeout": habits.idle_timeout}
    return _filter(
        "http",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        route_config={"virtual_hosts": hosts},
        http_filters=[*filters, _filter("router", "filters.http.router.v3.Router")],
        **idle,
    )


def _fault() -> dict[str, Any]:
    """Does nothing until the sidecar's runtime says how many in a hundred calls are delayed or refused."""
    never = {"numerator": 0, "denominator": "HUNDRED"}
    return _filter(
        "fault",
        "filters.http.fault.v3.HTTPFault",
        delay={"fixed_delay": "0.2s", "percentage": never},
        abort={"http_status": 503, "percentage": never},
    )


def _filter(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": _API + kind, **fields}}


def _to_sidecar(own: Participant, other: Participant) -> dict[str, Any]:
    tls = _tls(own)
    tls["validation_context"]["match_typed_subject_alt_names"] = [
        {"san_type": "URI", "matcher": {"exact": other.spiffe_id}}
    ]
    typed = {
        "@type": _API + "transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": tls,
    }
    cluster = _cluster(other.name, other.there, other.port)
    return {**cluster, "transport_socket": {"name": "tls", "typed_config": typed}}


def _cluster(name: str, host: str, port: int) -> dict[str, Any]:
    options = {
        "@type": _API + "upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    endpoint = {"lb_endpoints": [{"endpoint": {"address": _address(host, port)}}]}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {"cluster_name": name, "endpoints": [endpoint]},
    }


def _tls(own: Participant) -> dict[str, Any]:
    pair = {
        "certificate_chain": {"filename": str(own.certificate / "tls.crt")},
        "private_key": {"filename": str(own.certificate / "tls.key")},
    }
    return {
        "alpn_protocols": ["h2"],
        "tls_certificates": [pair],
        "validation_context": {"trusted_ca": {"filename": str(own.certificate / "ca.crt")}},
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
