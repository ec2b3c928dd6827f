"""Rules of TCP: what the daemon's configuration, its pod, the service and the policies say of it.

TCP is served with TLS alone, from files that a Secret brings and that are renewed in place; it is
open to named peers, and the service leads to the daemon of the client's own node.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import yaml

PORT_NAME = "grpcs"
_ROLES = {"viewer", "trainer", "operator"}
_KINDS_OF_NAMES = ("URI:", "DNS:", "EMAIL:", "IP:")
_OTHERS = 0o007
_ALL_BUT_OWNER = 0o077
# Kubelet's, when a volume names no mode.
_DEFAULT_MODE = 0o644


class _File(NamedTuple):
    """A file that the configuration names, and how it has to be there."""

    setting: str
    path: str
    # Kinds of volumes that it may come from.
    kinds: tuple[str, ...]
    # Bits that its mode must not have.
    forbidden: int


def configuration(resources: list[dict]) -> dict:
    """Returns the daemon's configuration; empty: there is none."""
    return config_map_file(resources, "optstated.yaml") or {}


def config_map_file(resources: list[dict], name: str) -> dict | None:
    """Returns the content of a YAML file of a ConfigMap."""
    for resource in resources:
        if resource["kind"] == "ConfigMap" and name in resource["data"]:
            return yaml.safe_load(resource["data"][name])
    return None


def tcp_ports(config: dict) -> list[int]:
    """Returns the ports of the TCP addresses that the daemon listens on."""
    addresses = [each for each in config.get("listen", []) if not each.startswith("unix:")]
    return [int(address.rpartition(":")[2]) for address in addresses]


def check_tls(config: dict) -> list[str]:
    """Checks that TCP has TLS, and that clients have one way of saying who they are."""
    tls, access = config.get("tls", {}), config.get("access", {})
    if not tcp_ports(config):
        return ["has TLS and no TCP address"] if tls else []
    faults = []
    if config.get("insecure_tcp") or not (tls.get("certificate_file") and tls.get("key_file")):
        faults.append("listens on TCP without TLS")
    ways = [name for name in ("identities_file", "tokens_file") if access.get(name)]
    if len(ways) != 1 or bool(tls.get("client_ca_file")) != (ways == ["identities_file"]):
        faults.append(f"knows clients by {ways}, client_ca_file {tls.get('client_ca_file')}")
    return faults


def _files(config: dict) -> Iterator[_File]:
    tls, access = config.get("tls", {}), config.get("access", {})
    public = ("configMap", "secret")
    wanted = (
        ("tls.certificate_file", tls, public, 0),
        ("tls.key_file", tls, ("secret",), _OTHERS),
        ("tls.client_ca_file", tls, public, 0),
        ("access.identities_file", access, public, 0),
        ("access.tokens_file", access, ("secret",), _ALL_BUT_OWNER),
    )
    for setting, section, kinds, forbidden in wanted:
        path = section.get(setting.partition(".")[2])
        if path:
            yield _File(setting, path, kinds, forbidden)


def _check_file(file: _File, pod: dict) -> list[str]:
    """Checks that a file is there, readable as the daemon wants it, and renewed in place."""
    path = pathlib.PurePosixPath(file.path)
    mounts = [
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if pathlib.PurePosixPath(mount["mountPath"]) in (path, path.parent)
    ]
    if len(mounts) != 1:
        return [f"{file.setting}: {file.path} is in {len(mounts)} volumes"]
    mount = mounts[0]
    faults = []
    if mount.get("subPath") or mount.get("subPathExpr"):
        faults.append(f"{file.setting}: {file.path} is mounted alone (subPath), and never renewed")
    if mount.get("readOnly") is not True:
        faults.append(f"{file.setting}: {file.path} can be written")
    volume = next(each for each in pod["volumes"] if each["name"] == mount["name"])
    kind = next((kind for kind in file.kinds if kind in volume), None)
    if not kind:
        return [*faults, f"{file.setting}: {file.path} is of no {' or '.join(file.kinds)}"]
    source = volume[kind]
    mode = source.get("defaultMode", _DEFAULT_MODE)
    for item in source.get("items", []):
        if item["path"] == path.name:
            mode = item.get("mode", mode)
            break
    else:
        # A Secret says which keys it has to have: one without is told of when the pod is made.
        if kind == "secret":
            faults.append(f"{file.setting}: the volume names no item {path.name}")
    if mode & file.forbidden:
        faults.append(f"{file.setting}: {file.path} has the mode {mode:04o}, which is refused")
    if source.get("optional"):
        faults.append(f"{file.setting}: {file.path} is optional")
    return faults


