"""Breaks the rendered manifests, one promise at a time: check_manifests.py has to find each fault.

Usage: check_manifests_test.py FOLDER, in which deploy/kubernetes/check has rendered them.
"""

from __future__ import annotations

import copy
import pathlib
import sys
import unittest
import unittest.mock
from collections.abc import Callable

import check_manifests
import tcp_rules
import yaml

_FOLDER = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else pathlib.Path()


def of_kind(resources: list[dict], kind: str, name: str = "") -> dict:
    """Returns the one resource of a kind whose name begins like this."""
    found = [
        each
        for each in resources
        if each["kind"] == kind and each["metadata"]["name"].startswith(name)
    ]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def pod(resources: list[dict]) -> dict:
    return of_kind(resources, "DaemonSet")["spec"]["template"]["spec"]


def volume(resources: list[dict], name: str) -> dict:
    return next(each for each in pod(resources)["volumes"] if each["name"] == name)


def mount(resources: list[dict], name: str) -> dict:
    mounts = pod(resources)["containers"][0]["volumeMounts"]
    return next(each for each in mounts if each["name"] == name)


def rewrite(resources: list[dict], file: str, change: Callable[[dict], object]) -> None:
    """Changes the content of a YAML file in a ConfigMap."""
    for resource in resources:
        if resource["kind"] == "ConfigMap" and file in resource["data"]:
            content = yaml.safe_load(resource["data"][file])
            change(content)
            resource["data"][file] = yaml.safe_dump(content)


def config(change: Callable[[dict], object]) -> Callable[[list[dict]], None]:
    return lambda resources: rewrite(resources, "optstated.yaml", change)


def identity(**changes: object) -> Callable[[list[dict]], None]:
    return lambda resources: rewrite(
        resources, "identities.yaml", lambda content: content["identities"][0].update(changes)
    )


def remove(kind: str, name: str = "") -> Callable[[list[dict]], None]:
    return lambda resources: resources.remove(of_kind(resources, kind, name))


def service(**changes: object) -> Callable[[list[dict]], None]:
    return lambda resources: of_kind(resources, "Service")["spec"].update(changes)


def policy(name: str, change: Callable[[dict], object]) -> Callable[[list[dict]], None]:
    return lambda resources: change(of_kind(resources, "NetworkPolicy", name)["spec"])


def set_secret(**changes: object) -> Callable[[list[dict]], None]:
    return lambda resources: volume(resources, "tls")["secret"].update(changes)


def key_in_config_map(resources: list[dict]) -> None:
    volume(resources, "tls")["configMap"] = volume(resources, "tls").pop("secret")


def forget_item(name: str) -> Callable[[list[dict]], None]:
    def forget(resources: list[dict]) -> None:
        items = volume(resources, "tls")["secret"]["items"]
        items[:] = [each for each in items if each["path"] != name]

    return forget


# Each: what is done to the manifests of base and tls, and what is said of it.
_BREAKS = {
    "TCP without TLS": (config(lambda c: c.pop("tls")), "TCP without TLS"),
    "TCP said to be insecure": (config(lambda c: c.update(insecure_tcp=True)), "without TLS"),
    "TLS without a key": (config(lambda c: c["tls"].pop("key_file")), "without TLS"),
    "TLS without TCP": (config(lambda c: c.pop("listen")), "TLS and no TCP"),
    "no CA of clients": (config(lambda c: c["tls"].pop("client_ca_file")), "knows clients by"),
    "no identities": (config(lambda c: c.pop("access")), "knows clients by []"),
    "tokens beside identities": (
        config(lambda c: c["access"].update(tokens_file="/etc/optstate-access/tokens.yaml")),
        "knows clients by ['identities_file', 'tokens_file']",
    ),
    "a port that is not the pod's": (
        config(lambda c: c.update(listen=["0.0.0.0:7601"])),
        "listens on [7601]",
    ),
    "a file of no volume": (
        config(lambda c: c["tls"].update(key_file="/etc/elsewhere/tls.key")),
        "tls.key_file: /etc/elsewhere/tls.key is in 0 volumes",
    ),
    "a configuration that another replaced": (
        config(lambda c: [c.pop("listen"), c.pop("tls"), c.pop("access")]),
        "has the secret tls, which the configuration does not name",
    ),
    "a part of a volume": (
        lambda r: mount(r, "tls").update(subPath="tls.key"),
        "mounted alone (subPath)",
    ),
    "a volume to be written": (
        lambda r: mount(r, "tls").pop("readOnly"),
        "tls.key can be written",
    ),
    "a key for all": (set_secret(defaultMode=0o444), "has the mode 0444"),
    "a key without a mode": (lambda r: volume(r, "tls")["secret"].pop("defaultMode"), "mode 0644"),
    "a key in a ConfigMap": (key_in_config_map, "tls.key is of no secret"),
    "a secret that may be absent": (set_secret(optional=True), "is optional"),
    "no CA in the secret": (forget_item("ca.crt"), "names no item ca.crt"),
    "an identity without a kind": (identity(san="alice"), "its name has no kind"),
    "an unknown user": (identity(user="alice"), "knows no such user"),
    "a number for a user": (identity(user=10001), "knows no such user"),
    "an unknown role": (identity(role="admin"), "no such role"),
    "an empty list of identities": (
        lambda r: rewrite(r, "identities.yaml", lambda content: content["identities"].clear()),
        "has no identities",
    ),
    "no service": (remove("Service"), "has 0 services"),
    "a service of all nodes": (service(internalTrafficPolicy="Cluster"), "of other nodes"),
    "a service for the world": (service(type="NodePort"), "beyond the cluster"),
    "a service of other pods": (service(selector={"app": "other"}), "selects"),
    "a service of another port": (
        service(ports=[{"port": 443, "targetPort": "grpcs"}]),
        "serves [(443, 'grpcs')]",
    ),
    "no policy for TCP": (remove("NetworkPolicy", "optstated-tcp"), "policies open []"),
    "a policy for all peers": (
        policy("optstated-tcp", lambda spec: spec["ingress"][0].pop("from")),
        "opens a port to everybody",
    ),
    "a policy for an empty peer": (
        policy("optstated-tcp", lambda spec: spec["ingress"][0].update({"from": [{}]})),
        "opens a port to everybody",
    ),
    "a policy for all ports": (
        policy("optstated-tcp", lambda spec: spec["ingress"][0].pop("ports")),
        "policies open [None]",
    ),
    "a policy of other pods": (
        policy("optstated-tcp", lambda spec: spec.update(podSelector={})),
        "a policy is for {}",
    ),
    "a policy that lets it out": (
        policy("optstated-tcp", lambda spec: spec.update(egress=[{}])),
        "lets the daemon out",
    ),
    "an open daemon": (
        lambda r: [
            r.remove(each)
            for each in list(r)
            if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "optstated"
        ],
        "no policy closes both directions",
    ),
    "no namespace": (
        lambda r: of_kind(r, "Service")["metadata"].pop("namespace"),
        "Service optstated: has no namespace",
    ),
    "a folder of the node": (
        lambda r: volume(r, "access").update(hostPath={"path": "/etc"}),
        "mounts the node's /etc",
    ),
    "a namespace that admits no hostPath": (
        lambda r: of_kind(r, "Namespace")["metadata"]["labels"].update(
            {"pod-security.kubernetes.io/enforce": "restricted"}
        ),
        "its pods take privileged",
    ),
}


