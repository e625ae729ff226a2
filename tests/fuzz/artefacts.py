"""Bundles with one corrupt file -> the outcome of loading each in a process of its own.

    python -m tests.fuzz.artefacts --cases 2000

Half of the cases leave the manifest as it is: each must be refused. In the other half the manifest is sealed
again, as an attacker or a buggy step would do, so that the checks after the hashes are reached. A bundle that
passes them has given the golden answers, and must give sound answers to other requests as well.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from feature_repo.aggregates import pack
from feature_repo.ids import is_id
from serving.answer.recommender import Recommender, open_recommender
from serving.errors import BundleInvalid
from serving.release.bundle import load_bundle
from serving.release.golden import read_golden
from serving.release.manifest import bundle_id_of, read_manifest
from serving.schemas import Request
from serving.stores.online_features import MemoryStore, UserRow
from tests.conftest import make_row
from tests.serving.conftest import USERS, build_bundle, seal_golden, weekly

SECONDS, MEGABYTES = 10, 512  # of one case, at most; seconds of the processor: the machine may be busy
HANGS_S = 300  # a case that waits so long waits for ever
INDEXES = {
    "Flat": {},
    "HNSW8": {"efSearch": 64},
    "IVF8,SQ8": {"nprobe": 8},
    "IVF8,PQ4x4,Refine(SQ8)": {"nprobe": 8, "k_factor": 8},
}
REFUSED, SOUND, UNSOUND, RAISED = "refused", "sound", "unsound", "raised"
_CODES = {REFUSED: 10, SOUND: 11, UNSOUND: 12, RAISED: 13}
_EXTREMES = (0, -1, 1, 2**15, 2**31 - 1, -(2**31), 2**40, 2**62)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    2**63,
    "",
    "x" * 1_000,
    "../../etc/passwd",
    [],
    {},
    [[]],
)


# ------------------------------------------------------------------------------------------- spoiling


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= rng.randint(1, 255)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _fill(data: bytearray, rng: random.Random) -> None:
    start, count = rng.randrange(len(data)), rng.randint(1, 64)
    data[start : start + count] = rng.choice((b"\x00", b"\xff", b"\x80")) * count


def _number(data: bytearray, rng: random.Random) -> None:
    width = rng.choice((4, 8))
    start = rng.randrange(max(len(data) - width, 1)) // 4 * 4
    data[start : start + width] = (rng.choice(_EXTREMES) % 2 ** (8 * width)).to_bytes(width, "little")


def _number_at_the_head(data: bytearray, rng: random.Random) -> None:
    """Where formats keep counts and sizes."""
    head = data[:256]
    _number(head, rng)
    data[:256] = head


def _repeat(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:start] = data[start : start + rng.randint(1, 512)]


def _append(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randint(1, 512))


_BYTES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _cut, _fill, _number, _number_at_the_head, _repeat, _append),
)


def spoil_bytes(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Corrupt a file's bytes; return the kind of damage and the new content."""
    while True:
        how, data = rng.choice(_BYTES), bytearray(content)
        how(data, rng)
        if bytes(data) != content:
            return how.__name__.strip("_"), bytes(data)


def spoil_json(content: bytes, by_line: bool, rng: random.Random) -> tuple[str, bytes]:
    """Replace, remove or deeply nest one JSON value; return the kind of damage and the new content."""
    lines = content.split(b"\n") if by_line else [content]
    number = rng.choice([number for number, line in enumerate(lines) if line.strip()])
    document = json.loads(lines[number])
    before = json.dumps(document)
    places = list(_places(document))
    if not places:
        return spoil_bytes(content, rng)
    holder, key = rng.choice(places)
    how = rng.choice(("value", "gone", "deep"))
    if how == "value":
        holder[key] = rng.choice(_VALUES)
    elif how == "gone":
        del holder[key]
    else:
        holder[key] = "DEEP"
    after = json.dumps(document)
    if after == before:  # the new value equals the old one
        return spoil_json(content, by_line, rng)
    lines[number] = after.replace('"DEEP"', "[" * 2_000 + "]" * 2_000).encode()
    return "json " + how, b"\n".join(lines)


