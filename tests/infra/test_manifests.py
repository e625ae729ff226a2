"""The manifests of infra/kserve: strict schemas, rules over all documents, and errors planted to be found."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.infra.conftest import KSERVE, Rendered
from tests.infra.policies import Document, Documents, container, findings, of_kind
from tests.infra.schemas import kserve_schema
from tests.infra.sizes import NODE_CPU, NODE_GIB, NODES, unplaced

pytestmark = pytest.mark.slow  # kubectl is a process

GUIDE = (KSERVE.parents[1] / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")
OVERLAYS = sorted(path.name for path in (KSERVE / "overlays").iterdir())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_has_no_finding(rendered: Rendered, overlay: str) -> None:
    documents = rendered(f"overlays/{overlay}")
    assert len(of_kind(documents, "InferenceService")) == 2
    assert findings(documents) == []


def test_a_configmap_with_rules_reaches_the_slots() -> None:
    slot = yaml.safe_load((KSERVE / "slot" / "inferenceservice.yaml").read_text())["spec"]["predictor"]
    [volume] = [one for one in slot["volumes"] if one["name"] == "rules"]
    assert volume["configMap"] == {"name": "checkout-rules", "optional": True}
    [container] = slot["containers"]
    [mount] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "rules"]
    [file] = [one["value"] for one in container["env"] if one["name"] == "RECO_RULES_FILE"]
    assert file == f"{mount}/rules.yaml"


def test_trusted_keys_are_mounted_and_may_be_named(production: Documents) -> None:
    [shared] = [one for one in of_kind(production, "ConfigMap") if "RECO_STORE_URL" in one["data"]]
    shared["data"]["RECO_TRUSTED_KEYS"] = "/etc/reco/trusted"
    assert findings(production) == []
    for slot in of_kind(production, "InferenceService"):
        predictor = slot["spec"]["predictor"]
        [volume] = [one for one in predictor["volumes"] if one["name"] == "trusted-keys"]
        assert volume["configMap"] == {"name": "checkout-trusted-keys", "optional": True}
        mounts = {one["name"]: one["mountPath"] for one in predictor["containers"][0]["volumeMounts"]}
        assert mounts["trusted-keys"] == "/etc/reco/trusted"


@pytest.mark.parametrize(
    ("overlay", "expected"), [("staging", set()), ("small", {"InferenceService"})], ids=["staging", "small"]
)
def test_the_overlays_differ_in_size_and_place_alone(
    rendered: Rendered, overlay: str, expected: set[str]
) -> None:
    other, production = (
        {(one["kind"], one["metadata"]["name"]): one for one in rendered(f"overlays/{name}")}
        for name in (overlay, "production")
    )
    assert other.keys() == production.keys()
    differ = {kind for kind, name in other if other[kind, name] != production[kind, name]}
    assert differ == {"ConfigMap", "HTTPRoute", "ScaledObject"} | expected


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pods_of_an_overlay_fit_the_nodes_of_its_profile(rendered: Rendered, overlay: str) -> None:
    file = KSERVE.parent / "terraform" / "environments" / f"{overlay}.tfvars"
    profile = file.read_text(encoding="utf-8")
    assert unplaced(rendered(f"overlays/{overlay}"), profile) == []
    smaller = re.sub(
        r"^(nodes .+max = )(\d+)", lambda m: f"{m[1]}{int(m[2]) - 1}", profile, flags=re.MULTILINE
    )
    found = unplaced(rendered(f"overlays/{overlay}"), smaller)
    assert "during a release" in " ".join(found), "more nodes than it needs"


def test_the_guide_names_the_profile_whose_nodes_are_too_small_for_a_training_step() -> None:
    root = KSERVE.parents[1]
    steps = re.findall(
        r'cpu="(\d+)", memory="(\d+)Gi"', (root / "pipelines" / "training.py").read_text(encoding="utf-8")
    )
    cpu, gib = (max(map(int, wanted)) for wanted in zip(*steps, strict=True))
    too_small = set()
    for overlay in OVERLAYS:
        file = root / "infra" / "terraform" / "environments" / f"{overlay}.tfvars"
        [kind] = re.findall(r'^nodes += { type = "(.+?)"', file.read_text(encoding="utf-8"), re.MULTILINE)
        if NODES[kind][0] - NODE_CPU < cpu or NODES[kind][1] - NODE_GIB < gib:
            too_small.add(overlay)
    assert too_small == {"small"}
    assert f"up to {cpu} processors and {gib} GiB, so it fits no node of the profile `small`" in GUIDE


def test_a_pod_larger_than_a_node_is_found(production: Documents) -> None:
    small = (KSERVE.parent / "terraform/environments/small.tfvars").read_text(encoding="utf-8")
    assert "a pod fits no node" in " ".join(unplaced(production, small))


def test_the_guide_s_last_command_fills_a_slot(production: Documents) -> None:
    [text] = re.findall(r"patch inferenceservice checkout-blue --type=json -p '(.+)'", GUIDE)
    slot = first(production, "InferenceService")
    fill, unpark = json.loads(text)
    assert fill["path"] == "/spec/predictor/containers/0/env/0/value"
    assert container(slot)["env"][0]["name"] == "STORAGE_URI"
    annotation = unpark["path"].removeprefix("/metadata/annotations/").replace("~1", "/")
    assert slot["metadata"]["annotations"][annotation] == "true"


def test_the_guide_lets_keda_look_at_a_filled_slot_at_once(production: Documents) -> None:
    """KEDA looks at a new generation; the manifest's own value at last spares the next apply a conflict."""
    [(values, field)] = re.findall(
        r"""EACH in ([\d ]+); do .+ scaledobject checkout-blue .+ '{"spec": {"(\w+)": '\$EACH'}}'; done""",
        GUIDE,
    )
    scaled = first(production, "ScaledObject")
    other, own = map(int, values.split())
    assert other != own == scaled["spec"][field]
    deployment = scaled["spec"]["scaleTargetRef"]["name"]
    assert GUIDE.index(f"wait deployment/{deployment} --for=create") < GUIDE.index("for EACH in")
    assert GUIDE.index("for EACH in") < GUIDE.index("wait scaledobject/checkout-blue --for=condition=Ready")