class CheckManifestsTest(unittest.TestCase):
    maxDiff = None

    def rendered(self, name: str) -> list[dict]:
        return check_manifests.load(_FOLDER / f"{name}.yaml")

    def test_nothing_is_found_in_what_is_right(self) -> None:
        self.assertEqual(check_manifests.check(self.rendered("tls")), [])

    def test_every_break_is_found(self) -> None:
        right = self.rendered("tls")
        # The schemas take seconds, and have a test of their own.
        schemas = unittest.mock.patch.object(check_manifests, "check_schema", return_value=[])
        self.enterContext(schemas)
        for name, (break_, said) in _BREAKS.items():
            with self.subTest(name):
                broken = copy.deepcopy(right)
                break_(broken)
                self.assertNotEqual(broken, right)
                self.assertIn(said, "\n".join(check_manifests.check(broken)))

    def test_a_field_that_the_api_does_not_know_is_found(self) -> None:
        broken = of_kind(self.rendered("tls"), "Service")
        self.assertEqual(check_manifests.check_schema(broken), [])
        broken["spec"]["internalTraficPolicy"] = broken["spec"].pop("internalTrafficPolicy")
        found = "\n".join(check_manifests.check_schema(broken))
        for version in ("1.27", "1.37"):
            self.assertIn(f"Kubernetes {version}", found)

    def test_tokens_for_the_group_are_found(self) -> None:
        broken = self.rendered("chart_tokens")
        self.assertEqual(tcp_rules.check_tcp(broken), [])
        volume(broken, "access")["secret"]["defaultMode"] = 0o440
        self.assertIn("mode 0440, which is refused", "\n".join(tcp_rules.check_tcp(broken)))

    def test_disks_that_another_configuration_hides_are_found(self) -> None:
        broken = self.rendered("all")
        self.assertEqual(check_manifests.check(broken), [])
        rewrite(broken, "optstated.yaml", lambda content: content.pop("nvme"))
        self.assertIn(
            "nvme/0 is not in the configuration", "\n".join(check_manifests.check(broken))
        )

    def test_a_job_over_tcp_has_nothing_of_the_node(self) -> None:
        broken = self.rendered("example_tls")
        self.assertEqual(check_manifests.check(broken), [])
        template = of_kind(broken, "Job")["spec"]["template"]["spec"]
        template["volumes"].append({"name": "run", "hostPath": {"path": "/run/optstate"}})
        self.assertIn("its pods take privileged", "\n".join(check_manifests.check(broken)))

    def test_rules_that_differ_are_found(self) -> None:
        for name in ("metrics", "chart_metrics"):
            with self.subTest(name):
                broken = self.rendered(name)
                self.assertEqual(check_manifests.check_rules(broken), [])
                (group,) = of_kind(broken, "PrometheusRule")["spec"]["groups"]
                self.assertNotEqual(group["rules"], [])
                group["rules"][-1]["for"] = "1s"
                self.assertIn("copy_alerts", "\n".join(check_manifests.check(broken)))

    def test_a_chart_that_differs_is_found(self) -> None:
        rendered = {
            name: check_manifests.comparable(self.rendered(name))
            for name in ("base", "chart", "metrics", "chart_metrics", "tls", "chart_tls")
        }
        self.assertEqual(check_manifests.compare(rendered), [])
        rendered["chart_tls"].pop("Service optstated")
        rendered["chart"]["optstated.yaml"] = {}
        rendered["chart_metrics"].pop("PrometheusRule optstated")
        self.assertEqual(
            sorted(check_manifests.compare(rendered)),
            [
                "PrometheusRule optstated: chart_metrics is not what metrics has",
                "Service optstated: chart_tls is not what tls has",
                "optstated.yaml: chart is not what base has",
            ],
        )


if __name__ == "__main__":
    unittest.main()
