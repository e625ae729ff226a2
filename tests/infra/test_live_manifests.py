"""infra/kserve/live: strict schemas, commands that exist, and ports that meet their policies."""

import re
from dataclasses import fields
from typing import Any

import pytest

from feature_repo.stream.kafka import VARIABLES, KafkaSettings
from pipelines.cli.events import feedback, stream
from pipelines.cli.watch import watch
from serving.settings import Settings, variable
from tests.infra.conftest import KSERVE, Rendered
from tests.infra.policies import (
    Document,
    Documents,
    access,
    images,
    job_of_the_alerts,
    least_privilege,
    named,
    of_kind,
    schemas,
)

pytestmark = pytest.mark.slow  # kubectl is a process
COMMANDS = {command.name: command for command in (stream, feedback, watch)}


@pytest.fixture
def live(rendered: Rendered) -> Documents:
    return rendered("live")


def pod(deployment: Document) -> dict[str, Any]:
    return dict(deployment["spec"]["template"]["spec"])


def box(deployment: Document) -> dict[str, Any]:
    [container] = pod(deployment)["containers"]
    return dict(container)


def settings_of(live: Documents) -> dict[str, str]:
    [shared] = of_kind(live, "ConfigMap")
    return dict(shared["data"])


def selected(live: Documents, labels: dict[str, str]) -> set[str]:
    return {
        one["metadata"]["name"]
        for one in of_kind(live, "Deployment")
        if labels.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    }


def test_every_document_is_valid_and_nothing_is_open(live: Documents, production: Documents) -> None:
    assert [*schemas(live), *images(live), *least_privilege(live)] == []
    assert list(access([*production, *live])) == []


def test_each_part_is_a_command_whose_options_are_valid(live: Documents) -> None:
    deployments = of_kind(live, "Deployment")
    assert {one["metadata"]["name"] for one in deployments} == COMMANDS.keys()
    for one in deployments:
        assert box(one)["command"] == ["reco", "--home", "/var/lib/reco"]
        word, *options = box(one)["args"]
        assert word == one["metadata"]["name"]
        # The token's file is there in the pod alone.
        given = [
            re.sub(r"\$\((\w+)\)", lambda match: settings_of(live)[match[1]], option)
            for option in options
            if not option.startswith("--token-file=")
        ]
        with COMMANDS[word].make_context(word, given, obj=None) as context:
            parsed = dict(context.params)
        assert parsed.get("retrain", True)
        assert parsed.get("host", "0.0.0.0") == "0.0.0.0", "Prometheus reaches no address of the pod alone"


def test_the_settings_are_those_of_store_and_broker(live: Documents, production: Documents) -> None:
    given = {name: value for name, value in settings_of(live).items() if name.startswith("RECO_")}
    assert given.keys() <= {*VARIABLES.values(), *(variable(one.name) for one in fields(Settings))}
    kafka = KafkaSettings.from_env({**given, VARIABLES["password"]: "secret", "RECO_CONFIG": "off"})
    assert (kafka.security, kafka.bootstrap) == ("sasl_tls", given["RECO_KAFKA_BOOTSTRAP"])
    maps = {
        one["metadata"]["name"] for one in [*of_kind(production, "ConfigMap"), *of_kind(live, "ConfigMap")]
    }
    for one in of_kind(live, "Deployment"):
        assert {source["configMapRef"]["name"] for source in box(one)["envFrom"]} <= maps
        env = {entry["name"]: entry for entry in box(one)["env"]}
        secrets = {name for name, entry in env.items() if "valueFrom" in entry}
        broker = {VARIABLES["password"]} if one["metadata"]["name"] != "watch" else set()
        assert secrets == {variable("store_password"), *broker}, "a part gets the passwords that it needs"
        for name in secrets:
            reference = {"name": "reco-passwords", "key": name, "optional": True}
            assert env[name]["valueFrom"] == {"secretKeyRef": reference}
        log = env[variable("log_dir")]
        assert log["value"] == "/var/log/reco"
    slot = of_kind(production, "InferenceService")[0]["spec"]["predictor"]["containers"][0]
    assert log in slot["env"], "the endpoints write their log elsewhere"
    # `reco forget` waits as long as a segment of an endpoint stays open.
    assert variable("log_segment_s") not in {entry["name"] for entry in slot["env"]}
    assert variable("log_segment_s") in named(production, "ConfigMap", "checkout-settings")["data"]