def test_the_guide_changes_image_and_settings_of_running_pods(production: Documents) -> None:
    for slot in of_kind(production, "InferenceService"):
        assert slot["metadata"]["labels"]["reco.dev/owner"] == "release", "the guide's later apply leaves it"
    [image] = re.findall(r"checkout-SLOT --type=json -p '(.+)'", GUIDE)
    [one] = json.loads(image)
    assert (one["op"], one["path"]) == ("replace", "/spec/predictor/containers/0/image")
    slot = first(production, "InferenceService")
    assert "image" in container(slot)
    [restart] = re.findall(r"checkout-SLOT --type=merge -p '(.+)'", GUIDE)
    [(field, added)] = json.loads(restart)["spec"]["predictor"].items()
    slot["spec"]["predictor"][field] = added
    assert findings(production) == []
    root = KSERVE.parents[1]
    for name in ("docs/how-to/run-the-endpoint.md", "docs/how-to/cluster.md", "infra/monitoring/slo.yaml"):
        assert "#change-the-pods)" in (root / name).read_text(encoding="utf-8")


def test_the_gateway_of_the_guide_takes_the_route(production: Documents) -> None:
    [text] = re.findall(r"```yaml\n(.+?kind: Gateway\n.+?)```", GUIDE, re.DOTALL)
    gateway = yaml.safe_load(text)
    name, namespace = gateway["metadata"]["name"], gateway["metadata"]["namespace"]
    [listener] = gateway["spec"]["listeners"]
    [route] = of_kind(production, "HTTPRoute")
    place = {"name": name, "namespace": namespace, "sectionName": listener["name"]}
    assert route["spec"]["parentRefs"] == [place]
    # Without a selector a listener takes routes of its own namespace alone.
    allowed = listener["allowedRoutes"]["namespaces"]
    assert allowed["from"] == "Selector"
    of_route = {"kubernetes.io/metadata.name": route["metadata"]["namespace"]}
    assert allowed["selector"]["matchLabels"] == of_route
    # Istio names the account of a gateway's pods after the gateway and its class.
    account = f"cluster.local/ns/{namespace}/sa/{name}-{gateway['spec']['gatewayClassName']}"
    assert account in json.dumps(of_kind(production, "AuthorizationPolicy"))


