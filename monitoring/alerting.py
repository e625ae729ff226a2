"""The objectives in `infra/monitoring/slo.yaml` -> rules for Prometheus, runbooks, dashboards.

python -m monitoring.alerting            writes them
python -m monitoring.alerting --check    fails if a file is not as it would be written
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SLO = ROOT / "infra" / "monitoring" / "slo.yaml"
RESOURCE = ROOT / "infra" / "kserve" / "base" / "alerts.yaml"  # the same rules for the Prometheus Operator
HEAD = "# Written by `python -m monitoring.alerting` from slo.yaml: change that file, not this one.\n"
PAGE_HEAD = "<!-- Written by `python -m monitoring.alerting` from infra/monitoring/slo.yaml. -->\n\n"
PANELS_A_ROW, PANEL_HEIGHT, GRID = 2, 8, 24


def read_slo() -> dict[str, Any]:
    """Return the objectives, alerts and dashboards."""
    return dict(yaml.safe_load(SLO.read_text(encoding="utf-8")))


def written(slo: dict[str, Any]) -> dict[Path, str]:
    """Return every generated file with its content."""
    every = [*slo["objectives"], *slo["alerts"]]
    files = {SLO.with_name("rules.yml"): HEAD + yaml.safe_dump(rules(slo), sort_keys=False, width=1_000)}
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "checkout"},
        "spec": rules(slo),
    }
    files[RESOURCE] = HEAD + yaml.safe_dump(resource, sort_keys=False, width=1_000)
    pages = ROOT / "docs" / "runbooks"
    files |= {pages / f"{one['name']}.md": runbook(one).replace("SELECTOR", slo["selector"]) for one in every}
    files[pages / "index.md"] = index(every)
    for place, one in enumerate(slo["dashboards"]):
        text = json.dumps(dashboard(one, slo, place), indent=1) + "\n"
        files[SLO.parent / "dashboards" / f"{one['name']}.json"] = text
    return files


def rules(slo: dict[str, Any]) -> dict[str, Any]:
    """Return recording rules and alerts in Prometheus' form."""
    windows = sorted({burn[name] for burn in slo["burn"] for name in ("long", "short")}, key=seconds)
    recorded: list[dict[str, Any]] = [
        {
            "record": f"reco:{one['name']}:bad{window}",
            "expr": f"({one['bad']}) / ({one['all']})".replace("[W]", f"[{window}]"),
        }
        for one in slo["objectives"]
        for window in windows
    ]
    waited = "sum(rate(reco_answer_seconds_sum[5m])) / sum(rate(reco_answer_seconds_count[5m]))"
    recorded.append({"record": "reco:sales_lost_to_waiting:ratio5m", "expr": f"0.1 * {waited}"})
    alerts = []
    for one in slo["objectives"]:
        for severity in dict.fromkeys(burn["severity"] for burn in slo["burn"]):
            burns = [burn for burn in slo["burn"] if burn["severity"] == severity]
            fast = " or ".join(f"{burn['factor']:g} x over {burn['long']}" for burn in burns)
            expr = " or ".join(f"({_burns(one, burn)})" for burn in burns)
            alerts.append(_alert(one, slo, expr, severity, fast))
    for one in slo["alerts"]:
        expr = one["expr"].replace("SELECTOR", slo["selector"])
        alerts.append(_alert(one, slo, expr, one["severity"], "") | {"for": one["for"]})
    groups = [("checkout-slo", "15s", recorded), ("checkout-alerts", "15s", alerts)]
    return {"groups": [{"name": name, "interval": each, "rules": made} for name, each, made in groups]}


def _burns(one: dict[str, Any], burn: dict[str, Any]) -> str:
    limit = f"{burn['factor'] * (1 - one['goal']):.6g}"
    return " and ".join(f"reco:{one['name']}:bad{burn[name]} > {limit}" for name in ("long", "short"))


