"""The tutorials' stack gives our list: it is slower, not another recommender."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from pipelines.bench.load.arms import fill_store
from pipelines.inspect.ask import evaluation_requests
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle, read_manifest, seal_bundle
from serving.schemas import parse_request
from serving.stores.online_features import RedisStore


@pytest.fixture
def student_bundle(toy_line: Path, tmp_path: Path) -> Path:
    """The toy shop's bundle, its ranker the student itself: neither pruned nor quantised."""
    bundle = shutil.copytree(toy_line / "evaluated", tmp_path / "bundle")
    shutil.copyfile(toy_line / "student" / "ranker.onnx", bundle / "ranker.onnx")
    settings, manifest = load_bundle(toy_line / "evaluated").settings, read_manifest(toy_line / "evaluated")
    seal_bundle(bundle, cut=manifest["cut"], settings=settings, made_from={})
    return bundle


@pytest.mark.slow
def test_its_top_ten_is_ours(
    student_bundle: Path, toy_line: Path, valkey: tuple[str, object], tmp_path: Path
) -> None:
    from pipelines.bench.load.arm_tutorial import Predictor, Transformer, Tutorial

    url, feast_home, student = valkey[0], tmp_path / "feast", toy_line / "student"
    fill_store(toy_line / "home" / "offline_store", feast_home, url)
    store = RedisStore(url, timeout_ms=30_000.0)
    ours = Recommender(load_bundle(student_bundle), store)
    predictor = Predictor(student)
    lines = [*evaluation_requests(student_bundle, 30), {"basket": [], "at": "2024-06-12T10:00:00Z"}]
    for items_from_feast in (True, False):
        tutorial = Tutorial(str(student_bundle), str(feast_home), str(student), items_from_feast)
        transformer = Transformer(tutorial, url)
        for line in lines:
            request = parse_request(line, now=time.time(), default_id="r")
            turn = transformer.prepare(request)
            rows = json.loads(json.dumps(turn.rows))  # as they travel
            scores = predictor.score(rows)
            found = transformer.finish(turn, scores)["items"]
            expected = ours.recommend(request)
            assert not expected.degraded
            assert [item["item_id"] for item in found] == [item.item_id for item in expected.items]
            assert [item["score"] for item in found] == pytest.approx(
                [item.score for item in expected.items], abs=1e-5
            )
            assert len(found) == 10
    store.close()
    assert np.isfinite(scores).all()
