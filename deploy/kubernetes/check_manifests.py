"""Checks rendered manifests: the API's schemas, and what we promise of them.

The promises: no rights in the cluster and no capabilities beyond those that a value names; nothing
of the node but the folders of socket, state and disks; a grace period in which the daemon ends its
engines; ports that network policies open to somebody named; TCP with TLS alone (tcp_rules.py); the
chart's values make the plain manifests; rules for alerts are those of deploy/prometheus.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import kubernetes_validate
import tcp_rules
import yaml

# From the oldest that the chart accepts on: a field that a later one drops is found too.
_VERSIONS = ("1.27", "1.30", "1.34", "1.37")
_KINDS = {"ConfigMap", "DaemonSet", "Job", "Namespace", "NetworkPolicy", "PriorityClass", "Service"}
_HOST_PATHS = {"/run/optstate", "/dev/shm/optstate", "/mnt/nvme0/optstate", "/mnt/nvme1/optstate"}
_CAPABILITIES = {"IPC_LOCK", "SYS_NICE"}
# An operator has schemas of its own, which are not those of the API.
_OF_OPERATOR = {
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
_ALERTS = pathlib.Path(__file__).resolve().parents[1] / "prometheus" / "alerts.yaml"
_OF_NO_NAMESPACE = {"Namespace", "PriorityClass"}
_NAMESPACES_OF_NODE = ("hostNetwork", "hostPID", "hostIPC")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_NAMED_OTHERWISE = ("metadata", "data")
# Pairs of a manifest and the chart with values that make the same.
_PAIRS = (("base", "chart"), ("metrics", "chart_metrics"), ("tls", "chart_tls"))
# An engine that does not answer has this long beyond drain_timeout_s.
_ENGINE_END_S = 20


def check_schema(resource: dict) -> list[str]:
    faults = []
    if resource["kind"] in _OF_OPERATOR:
        if resource["apiVersion"] != _OF_OPERATOR[resource["kind"]]:
            faults.append(f"is of {resource['apiVersion']}")
        return faults
    for version in _VERSIONS:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            faults.append(f"Kubernetes {version}: {error}")
    return faults


def check_container(container: dict) -> list[str]:
    security = container.get("securityContext", {})
    capabilities = security.get("capabilities", {})
    faults = []
    for mount in container.get("volumeMounts", []):
        if "subPath" in mount or "subPathExpr" in mount:
            faults.append(f"mounts a part of {mount['name']}, which is never renewed")
    if security.get("privileged") or security.get("allowPrivilegeEscalation") is not False:
        faults.append("may gain privileges")
    if not security.get("readOnlyRootFilesystem"):
        faults.append("may write to its root file system")
    if capabilities.get("drop") != ["ALL"] or not set(capabilities.get("add", [])) <= _CAPABILITIES:
        faults.append(f"has capabilities: {capabilities}")
    if "memory" not in container["resources"]["limits"]:
        faults.append("has no memory limit, although its state counts as memory")
    for kind in _PROBES:
        probe = container.get(kind)
        if probe and float(probe["exec"]["command"][4]) >= probe["timeoutSeconds"]:
            faults.append(f"{kind} is killed before optctl gives up")
    return faults


def check_pod(pod: dict) -> list[str]:
    faults = [f"uses the node's {field}" for field in _NAMESPACES_OF_NODE if pod.get(field)]
    if pod.get("automountServiceAccountToken") is not False:
        faults.append("has a token of the API")
    if pod.get("securityContext", {}).get("seccompProfile", {}).get("type") != "RuntimeDefault":
        faults.append("has no seccomp profile")
    for volume in pod.get("volumes", []):
        path = volume.get("hostPath", {}).get("path")
        if path and path not in _HOST_PATHS:
            faults.append(f"mounts the node's {path}")
    for container in pod["containers"]:
        faults += [f"{container['name']} {fault}" for fault in check_container(container)]
    return faults


def check_daemon(resource: dict, config: dict) -> list[str]:
    pod = resource["spec"]["template"]["spec"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    wanted = {config["state_dir"], str(pathlib.Path(config["socket"]).parent)}
    wanted |= set(config.get("nvme", {}).get("directories", []))
    faults = [f"the configuration's {path} is no volume" for path in sorted(wanted - mounts)]
    # One of two components that each have an optstated.yaml, of which the last counts.
    of_disks = {path for path in mounts if path.startswith("/var/lib/optstate/nvme/")}
    faults += [f"the volume {path} is not in the configuration" for path in of_disks - wanted]
    if pod["terminationGracePeriodSeconds"] <= config["drain_timeout_s"] + _ENGINE_END_S:
        faults.append("is killed before its engines have ended")
    endpoint = f"unix:{config['socket']}"
    probes = [pod["containers"][0].get(kind) for kind in _PROBES]
    if not all(probe and endpoint in probe["exec"]["command"] for probe in probes):
        faults.append("lacks a probe of the daemon's socket")
    return faults


def check_metrics(resources: list[dict]) -> list[str]:
    """Checks that metrics are served on their port and scraped there, or not at all."""
    faults = []
    for resource in resources:
        if resource["kind"] != "DaemonSet":
            continue
        container = resource["spec"]["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        arguments = container["args"]
        served = arguments[arguments.index("--metrics") + 1] if "--metrics" in arguments else None
        if served != (f"0.0.0.0:{ports['metrics']}" if "metrics" in ports else None):
            faults.append(f"serves metrics on {served}, has ports {ports}")
        monitors = [each for each in resources if each["kind"] == "PodMonitor"]
        for endpoint in (each for one in monitors for each in one["spec"]["podMetricsEndpoints"]):
            if endpoint["port"] not in ports:
                faults.append(f"scrapes {endpoint['port']}, has ports {ports}")
    return faults


def check_rules(resources: list[dict]) -> list[str]:
    """Checks that rules for alerts are those that deploy/prometheus has, and tests."""
    wanted = yaml.safe_load(_ALERTS.read_text())
    return [
        f"{each['kind']} {each['metadata']['name']}: its rules are not those of "
        "deploy/prometheus/alerts.yaml; deploy/kubernetes/copy_alerts copies them"
        for each in resources
        if each["kind"] == "PrometheusRule" and each["spec"] != wanted
    ]


def check_policies(resources: list[dict]) -> list[str]:
    """Checks that network policies close the daemon, but for its ports to named peers."""
    daemons = [resource for resource in resources if resource["kind"] == "DaemonSet"]
    policies = [each["spec"] for each in resources if each["kind"] == "NetworkPolicy"]
    if not daemons or not policies:
        return []
    template = daemons[0]["spec"]["template"]
    faults = []
    if ["Ingress", "Egress"] not in [policy["policyTypes"] for policy in policies]:
        faults.append("no policy closes both directions")
    for policy in policies:
        if policy["podSelector"].get("matchLabels") != template["metadata"]["labels"]:
            faults.append(f"a policy is for {policy['podSelector']}")
        if policy.get("egress"):
            faults.append("a policy lets the daemon out")
    rules = [rule for policy in policies for rule in policy.get("ingress", [])]
    opened = [port.get("port") for rule in rules for port in rule.get("ports", [{}])]
    ports = [port["name"] for port in template["spec"]["containers"][0].get("ports", [])]
    if sorted(map(str, opened)) != sorted(ports):
        faults.append(f"policies open {opened}, has ports {ports}")
    if not all(rule.get("from") and all(rule["from"]) for rule in rules):
        faults.append("a policy opens a port to everybody")
    return faults


def check_admission(namespace: dict, resources: list[dict]) -> list[str]:
    """Checks that a namespace lets pods have folders of the node only when one does."""
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    pods = [
        each["spec"]["template"]["spec"]
        for each in resources
        if each["kind"] in ("DaemonSet", "Job")
    ]
    uses_node = any("hostPath" in volume for pod in pods for volume in pod.get("volumes", []))
    wanted = "privileged" if uses_node else "restricted"
    return [] if level == wanted else [f"admits {level}, and its pods take {wanted}"]


def check(resources: list[dict]) -> list[str]:
    faults = check_metrics(resources) + check_rules(resources)
    faults += check_policies(resources) + tcp_rules.check_tcp(resources)
    config = tcp_rules.configuration(resources)
    for resource in resources:
        found = check_schema(resource)
        named = "namespace" in resource["metadata"]
        if named == (resource["kind"] in _OF_NO_NAMESPACE):
            found.append("has a namespace" if named else "has no namespace of its own")
        if resource["kind"] not in _KINDS | _OF_OPERATOR.keys():
            found.append("is of a kind that these manifests do not need")
        if resource["kind"] in ("DaemonSet", "Job"):
            found += check_pod(resource["spec"]["template"]["spec"])
        if resource["kind"] == "Namespace":
            found += check_admission(resource, resources)
        if resource["kind"] == "DaemonSet":
            found += check_daemon(resource, config)
        faults += [f"{resource['kind']} {resource['metadata']['name']}: {fault}" for fault in found]
    return faults


def comparable(resources: list[dict]) -> dict:
    """Returns a manifest without the names and labels in which kustomize and helm differ."""
    out = {}
    for resource in resources:
        if resource["kind"] == "Namespace":
            continue
        name = resource["metadata"]["name"]
        resource = {key: value for key, value in resource.items() if key not in _NAMED_OTHERWISE}
        if resource["kind"] == "DaemonSet":
            template = resource["spec"]["template"]
            template["metadata"].pop("annotations", None)
            for volume in template["spec"]["volumes"]:
                volume.pop("configMap", None)
            # Components come in any order.
            container = template["spec"]["containers"][0]
            for part in (
                template["spec"]["volumes"],
                container["volumeMounts"],
                container.get("ports", []),
            ):
                part.sort(key=lambda each: each["name"])
        if resource["kind"] != "ConfigMap":
            out[f"{resource['kind']} {name}"] = resource
    for name in ("optstated.yaml", "identities.yaml"):
        out[name] = tcp_rules.config_map_file(resources, name)
    return out


def load(path: pathlib.Path) -> list[dict]:
    return [resource for resource in yaml.safe_load_all(path.read_text()) if resource]


def write_configuration(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes what --check-config reads: the configuration, whose certificates are in `folder`."""
    resources = load(path)
    access = folder / f"{path.stem}.access"
    access.mkdir()
    text = yaml.safe_dump(tcp_rules.configuration(resources))
    text = text.replace("/etc/optstate-tls", str(folder)).replace(
        "/etc/optstate-access", str(access)
    )
    (folder / f"{path.stem}.optstated.yaml").write_text(text)
    identities = tcp_rules.config_map_file(resources, "identities.yaml")
    (access / "identities.yaml").write_text(yaml.safe_dump(identities or {}))


def compare(rendered: dict[str, dict]) -> list[str]:
    """Returns in what the chart differs from the plain manifests."""
    faults = []
    for plain, chart in _PAIRS:
        for part in rendered[plain].keys() | rendered[chart].keys():
            if rendered[plain].get(part) != rendered[chart].get(part):
                faults.append(f"{part}: {chart} is not what {plain} has")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--configuration", type=pathlib.Path, help="writes the daemon's into this folder, no more"
    )
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.configuration:
        for path in arguments.files:
            write_configuration(path, arguments.configuration)
        return
    faults = []
    rendered = {}
    for path in arguments.files:
        resources = load(path)
        faults += [f"{path.name}: {fault}" for fault in check(resources)]
        rendered[path.stem] = comparable(resources)
        print(f"{path.stem}: {len(resources)} resources, Kubernetes {' '.join(_VERSIONS)}")
    faults += compare(rendered)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
