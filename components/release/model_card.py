"""A bundle's own records -> its model card: what people read beside a version in the registry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Estimates, not measurements: power of a busy core of a rack server, cooling included, and its price in a
# cloud. Change them for your own machines; the card prints the formulas beside the figures.
WATTS_A_CORE = 10.0
DOLLARS_A_CORE_HOUR = 0.05
CHAIN = ("step", "made", "from", "NDCG@10 held out", "of parent", "top 10 kept", "bytes", "p50 ms at 500")


def watt_hours(cpu_seconds: float) -> float:
    """Return the estimated energy of some seconds of one core."""
    return cpu_seconds * WATTS_A_CORE / 3600


def dollars_a_million(cpu_ms: float) -> float:
    """Return the estimated price of a million answers that take one core `cpu_ms` each."""
    return cpu_ms / 1e3 * 1e6 / 3600 * DOLLARS_A_CORE_HOUR


def model_card(
    bundle: Path,
    manifest: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    certificates: Sequence[Mapping[str, Any]],
) -> str:
    """Return the card as Markdown: quality, origin, the chain of certificates, cost."""
    served, made = evaluation.get("served", {}), manifest["made_from"]
    ranker = made.get("ranker", {})
    spent = float(made.get("cpu_seconds", 0.0))
    lines = [
        f"# Bundle {manifest['bundle_id']}",
        "",
        f"Trained on events before {manifest['cut']}, judged on {evaluation.get('baskets', 0)} baskets of "
        f"the weeks after. Ranker: {ranker.get('model', '?')}, {ranker.get('variant', 'fp32')} on "
        f"{ranker.get('engine', 'cpu')}, {(bundle / 'ranker.onnx').stat().st_size / 1e3:.0f} kB.",
        "",
        "| served | |",
        "|---|---|",
        *(f"| {name} | {value:.4f} |" for name, value in served.items() if isinstance(value, float)),
        "",
        *(f"| {' | '.join(cells)} |" for cells in (CHAIN, ["---"] * len(CHAIN), *chain_rows(certificates))),
        "",
        *_engines(bundle / "engines.json"),
        f"Teachers, student, pruning and compiling took {spent:.0f} CPU-seconds, about "
        f"{watt_hours(spent):.1f} Wh (CPU-seconds x {WATTS_A_CORE:g} W / 3600); quantising is left out.",
    ]
    latency = certificates[-1].get("latency_ms", {}).get("500") if certificates else None
    if latency:
        each = latency["p50"]
        lines.append(
            f"Ranking 500 candidates takes {each:.2f} ms of one core: {watt_hours(each * 1e3):.2f} Wh and "
            f"${dollars_a_million(each):.3f} a million answers (ms x 1000 s / 3600 x {WATTS_A_CORE:g} W, "
            f"x ${DOLLARS_A_CORE_HOUR:g} a core-hour)."
        )
    return "\n".join(lines) + "\n"


def chain_rows(certificates: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the chain from the teachers to the served file: CHAIN's columns, a row for each certificate."""
    rows = []
    for one in certificates:
        named = one.get("variant") or one.get("model") or (f"{one['ratio']:.0%}" if "ratio" in one else "")
        rows.append(
            [
                f"{one['step']} {named}".rstrip(),
                one["id"][:8],
                " ".join(parent[:8] for parent in one["parents"]) or "its weights",
                f"{one['ndcg_at_10']['child']:.4f}",
                f"{one['ndcg_at_10']['ratio']:.4f}",
                f"{one['top_10_overlap']:.3f}",
                f"{one['bytes']:,}",
                _against(one),
            ]
        )
    return rows


def _against(certificate: Mapping[str, Any]) -> str:
    """Return p50 at 500 candidates, beside the parent's from the same turns where there is one."""
    ours, theirs = (certificate.get(key) for key in ("latency_ms", "parent_latency_ms"))
    shown = f"{ours['500']['p50']:.2f}" if ours else ""
    return f"{shown} (parent {theirs['500']['p50']:.2f})" if theirs else shown


def _engines(file: Path) -> list[str]:
    if not file.is_file():
        return []
    found = json.loads(file.read_bytes())
    lines = ["| variant | engine | p50 ms at 500 | p99 | may serve |", "|---|---|---|---|---|"]
    for arm in found["arms"]:
        at = arm["latency_ms"]["500"]
        why = arm["outside_tolerance"] or (() if arm["is_served"] else ("for comparison",))
        fit = "no: " + "; ".join(why) if why else "yes"
        lines.append(f"| {arm['variant']} | {arm['engine']} | {at['p50']:.2f} | {at['p99']:.2f} | {fit} |")
    lines += [f"| | {engine} | skipped: {reason} | | |" for engine, reason in found["skipped"].items()]
    return [*lines, ""]