def test_the_guide_restricts_the_container_that_kserve_adds(production: Documents) -> None:
    """KServe sets no rights in it, and the namespace refuses the whole pod."""
    labels = first(production, "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    [text] = re.findall(r"patch clusterstoragecontainer default --type=merge -p '(.+)'", GUIDE)
    rights = json.loads(text)["spec"]["container"]["securityContext"]
    slot = container(first(production, "InferenceService"))["securityContext"]
    assert rights.pop("runAsNonRoot") is True
    assert rights == {name: slot[name] for name in ("allowPrivilegeEscalation", "capabilities")}


def test_the_guide_takes_down_first_the_parts_that_stop_terraform() -> None:
    section = GUIDE.split("### Take it down\n")[1].split("\n### ")[0]
    terraform = "".join(
        file.read_text(encoding="utf-8") for file in (KSERVE.parent / "terraform").glob("*.tf")
    )
    [repositories] = re.findall(r'"aws_ecr_repository" "main" {\s+for_each += toset\(\[(.+)\]\)', terraform)
    steps = ["get pvc -A", "delete gateway shop", "delete namespace checkout monitoring kubeflow"]
    steps += ["`deletion_protection = false`", "buckets"]
    steps += [f"`small/{name}`" for name in re.findall(r'"(.+?)"', repositories)]
    steps.append("5. `terraform destroy`")
    assert steps == sorted(steps, key=section.index)


def test_the_estimate_of_the_small_profile_is_the_sum_of_its_rows() -> None:
    rows = re.findall(r"\| (\d+) \| (0\.\d{4}) \| ([\d.]+) \|", GUIDE)
    months = [float(month) for _, _, month in rows]
    computed = [int(count) * float(hour) * 730 for count, hour, _ in rows]
    assert computed == pytest.approx(months, abs=0.01)
    assert "| public IPv4 addresses" in GUIDE
    assert "| logs of the control plane" in GUIDE
    [total] = re.findall(r"\*\*sum\*\* \| \| \| \*\*([\d.]+)\*\*", GUIDE)
    assert float(total) == pytest.approx(sum(months), abs=0.01)
    readme = (KSERVE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"about {float(total):.0f} US dollars a month" in readme


def test_no_reachable_type_of_the_schema_is_open() -> None:
    definitions, seen, names = kserve_schema()["$defs"], set(), ["V1beta1InferenceService"]
    while names:
        seen.add(name := names.pop())
        assert definitions[name] != {}, name
        names += set(re.findall(r"#/\$defs/(\w+)", json.dumps(definitions[name]))) - seen
    assert len(seen) > 100


def first(documents: Documents, kind: str) -> Document:
    return of_kind(documents, kind)[0]


GONE = object()
SLOT, BOX = "InferenceService spec predictor", "InferenceService spec predictor containers 0"
QUERY = "ScaledObject spec triggers 0 metadata query"
SCRAPER = "cluster.local/ns/monitoring/sa/prometheus"
MIRROR = {"backendRef": {"name": "checkout-green-predictor", "port": 80}, "percent": 20}
# What is planted -> the first document of a kind (and a name), and the path in it; the value; the finding.
PLANTED: dict[str, tuple[str, object, str]] = {
    "a misspelt probe": (f"{BOX} readynessProbe", {}, "readynessProbe"),
    "a container without a name": (f"{BOX} name", GONE, "'name' is a required property"),
    "a spread that is neither hard nor soft": (
        f"{SLOT} topologySpreadConstraints 0 whenUnsatisfiable", "Maybe", "whenUnsatisfiable is Maybe",
    ),
    "a misspelt field of a budget": ("PodDisruptionBudget spec maxUnavailible", 1, "maxUnavailible"),
    "a mode that Istio does not know": ("PeerAuthentication spec mtls mode", "PERMIT", "PERMIT"),
    "plain text beside TLS": ("PeerAuthentication spec mtls mode", "PERMISSIVE", "plain text"),
    "an image by its tag": (f"{BOX} image", "registry.example/endpoint:1.0", "digest"),
    "root": (f"{SLOT} securityContext runAsNonRoot", False, "runAsNonRoot"),
    "a state folder on the root file system": (f"{BOX} env RECO_HOME value", "/srv", "RECO_HOME"),
    "no limit of memory": (f"{BOX} resources limits", GONE, "memory"),
    "a setting that does not exist": (
        f"{BOX} env -", {"name": "RECO_DEADLINE", "value": "50"}, "RECO_DEADLINE",
    ),
    "an invalid value of a setting": ("ConfigMap data RECO_STORE_URL", "store:6379", "RECO_STORE_URL"),
    "a password in the manifest": (
        f"{BOX} env -", {"name": "RECO_STORE_PASSWORD", "value": "x"}, "from a Secret",
    ),
    "a budget for both slots": (
        "PodDisruptionBudget spec selector matchLabels reco.dev/slot", GONE, "disruption budgets",
    ),
    "a policy that selects no pod": (
        "AuthorizationPolicy spec selector matchLabels app", "checkout", "not both slots",
    ),
    "a route to a port that does not exist": (
        "HTTPRoute spec rules 0 backendRefs 0 port", 8080, "does not exist",
    ),
    "a mirror outside a release": (
        "HTTPRoute spec rules 3 filters", [{"type": "RequestMirror", "requestMirror": MIRROR}], "mirrors",
    ),
    "a slot that scales by the other's requests": (
        QUERY, 'sum(rate(reco_responses_total{slot="green"}[1m]))', "other pods",
    ),
    "a metric that does not exist": (QUERY, 'sum(rate(reco_requests_total{slot="blue"}[1m]))', "no metric"),
    "a job that no alert selects": (
        "PodMonitor spec podMetricsEndpoints 0 relabelings 0", GONE, "the job is []",
    ),
    "alerts left out": ("PrometheusRule", GONE, "no alert fires"),
    "everything allowed out": ("NetworkPolicy/endpoint-out spec egress -", {}, "is open"),
    "no names with EKS Auto Mode": ("NetworkPolicy/endpoint-out spec egress 0 to 1", GONE, "Auto Mode"),
    "no denial by default": ("NetworkPolicy/default-deny", GONE, "denies"),
    "a scraper that may ask": (
        "AuthorizationPolicy/who-may-ask spec rules 0 from 0 source principals", [SCRAPER], "alone",
    ),
    "an end without a pause": (f"{BOX} lifecycle", GONE, "pause"),
    "the mode with one port": (
        "InferenceService metadata annotations serving.kserve.io/deploymentMode", GONE, "Standard",
    ),
}  # fmt: skip


def plant(documents: Documents, place: str, value: object) -> None:
    found, *path = place.split()
    kind, _, name = found.partition("/")
    document = next(one for one in of_kind(documents, kind) if name in one["metadata"]["name"])
    if not path:
        documents.remove(document)
        return
    node: Any = document
    for key in path[:-1]:
        if isinstance(node, dict):
            node = node[key]
        else:
            node = node[int(key)] if key.isdigit() else next(one for one in node if one["name"] == key)
    last: int | str = int(path[-1]) if path[-1].isdigit() else path[-1]
    if last == "-":
        node.append(value)
    elif value is GONE:
        del node[last]
    else:
        node[last] = value


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_found(production: Documents, planted: str) -> None:
    place, value, expected = PLANTED[planted]
    plant(production, place, value)
    found = findings(production)
    assert any(expected in finding for finding in found), found