def test_home_and_log_are_the_folders_of_releases_and_of_slots(
    live: Documents, production: Documents, rendered: Rendered
) -> None:
    claims = {one["metadata"]["name"] for one in of_kind(production, "PersistentVolumeClaim")}
    claims |= {one["metadata"]["name"] for one in of_kind(rendered("release"), "PersistentVolumeClaim")}
    for one in of_kind(live, "Deployment"):
        volumes = {volume["name"]: volume for volume in pod(one)["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in box(one)["volumeMounts"]}
        assert mounts.keys() >= {"/var/lib/reco", "/var/log/reco", "/tmp"}
        places = ("/var/lib/reco", "/var/log/reco")
        claim = [mounts[place]["persistentVolumeClaim"]["claimName"] for place in places]
        assert claim == ["release-home", "prediction-log"]
        assert claims.issuperset(claim)


def test_the_pods_have_the_memory_that_they_may_use(live: Documents) -> None:
    for one in of_kind(live, "Deployment"):
        requests, limits = box(one)["resources"]["requests"], box(one)["resources"]["limits"]
        assert requests["memory"] == limits["memory"] or one["metadata"]["name"] == "watch"
        assert requests.keys() == {"cpu", "memory"}


def test_one_process_alone_may_send_impressions_and_start_a_training(live: Documents) -> None:
    """The others meet a lock, or would train twice: also while a new pod takes an old one's place."""
    alone = {
        one["metadata"]["name"]
        for one in of_kind(live, "Deployment")
        if (one["spec"]["replicas"], one["spec"].get("strategy", {}).get("type")) == (1, "Recreate")
    }
    assert alone == {"feedback", "watch"}


def test_policies_and_monitor_select_their_pods_and_ports(live: Documents) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(live, "NetworkPolicy")}
    assert selected(live, policies["live-out"]["podSelector"]["matchLabels"]) == COMMANDS.keys()
    for one in of_kind(live, "Deployment"):
        name = one["metadata"]["name"]
        assert selected(live, one["spec"]["selector"]["matchLabels"]) == {name}
    [monitor], [mesh] = of_kind(live, "PodMonitor"), of_kind(live, "AuthorizationPolicy")
    for spec in (policies["watch"], mesh["spec"], monitor["spec"]):
        labels = spec.get("selector", spec.get("podSelector"))["matchLabels"]
        assert selected(live, labels) == {"watch"}
    [port] = box(named(live, "Deployment", "watch"))["ports"]
    default = next(option.default for option in watch.params if option.name == "port")
    assert port["containerPort"] == default
    [scraped] = monitor["spec"]["podMetricsEndpoints"]
    assert scraped["port"] == port["name"]
    assert scraped["relabelings"][0]["replacement"] != job_of_the_alerts(), "counted as an endpoint"
    prometheus = {"principals": ["cluster.local/ns/monitoring/sa/prometheus"]}
    assert mesh["spec"]["rules"] == [
        {"from": [{"source": prometheus}], "to": [{"operation": {"ports": [str(default)]}}]}
    ]
    [inwards] = policies["watch"]["ingress"]
    assert inwards["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]


def test_the_token_of_a_retraining_is_where_the_watch_reads_it(live: Documents) -> None:
    one = named(live, "Deployment", "watch")
    [file] = [option.partition("=")[2] for option in box(one)["args"] if option.startswith("--token-file=")]
    [volume] = [volume for volume in pod(one)["volumes"] if "projected" in volume]
    [source] = volume["projected"]["sources"]
    [mount] = [mount["mountPath"] for mount in box(one)["volumeMounts"] if mount["name"] == volume["name"]]
    assert f"{mount}/{source['serviceAccountToken']['path']}" == file
    assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org"


def test_store_and_broker_are_reached_on_the_ports_of_terraform(live: Documents) -> None:
    terraform = (KSERVE.parent / "terraform" / "network.tf").read_text(encoding="utf-8")
    ports = dict(re.findall(r"(valkey|kafka) = (\d+)", terraform))
    out = named(live, "NetworkPolicy", "live-out")["spec"]
    [vpc] = [rule for rule in out["egress"] if {"ipBlock": {"cidr": "10.0.0.0/16"}} in rule["to"]]
    assert {str(one["port"]) for one in vpc["ports"]} == set(ports.values())
    assert settings_of(live)["RECO_KAFKA_BOOTSTRAP"].endswith(f":{ports['kafka']}")


def test_a_retraining_reaches_the_api_of_kubeflow_and_no_other_pod_there(live: Documents) -> None:
    address = re.fullmatch(r"http://([\w-]+)\.([\w-]+):(\d+)", settings_of(live)["PIPELINES"])
    assert address
    [training] = named(live, "NetworkPolicy", "watch")["spec"]["egress"]
    assert training["to"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": address[2]}},
            "podSelector": {"matchLabels": {"app": address[1]}},
        }
    ]
    assert int(address[3]) in {one["port"] for one in training["ports"]}
    assert "kubeflow" not in str(named(live, "NetworkPolicy", "live-out"))