def _places(node: Any) -> Any:
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _places(node[key])


def spoil(bundle: Path, name: str, rng: random.Random) -> tuple[str, bytes]:
    """Corrupt a file of a bundle; return the kind of damage and the new content."""
    content = (bundle / name).read_bytes()
    others = [file for file in bundle.rglob(f"*{Path(name).suffix}") if file.read_bytes() != content]
    if others and rng.random() < 0.1:
        other = rng.choice(sorted(others))
        return f"swapped for {other.name}", other.read_bytes()
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
        return spoil_json(content, name.endswith(".jsonl"), rng)
    return spoil_bytes(content, rng)


def resealed_manifest(bundle: Path, name: str, content: bytes) -> bytes:
    """Return a manifest that fits a changed file; for the manifest itself, with its id true again."""
    if name == "manifest.json":
        try:
            manifest = json.loads(content)
            return json.dumps({**manifest, "bundle_id": bundle_id_of(_body(manifest))}).encode()
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return content
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    return json.dumps({**manifest, "bundle_id": bundle_id_of(_body(manifest))}).encode()


def _body(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != "bundle_id"}


# -------------------------------------------------------------------------------------------- bundles


def families(toy: Path, folder: Path) -> dict[str, Path]:
    """Return the toy bundle with each type of index, and some files that most bundles have not."""
    made = {}
    vectors = faiss.read_index(str(toy / "index.faiss")).reconstruct_n()
    for description, search in INDEXES.items():
        path = folder / description.replace(",", "-")
        shutil.copytree(toy, path)
        index = faiss.index_factory(vectors.shape[1], description, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(path / "index.faiss"))
        np.save(path / "removed_items.npy", np.array([3, 7], np.int64))
        settings = replace(load_bundle(toy).settings, search=search)
        seal_golden(path, read_golden(toy), settings, read_manifest(toy)["cut"])
        open_recommender(path, MemoryStore())
        made[description] = path
    return made


def put(bundle: Path, case: Path, name: str, content: bytes, sealed: bool) -> None:
    """Make a bundle that differs from another one in one file; all others are the same on the disk."""
    shutil.copytree(bundle, case, copy_function=os.link)
    changed = {name: content}
    if sealed:
        changed["manifest.json"] = resealed_manifest(bundle, name, content)
    for file, data in changed.items():
        (case / file).unlink()
        (case / file).write_bytes(data)


# --------------------------------------------------------------------------------------------- asking


def is_sound(recommender: Recommender) -> str:
    """Send some requests; return the first mistake in an answer, empty without one."""
    items = recommender.bundle.statistics.item_ids.tolist()
    rng = random.Random(0)
    for number in range(12):
        basket = tuple(dict.fromkeys(rng.choices(items, k=number)))
        profile = rng.choice(list(recommender.bundle.profiles))
        store = rng.choice([None, *recommender.bundle.statistics.store_ids.tolist()])
        request = Request(basket, 1_512_498_600.0, "u1" if number % 2 else None, store, 20, "r", profile)
        response = recommender.recommend(request)
        shown = [item.item_id for item in response.items]
        if response.degraded:
            return f"degraded: {response.degraded_reason}"
        if len(set(shown)) < len(shown) or set(shown) & set(basket) or not set(shown) <= set(items):
            return "an item twice, of the basket, or of nowhere"
        if not all(is_id(item) for item in shown):
            return "an item whose id is none"
        if not all(0 <= item.score <= 1 for item in response.items):  # NaN is neither
            return "a score that is no probability"
        json.dumps(response.to_dict(), allow_nan=False)
    return ""