def _alert(one: dict[str, Any], slo: dict[str, Any], expr: str, severity: str, burn: str) -> dict[str, Any]:
    notes = {"summary": one["shopper"], "runbook_url": f"{slo['runbooks']}{one['name']}/"}
    if burn:
        notes["description"] = f"The error budget of {1 - one['goal']:.1%} burns {burn}: {one['says']}."
    labels = {"severity": severity, "owner": one["owner"]}
    return {"alert": one["name"], "expr": expr, "labels": labels, "annotations": notes}


def seconds(window: str) -> int:
    """Return the length of a window such as `5m`."""
    return int(window[:-1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[window[-1]]


def runbook(one: dict[str, Any]) -> str:
    """Return the page of an alert."""
    fires = f"`{one['expr']}`" if "expr" in one else f"The goal is {one['goal']:.1%}: {one['says']}"
    commands = "\n".join(one["see"])
    causes = "\n".join(f"{place}. {cause}" for place, cause in enumerate(one["causes"], 1))
    acts = "\n".join(f"{place}. {act}" for place, act in enumerate(one["act"], 1))
    return (
        f"{PAGE_HEAD}# {one['name']}\n\n"
        f"**The shopper:** {one['shopper']}\n\n"
        f"**It fires:** {fires}.\n\n"
        f"**Owner:** {one['owner']}\n\n"
        f"## See it\n\n```sh\n{commands}\n```\n\n"
        f"## Likely causes, the most frequent first\n\n{causes}\n\n"
        f"## Act\n\n{acts}\n\n"
        f"## It is over when\n\n{one['over']}\n"
    )


def index(every: list[dict[str, Any]]) -> str:
    """Return the page that lists all runbooks."""
    severity = {one["name"]: one.get("severity", "page, then ticket") for one in every}
    rows = "".join(
        f"| [{name}]({name}.md) | {severity[name]} | {one['owner']} | {one['shopper']} |\n"
        for name, one in ((one["name"], one) for one in every)
    )
    return (
        f"{PAGE_HEAD}# Runbooks\n\n"
        "Each alert of `infra/monitoring/rules.yml` has a page here. `$ENDPOINT` is the address of a pod,\n"
        "or of the gateway.\n\n"
        "| alert | severity | owner | the shopper |\n|---|---|---|---|\n" + rows
    )


def dashboard(one: dict[str, Any], slo: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a dashboard for Grafana."""
    goals = {each["name"]: each["goal"] for each in slo["objectives"]}
    width, panels = GRID // PANELS_A_ROW, []
    for number, panel in enumerate(one["panels"]):
        row, column = divmod(number, PANELS_A_ROW)
        objective = panel.get("objective")
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if objective:
            steps.append({"color": "red", "value": round(1 - goals[objective], 6)})
        link = {"title": "Runbook", "url": f"{slo['runbooks']}{objective}/"}
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel["title"],
                "gridPos": {"x": column * width, "y": row * PANEL_HEIGHT, "w": width, "h": PANEL_HEIGHT},
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "targets": [{"refId": "A", "expr": panel["expr"]}],
                "fieldConfig": {
                    "defaults": {
                        "unit": panel["unit"],
                        "thresholds": {"mode": "absolute", "steps": steps},
                        "custom": {"thresholdsStyle": {"mode": "line" if objective else "off"}},
                    },
                    "overrides": [],
                },
                "links": [link] if objective else [],
            }
        )
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": f"reco-{one['name']}",
        "title": one["title"],
        "tags": ["checkout"],
        "schemaVersion": 39,
        "version": place + 1,
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def metrics_in(expr: str) -> set[str]:
    """Return the names of the product's metrics in an expression."""
    return set(re.findall(r"\breco_\w+", expr))


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them."""
    wrong = []
    for file, text in written(read_slo()).items():
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        wrong.append(str(file.relative_to(ROOT)))
        if "--check" not in arguments:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    if "--check" in arguments and wrong:
        sys.stderr.write(f"not as `python -m monitoring.alerting` writes them: {', '.join(wrong)}\n")
        return 1
    sys.stdout.write("".join(f"{name} written\n" for name in wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