def _check_secrets(config: dict, pod: dict) -> list[str]:
    """Checks that a Secret which is mounted is one that the configuration names."""
    folders = {pathlib.PurePosixPath(file.path).parent for file in _files(config)}
    mounts = {
        mount["name"]: pathlib.PurePosixPath(mount["mountPath"])
        for mount in pod["containers"][0]["volumeMounts"]
    }
    return [
        f"has the secret {volume['name']}, which the configuration does not name"
        for volume in pod.get("volumes", [])
        if "secret" in volume and mounts.get(volume["name"]) not in folders
    ]


def check_identities(resources: list[dict], config: dict) -> list[str]:
    """Checks the identities of a ConfigMap that is among the resources."""
    path = config.get("access", {}).get("identities_file")
    if not path:
        return []
    content = config_map_file(resources, pathlib.PurePosixPath(path).name)
    identities = (content or {}).get("identities", [])
    faults = [] if identities else [f"{path} has no identities"]
    for each in identities:
        if not str(each.get("san", "")).startswith(_KINDS_OF_NAMES):
            faults.append(f"identity {each}: its name has no kind")
        user = each.get("user")
        if not isinstance(user, str) or not (user == "root" or user.isdigit()):
            faults.append(f"identity {each}: the image knows no such user")
        if each.get("role") not in _ROLES:
            faults.append(f"identity {each}: there is no such role")
    return faults


def _check_service(service: dict, template: dict, ports: list[int]) -> list[str]:
    spec = service["spec"]
    faults = []
    if spec.get("internalTrafficPolicy") != "Local":
        faults.append("leads to daemons of other nodes, which do not have the client's job")
    if spec.get("type", "ClusterIP") != "ClusterIP":
        faults.append(f"is opened beyond the cluster: {spec['type']}")
    labels = template["metadata"]["labels"].items()
    if not spec.get("selector") or not spec["selector"].items() <= labels:
        faults.append(f"selects {spec.get('selector')}, and pods have {dict(labels)}")
    served = [(each["port"], each["targetPort"]) for each in spec["ports"]]
    if served != [(port, PORT_NAME) for port in ports]:
        faults.append(f"serves {served}, and the daemon listens on {ports}")
    return faults


def check_tcp(resources: list[dict]) -> list[str]:
    """Returns what is wrong with TCP in the manifests of a daemon, or of none."""
    daemons = [resource for resource in resources if resource["kind"] == "DaemonSet"]
    if not daemons:
        return []
    config = configuration(resources)
    template = daemons[0]["spec"]["template"]
    pod = template["spec"]
    ports = tcp_ports(config)
    faults = check_tls(config) + check_identities(resources, config)
    for file in _files(config):
        faults += _check_file(file, pod)
    faults += _check_secrets(config, pod)
    opened = [
        port["containerPort"]
        for port in pod["containers"][0].get("ports", [])
        if port["name"] == PORT_NAME
    ]
    if opened != ports:
        faults.append(f"listens on {ports}, and {PORT_NAME} is {opened}")
    services = [resource for resource in resources if resource["kind"] == "Service"]
    if len(services) != len(ports):
        faults.append(f"has {len(services)} services for the ports {ports}")
    for service in services:
        found = _check_service(service, template, ports)
        faults += [f"service {service['metadata']['name']} {fault}" for fault in found]
    return faults
