"""Checks rendered manifests: the API's schemas, and what we promise of them.

The promises: no rights in the cluster and no capabilities beyond those that a value names; nothing
of the node but the folders of socket, state and disks; a grace period in which the daemon ends its
engines; a port that the network policy opens to somebody named; the chart's defaults are the plain
manifests.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import kubernetes_validate
import yaml

# From the oldest that the chart accepts on: a field that a later one drops is found too.
_VERSIONS = ("1.27", "1.30", "1.34", "1.37")
_KINDS = {"ConfigMap", "DaemonSet", "Job", "Namespace", "NetworkPolicy", "PriorityClass", "Service"}
_HOST_PATHS = {"/run/optstate", "/dev/shm/optstate", "/mnt/nvme0/optstate", "/mnt/nvme1/optstate"}
_CAPABILITIES = {"IPC_LOCK", "SYS_NICE"}
# An operator has schemas of its own, which are not those of the API.
_OF_OPERATOR = {"PodMonitor": "monitoring.coreos.com/v1"}
_NAMESPACES_OF_NODE = ("hostNetwork", "hostPID", "hostIPC")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_NAMED_OTHERWISE = ("metadata", "data")
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


def configuration(resources: list[dict]) -> dict | None:
    for resource in resources:
        if resource["kind"] == "ConfigMap" and "optstated.yaml" in resource["data"]:
            return yaml.safe_load(resource["data"]["optstated.yaml"])
    return None


def check_daemon(resource: dict, config: dict) -> list[str]:
    pod = resource["spec"]["template"]["spec"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    wanted = {config["state_dir"], str(pathlib.Path(config["socket"]).parent)}
    wanted |= set(config.get("nvme", {}).get("directories", []))
    faults = [f"the configuration's {path} is no volume" for path in sorted(wanted - mounts)]
    if pod["terminationGracePeriodSeconds"] <= config["drain_timeout_s"] + _ENGINE_END_S:
        faults.append("is killed before its engines have ended")
    endpoint = f"unix:{config['socket']}"
    probes = [pod["containers"][0].get(kind) for kind in _PROBES]
    if not all(probe and endpoint in probe["exec"]["command"] for probe in probes):
        faults.append("lacks a probe of the daemon's socket")
    return faults


def check_metrics(resources: list[dict]) -> list[str]:
    """Checks that one port is served, named, opened to named peers and scraped, or none at all."""
    of_kind = {resource["kind"]: resource for resource in resources}
    if "DaemonSet" not in of_kind:
        return []
    container = of_kind["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    arguments = container["args"]
    served = arguments[arguments.index("--metrics") + 1] if "--metrics" in arguments else None
    wanted = f"0.0.0.0:{ports['metrics']}" if ports else None
    faults = [] if served == wanted else [f"serves metrics on {served}, has ports {ports}"]
    policy = of_kind.get("NetworkPolicy")
    rules = policy["spec"].get("ingress", []) if policy else []
    opened = [port["port"] for rule in rules for port in rule["ports"]]
    if policy and opened != list(ports):
        faults.append(f"opens {opened}, has ports {ports}")
    if not all(rule.get("from") for rule in rules):
        faults.append("opens a port to everybody")
    for endpoint in of_kind.get("PodMonitor", {}).get("spec", {}).get("podMetricsEndpoints", []):
        if endpoint["port"] not in ports:
            faults.append(f"scrapes {endpoint['port']}, has ports {ports}")
    return faults


def check(resources: list[dict]) -> list[str]:
    faults = check_metrics(resources)
    config = configuration(resources)
    for resource in resources:
        found = check_schema(resource)
        if resource["kind"] not in _KINDS | _OF_OPERATOR.keys():
            found.append("is of a kind that these manifests do not need")
        if resource["kind"] in ("DaemonSet", "Job"):
            found += check_pod(resource["spec"]["template"]["spec"])
        if resource["kind"] == "DaemonSet":
            found += check_daemon(resource, config or {})
        faults += [f"{resource['kind']} {resource['metadata']['name']}: {fault}" for fault in found]
    return faults


def comparable(resources: list[dict]) -> dict:
    """Returns a manifest without the names and labels in which kustomize and helm differ."""
    out = {}
    for resource in resources:
        if resource["kind"] == "Namespace":
            continue
        resource = {key: value for key, value in resource.items() if key not in _NAMED_OTHERWISE}
        if resource["kind"] == "DaemonSet":
            template = resource["spec"]["template"]
            template["metadata"].pop("annotations", None)
            for volume in template["spec"]["volumes"]:
                volume.pop("configMap", None)
        out[resource["kind"]] = resource
    out["configuration"] = configuration(resources)
    return out


def load(path: pathlib.Path) -> list[dict]:
    return [resource for resource in yaml.safe_load_all(path.read_text()) if resource]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--configuration", type=pathlib.Path, help="writes the daemon's into this folder, no more"
    )
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.configuration:
        for path in arguments.files:
            text = yaml.safe_dump(configuration(load(path)))
            (arguments.configuration / f"{path.stem}.optstated.yaml").write_text(text)
        return
    faults = []
    for path in arguments.files:
        resources = load(path)
        found = check(resources)
        faults += [f"{path.name}: {fault}" for fault in found]
        print(f"{path.stem}: {len(resources)} resources, Kubernetes {' '.join(_VERSIONS)}")
    plain, chart = (
        comparable(load(next(path for path in arguments.files if path.stem == stem)))
        for stem in ("base", "chart")
    )
    faults += [
        f"{kind}: the chart's defaults are not what base/ has"
        for kind in plain
        if plain[kind] != chart.get(kind)
    ]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
