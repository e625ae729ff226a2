"""JSON schemas of the custom resources in infra/kserve, in which an unknown field is an error.

Those of KServe are read from the model files of the installed SDK, without importing them. The others are
short: they hold the fields that these manifests use, as their projects document them.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------- KServe and Kubernetes models
_PLAIN = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
# Types whose JSON is not an object of their model: a quantity, or an integer or percentage.
_OPEN: dict[str, dict[str, Any]] = {
    "object": {},
    "datetime": {"type": "string"},
    "ResourceQuantity": {"type": ["string", "number"]},
}
# Text fields with a closed list of values, which the schemas of Kubernetes describe in prose alone.
VALUES = {
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "concurrencyPolicy": {"Allow", "Forbid", "Replace"},
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "policyTypes": {"Ingress", "Egress"},
    "protocol": {"TCP", "UDP", "SCTP"},
    "reclaimPolicy": {"Delete", "Retain"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "unhealthyPodEvictionPolicy": {"AlwaysAllow", "IfHealthyBudget"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
}


def wrong_values(node: Any) -> Iterator[str]:
    """Yield each field of a document whose value is not in its closed list."""
    if isinstance(node, list):
        for one in node:
            yield from wrong_values(one)
    if isinstance(node, dict):
        for name, value in node.items():
            given = value if isinstance(value, list) else [value]
            if name in VALUES and not all(isinstance(one, str) and one in VALUES[name] for one in given):
                yield f"{name} is {value}, expected {', '.join(sorted(VALUES[name]))}"
            yield from wrong_values(value)


def _files() -> list[Path]:
    folders = []
    for package, below in (("kserve", "models"), ("kubernetes", "client/models")):
        spec = find_spec(package)
        assert spec
        assert spec.origin
        folders.append(Path(spec.origin).parent / below)
    return [file for folder in folders for file in sorted(folder.glob("v1*.py"))]


def _literal(body: list[ast.stmt], name: str) -> dict[str, str]:
    for node in body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == name
        ):
            return dict(ast.literal_eval(node.value))
    return {}


def _schema_of(kind: str) -> dict[str, Any]:
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        return {"type": "array", "items": _schema_of(match[1])}
    if match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return {"type": "object", "additionalProperties": _schema_of(match[1])}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    return _OPEN.get(kind, {"$ref": f"#/$defs/{kind}"})


@cache
def kserve_schema() -> dict[str, Any]:
    """The schema of an InferenceService, with those of all models of both SDKs as definitions."""
    definitions: dict[str, Any] = {}
    for file in _files():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (types := _literal(node.body, "openapi_types")):
                names = _literal(node.body, "attribute_map")
                definitions[node.name] = {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {names[field]: _schema_of(kind) for field, kind in types.items()},
                }
    # A type with the long name of its API group is that of the short name. No manifest may use a type without
    # a model.
    missing = _references(definitions) - definitions.keys()
    short = {name: re.sub(r"K8sIoApi[A-Z][a-z]+(?=V\d)", "", name) for name in missing}
    known = {**{name: definitions.get(short[name], False) for name in missing}, **definitions}
    return {"$ref": "#/$defs/V1beta1InferenceService", "$defs": known}


def as_deployment(service: dict[str, Any]) -> dict[str, Any]:
    """Return the Deployment that KServe makes of an InferenceService: its predictor is a PodSpec and more."""
    predictor = service["spec"]["predictor"]
    names = kserve_schema()["$defs"]["V1PodSpec"]["properties"]
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": predictor.get("labels", {})},
        "strategy": predictor.get("deploymentStrategy", {}),
        "template": {
            "metadata": {"labels": predictor.get("labels", {})},
            "spec": {name: value for name, value in predictor.items() if name in names},
        },
    }
    metadata = {"name": f"{service['metadata']['name']}-predictor"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        found = {node["$ref"].rsplit("/", 1)[1]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*(_references(value) for value in node.values()))
    return set()


# ---------------------------------------------------------------------------------------- the other projects
# A name with `!` is required. A list holds what its items are, a set the allowed values, a string a pattern.
STRING, PORT = r".+", {"type": "integer", "minimum": 1, "maximum": 65_535}
COUNT, PERCENT = {"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 0, "maximum": 100}
DURATION = r"[0-9]+(ms|s|m|h)"
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
BACKEND = {"name!": STRING, "namespace": STRING, "port!": PORT}
SCALING = {
    "stabilizationWindowSeconds": COUNT,
    "policies!": [{"type!": {"Pods", "Percent"}, "value!": COUNT, "periodSeconds!": COUNT}],
}
SPECS: dict[str, dict[str, Any]] = {
    "gateway.networking.k8s.io/v1 HTTPRoute": {
        "parentRefs!": [{"name!": STRING, "namespace": STRING, "sectionName": STRING}],
        "hostnames!": [r"[a-z0-9.-]+"],
        "rules!": [
            {
                "matches!": [
                    {
                        "path": {"type!": {"Exact", "PathPrefix"}, "value!": r"/.*"},
                        "headers": [{"type": {"Exact"}, "name!": STRING, "value!": STRING}],
                    }
                ],
                "filters": [
                    {
                        "type!": {"RequestMirror"},
                        "requestMirror!": {"backendRef!": BACKEND, "percent": PERCENT},
                    }
                ],
                "timeouts": {"request!": DURATION},
                "backendRefs!": [{**BACKEND, "weight": COUNT}],
            }
        ],
    },
    "keda.sh/v1alpha1 ScaledObject": {
        "scaleTargetRef!": {"apiVersion": STRING, "kind": STRING, "name!": STRING},
        "minReplicaCount!": COUNT,
        "maxReplicaCount!": COUNT,
        "pollingInterval": COUNT,
        "fallback!": {
            "failureThreshold!": COUNT,
            "replicas!": COUNT,
            "behavior!": {"currentReplicasIfHigher"},  # `static` would take pods away
        },
        "advanced": {
            "horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": SCALING, "scaleDown": SCALING}}
        },
        "triggers!": [
            {
                "type!": {"prometheus"},  # KEDA's webhook refuses `cpu` and `memory` without a Deployment
                "metricType": {"AverageValue"},
                "metadata!": {
                    "serverAddress!": r"http://.+",
                    "query!": STRING,
                    "ignoreNullValues!": {"false"},  # else an empty answer is 0 and no failure
                    "threshold!": r"\d+",
                },
            }
        ],
    },
    "networking.istio.io/v1 DestinationRule": {
        "host!": STRING,
        "trafficPolicy!": {
            "tls": {"mode!": {"ISTIO_MUTUAL"}},
            "connectionPool": {
                "tcp": {"connectTimeout": DURATION, "maxConnections": COUNT},
                "http": {"http1MaxPendingRequests": COUNT, "http2MaxRequests": COUNT, "maxRetries": COUNT},
            },
            "outlierDetection!": {
                "consecutive5xxErrors!": COUNT,
                "consecutiveGatewayErrors": COUNT,
                "interval": DURATION,
                "baseEjectionTime": DURATION,
                "maxEjectionPercent!": PERCENT,
                "minHealthPercent": PERCENT,
            },
        },
    },
    "security.istio.io/v1 PeerAuthentication": {
        "selector": {"matchLabels!": LABELS},
        "mtls!": {"mode!": {"STRICT", "PERMISSIVE", "DISABLE", "UNSET"}},
    },
    "security.istio.io/v1 AuthorizationPolicy": {
        "selector": {"matchLabels!": LABELS},
        "action!": {"ALLOW", "DENY"},
        "rules!": [
            {
                "from!": [{"source!": {"principals!": [STRING]}}],
                "to!": [{"operation!": {"ports!": [r"\d+"], "methods": [STRING], "paths": [STRING]}}],
            }
        ],
    },
    "trainer.kubeflow.org/v1alpha1 TrainJob": {
        "runtimeRef!": {"name!": STRING, "apiGroup": STRING, "kind": STRING},
        "trainer!": {
            "image!": r"[\w.:/-]+@sha256:[0-9a-f]{64}",
            "numNodes!": COUNT,
            "command!": [STRING],
            "args!": [STRING],
            "resourcesPerNode!": {"requests!": LABELS, "limits!": LABELS},
        },
    },
    "monitoring.coreos.com/v1 PodMonitor": {
        "selector!": {"matchLabels!": LABELS},
        "podMetricsEndpoints!": [
            {
                "port!": STRING,
                "interval": DURATION,
                "relabelings": [{"sourceLabels": [STRING], "targetLabel!": STRING, "replacement": STRING}],
            }
        ],
    },
    "monitoring.coreos.com/v1 PrometheusRule": {
        "groups!": [
            {
                "name!": STRING,
                "interval": DURATION,
                "rules!": [
                    {
                        "record": r"[a-zA-Z0-9_:]+",
                        "alert": r"\w+",
                        "expr!": STRING,
                        "for": DURATION,
                        "keep_firing_for": DURATION,
                        "labels": LABELS,
                        "annotations": LABELS,
                    }
                ],
            }
        ]
    },
}


def _strict(shape: Any) -> dict[str, Any]:
    if isinstance(shape, str):
        return {"type": "string", "pattern": f"^(?:{shape})$"}
    if isinstance(shape, set):
        return {"enum": sorted(shape)}
    if isinstance(shape, list):
        return {"type": "array", "minItems": 1, "items": _strict(shape[0])}
    if "type" in shape and isinstance(shape["type"], str):
        return shape  # a schema already
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [name[:-1] for name in shape if name.endswith("!")],
        "properties": {name.rstrip("!"): _strict(value) for name, value in shape.items()},
    }


@cache
def schema_of(document_kind: str) -> dict[str, Any] | None:
    """The schema of a custom resource, or None of a built-in kind; `document_kind` is "apiVersion kind"."""
    if document_kind == "serving.kserve.io/v1beta1 InferenceService":
        return kserve_schema()
    if document_kind not in SPECS:
        return None
    name = "generateName!" if document_kind.endswith(" TrainJob") else "name!"  # made by `kubectl create`
    metadata = {name: r"[a-z0-9-]+", "namespace": STRING, "labels": LABELS, "annotations": LABELS}
    return _strict(
        {"apiVersion!": STRING, "kind!": STRING, "metadata!": metadata, "spec!": SPECS[document_kind]}
    )
