"""The toy shop -> a trial bundle and its answer: the whole path in one process, within a minute.

The steps are those of `pipelines.training` with tiny parameters. Compression, evaluation and gate are left
out. Nothing is registered or promoted: a trial is no champion.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.home import locked, write_json
from feature_repo.toy_shop import held_out, request_basket, user_name
from serving.errors import BundleInvalid

if TYPE_CHECKING:
    from serving.answer.recommender import Recommender

TRIAL = "trial"  # folder under the home; in the manifest, the name of the data
USER = 4
EXPECTED = held_out(USER)  # the shopper's one favourite that is not in the basket
QUESTION: dict[str, Any] = {
    "user_id": user_name(USER),
    "basket": request_basket(USER),
    "at": "2024-06-12T10:00:00Z",  # two days after the cut
    "k": 5,
    "explain": True,
}
EXAMPLES = {"windows": 1, "masks": 1}
RANKER = {"dlrm": {"epochs": 1, "batch_size": 16, "size": {"hidden": 64}}}


def open_trial(home: Path, say: Callable[[str], None]) -> Recommender:
    """Return the recommender of a home's trial; build it if it is missing, broken or made by other code."""
    folder = home / TRIAL
    with locked(home / f"{TRIAL}.lock", "running `reco try`"):
        if (folder / "bundle").is_dir():
            try:
                return _open(folder)
            except BundleInvalid as error:
                say(f"building it again: {error}")
        part = folder.with_suffix(".part")
        for old in (folder, part):
            shutil.rmtree(old, ignore_errors=True)
        build_trial(part, say)
        part.rename(folder)
        return _open(folder)


def build_trial(folder: Path, say: Callable[[str], None]) -> None:
    """Train tiny models on the toy shop; write their bundle, and the shoppers' histories."""
    from components.data.build_examples import build_examples
    from components.data.fit_statistics import fit_statistics
    from components.data.ingest_events import ingest_events
    from components.data.materialize_features import materialize_features

    work, features = folder / "work", folder / "features"
    work.mkdir(parents=True)
    dataset, statistics, examples = work / "dataset", work / "statistics", work / "examples"
    say("1/4 features and examples")
    cut = ingest_events("toy", dataset)
    fit_statistics(dataset, statistics, cut)
    materialize_features(dataset, statistics, features, cut)
    build_examples(dataset, statistics, examples, cut, EXAMPLES)

    import torch

    from components.ranker.ranker_artefact import ENGINES
    from components.ranker.train_ranker import train_ranker
    from components.release.assemble_bundle import assemble_bundle
    from components.retriever.build_index import build_index
    from components.retriever.export_retriever import export_retriever
    from components.retriever.train_retriever import train_retriever

    torch.set_num_threads(1)  # one is faster for so little work
    retriever, graphs, index, ranker = work / "retriever", work / "graphs", work / "index", work / "ranker"
    say("2/4 retriever")
    train_retriever(examples, statistics, retriever, {"epochs": 1})
    export_retriever(retriever, examples, graphs)
    build_index(retriever, examples, index, {})
    say("3/4 ranker")
    train_ranker(examples, statistics, ranker, "dlrm", RANKER)
    write_json(ranker / ENGINES, {"arms": [], "skipped": {}})  # no other engine is compared
    say("4/4 bundle")
    assemble_bundle(examples, statistics, graphs, ranker, index, features, folder / "bundle", cut, TRIAL, {})
    shutil.rmtree(work)


def _open(folder: Path) -> Recommender:
    """Return the trial's recommender, with the shoppers' histories in memory."""
    import pyarrow.parquet as pq

    from serving.answer.recommender import open_recommender
    from serving.stores.online_features import MemoryStore, UserRow

    store = MemoryStore()
    recommender = open_recommender(folder / "bundle", store)
    written_at = datetime.fromisoformat(recommender.bundle.manifest["cut"]).timestamp()
    for row in pq.read_table(folder / "features" / "user_history").to_pylist():
        store.write(row["user_id"], UserRow(row["history"], written_at))
    return recommender