def load(case: Path, history: bytes) -> tuple[str, str]:
    """Load a bundle as the endpoint does; return the outcome and the message."""
    store = MemoryStore()
    store.write("u1", UserRow(history, 1_512_000_000.0))
    try:
        recommender = open_recommender(case, store)
    except BundleInvalid as error:
        return REFUSED, str(error)
    except BaseException:  # noqa: BLE001 - whatever it is, it is what we look for
        return RAISED, traceback.format_exc()
    try:
        wrong = is_sound(recommender)
    except BaseException:  # noqa: BLE001 - likewise
        return UNSOUND, traceback.format_exc()
    return (UNSOUND, wrong) if wrong else (SOUND, "")


def in_a_child(run: Callable[[], tuple[str, str]]) -> tuple[str, str, float, float]:
    """Run in a fork with bounded time and memory; return outcome, message, seconds and megabytes."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (MEGABYTES << 20),) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        signal.alarm(HANGS_S)
        outcome, said = run()
        os.write(writing, said.encode(errors="replace")[-4_000:])
        os._exit(_CODES[outcome])
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    known = {number: outcome for outcome, number in _CODES.items()}
    outcome = signal.Signals(-code).name if code < 0 else known.get(code, f"exit {code}")
    return outcome, said, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def fuzz(toy: Path, folder: Path, history: bytes, cases: int, seed: int) -> list[dict[str, Any]]:
    """Corrupt files of bundles, one after the other, and load each result; return the outcomes.

    An outcome is REFUSED, SOUND, UNSOUND, RAISED, or a signal's name; its seconds are the processor's.
    """
    rng = random.Random(seed)
    bundles = families(toy, folder)
    outcomes = []
    for number in range(cases):
        family = rng.choice(list(bundles))
        names = sorted(
            file.relative_to(bundles[family]).as_posix()
            for file in bundles[family].rglob("*")
            if file.is_file()
        )
        # Most kinds of damage concern the graphs and the index.
        heavy = ["query_tower.onnx", "ranker.onnx", "index.faiss", "index.faiss"]
        name = rng.choice(heavy if rng.random() < 0.5 else names)
        how, content = spoil(bundles[family], name, rng)
        sealed = number % 2 == 1
        case = folder / f"case-{number}"
        put(bundles[family], case, name, content, sealed)
        found = in_a_child(lambda case=case: load(case, history))  # type: ignore[misc]
        outcome, said, seconds, megabytes = found
        told = {"family": family, "file": name, "spoilt": how, "sealed": sealed, "said": said}
        used = {"seconds": round(seconds, 3), "megabytes": round(megabytes, 1)}
        outcomes.append({**told, "outcome": outcome, **used})
        shutil.rmtree(case)
    return outcomes


def summary(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return counts, the worst case's time and memory, and every case that went wrong."""
    plain = [one for one in outcomes if not one["sealed"]]
    sealed = [one for one in outcomes if one["sealed"]]
    wrong = [one for one in plain if one["outcome"] != REFUSED]
    wrong += [one for one in sealed if one["outcome"] not in (REFUSED, SOUND)]
    return {
        "cases": len(outcomes),
        "spoilt": {"cases": len(plain), **collections.Counter(one["outcome"] for one in plain)},
        "sealed_anew": {"cases": len(sealed), **collections.Counter(one["outcome"] for one in sealed)},
        "longest_s": max(one["seconds"] for one in outcomes),
        "largest_mb": max(one["megabytes"] for one in outcomes),
        "wrong": wrong,
    }


def main() -> int:
    """Fuzz the toy bundle and print the summary; return 1 if a case went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.artefacts")
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reco-fuzz-") as scratch:
        folder = Path(scratch)
        toy = build_bundle(folder / "toy")
        history = pack(make_row(weekly(USERS["u1"])))
        found = summary(fuzz(toy, folder, history, given.cases, given.seed))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    ok = not found["wrong"] and found["largest_mb"] <= MEGABYTES
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
