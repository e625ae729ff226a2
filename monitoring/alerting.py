"""The objectives in `infra/monitoring/slo.yaml` -> rules for Prometheus, runbooks, dashboards.

python -m monitoring.alerting            writes them
python -m monitoring.alerting --check    fails if a file is not as it would be written
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SLO = ROOT / "infra" / "monitoring" / "slo.yaml"
RESOURCE = ROOT / "infra" / "kserve" / "base" / "alerts.yaml"  # its `spec` is a file of rules for Prometheus
HEAD = "# Written by `python -m monitoring.alerting` from slo.yaml: change that file, not this one.\n"
PAGE_HEAD = "<!-- Written by `python -m monitoring.alerting` from infra/monitoring/slo.yaml. -->\n\n"
REMEDIES = SLO.with_name("remedies.md")  # the end of the runbooks' index
PANELS_A_ROW, PANEL_HEIGHT, GRID = 2, 8, 24
SHORT_S = 300  # a longer window need not be computed every few seconds
FAST, SLOW = "5s", "1m"  # between two evaluations
KEEP = "2m"  # an alert that pages fires so long after its last reason: no page twice for one fault


def read_slo() -> dict[str, Any]:
    """Return the objectives, alerts and dashboards."""
    return dict(yaml.safe_load(SLO.read_text(encoding="utf-8")))


def written(slo: dict[str, Any]) -> dict[Path, str]:
    """Return every generated file with its content."""
    every = [*slo["objectives"], *slo["alerts"]]
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "checkout"},
        "spec": rules(slo),
    }
    files = {RESOURCE: HEAD + yaml.safe_dump(resource, sort_keys=False, width=1_000)}
    pages = ROOT / "docs" / "runbooks"
    files |= {pages / f"{one['name']}.md": runbook(one).replace("SELECTOR", slo["selector"]) for one in every}
    files[pages / "index.md"] = index(every)
    for place, one in enumerate(slo["dashboards"]):
        text = json.dumps(dashboard(one, slo, place), indent=1) + "\n"
        files[SLO.parent / "dashboards" / f"{one['name']}.json"] = text
    return files


def rules(slo: dict[str, Any]) -> dict[str, Any]:
    """Return recording rules and alerts in Prometheus' form."""
    windows = {burn[name] for burn in slo["burn"] for name in ("long", "short")} | {slo["gate"]}
    fast: list[dict[str, Any]] = []
    slow: list[dict[str, Any]] = []
    for one in slo["objectives"]:
        for window in sorted(windows, key=seconds):
            share = f"({one['bad']}) / ({one['all']})".replace("[W]", f"[{window}]")
            group = fast if seconds(window) <= SHORT_S else slow
            group.append({"record": f"reco:{one['name']}:bad{window}", "expr": share})
    waited = "sum(rate(reco_answer_seconds_sum[5m])) / sum(rate(reco_answer_seconds_count[5m]))"
    # 1 % of the sales for each 100 ms, as in `monitoring.kpi`.
    fast.append({"record": "reco:sales_lost_to_waiting:ratio5m", "expr": f"0.1 * {waited}"})
    lost = (
        "sum by (rung) (rate(reco_responses_total[5m])) * on (rung) max by (rung) (reco_kpi_loss_per_answer)"
    )
    fast.append({"record": "reco:revenue_at_risk:hourly", "expr": f"3600 * sum({lost})"})
    for one in slo["objectives"]:
        for severity in dict.fromkeys(burn["severity"] for burn in slo["burn"]):
            burns = [burn for burn in slo["burn"] if burn["severity"] == severity]
            speed = " or ".join(_speed(burn) for burn in burns)
            expr = " or ".join(f"({_burns(one, burn)})" for burn in burns)
            if severity == "page":
                expr = f"({expr}) and reco:{one['name']}:bad{slo['gate']} > {1 - one['goal']:.6g}"
            fast.append(_alert(one, slo, expr, severity, speed))
    for one in slo["alerts"]:
        expr = one["expr"].replace("SELECTOR", slo["selector"])
        fast.append(_alert(one, slo, expr, one["severity"], "") | {"for": one["for"]})
    # Rules of a group are evaluated in turn: an alert sees the shares of the same moment.
    groups = [("checkout-slow", SLOW, slow), ("checkout", FAST, fast)]
    return {"groups": [{"name": name, "interval": each, "rules": made} for name, each, made in groups]}


def _speed(burn: dict[str, Any]) -> str:
    if "share" in burn:
        return f"with {burn['share']:.0%} of the requests over {burn['long']}"
    return f"{burn['factor']:g} x over {burn['long']}"


def _burns(one: dict[str, Any], burn: dict[str, Any]) -> str:
    limit = burn["share"] if "share" in burn else burn["factor"] * (1 - one["goal"])
    arms = [f"reco:{one['name']}:bad{burn[name]} > {limit:.6g}" for name in ("long", "short")]
    if "least" in burn:
        rate = burn["least"] / seconds(burn["long"])
        arms.append(f"{one['all']} > {rate:.6g}".replace("[W]", f"[{burn['long']}]"))
    return " and ".join(arms)


def _alert(one: dict[str, Any], slo: dict[str, Any], expr: str, severity: str, burn: str) -> dict[str, Any]:
    notes = {"summary": one["shopper"], "runbook_url": f"{slo['runbooks']}{one['name']}.html"}
    if burn:
        notes["description"] = f"The error budget of {1 - one['goal']:.1%} burns {burn}: {one['says']}."
    labels = {"severity": severity, "owner": one["owner"]}
    keep = {"keep_firing_for": one.get("keep", KEEP)} if severity == "page" else {}
    return {"alert": one["name"], "expr": expr, **keep, "labels": labels, "annotations": notes}


def seconds(window: str) -> int:
    """Return the length of a window such as `5m`."""
    return int(window[:-1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[window[-1]]


def runbook(one: dict[str, Any]) -> str:
    """Return the page of an alert."""
    if "expr" in one:
        fires = f"`{one['expr']}`" + ("" if one["for"] == "0s" else f", for {one['for']}")
    else:
        fires = (
            "the error budget burns too fast ([burn rates](../how-to/on-call.md#alerts)). "
            f"The goal is {one['goal']:.1%}: {one['says']}"
        )
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
        "Each alert of `infra/kserve/base/alerts.yaml` has a page here.\n\n"
        "| alert | severity | owner | the shopper |\n|---|---|---|---|\n" + rows + "\n"
        f"{REMEDIES.read_text(encoding='utf-8')}"
    )


def dashboard(one: dict[str, Any], slo: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a dashboard for Grafana."""
    goals = {each["name"]: each["goal"] for each in slo["objectives"]}
    width, panels = GRID // PANELS_A_ROW, []
    for number, panel in enumerate(one["panels"]):
        row, column = divmod(number, PANELS_A_ROW)
        objective = panel.get("objective")
        defaults: dict[str, Any] = {"unit": panel["unit"]}
        links = []
        if objective:
            limit = {"color": "red", "value": round(1 - goals[objective], 6)}
            defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": "green", "value": None}, limit]}
            defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
            links = [{"title": "Runbook", "url": f"{slo['runbooks']}{objective}.html"}]
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel["title"],
                "gridPos": {"x": column * width, "y": row * PANEL_HEIGHT, "w": width, "h": PANEL_HEIGHT},
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "targets": [{"refId": "A", "expr": panel["expr"]}],
                "fieldConfig": {"defaults": defaults, "overrides": []},
                "links": links,
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
