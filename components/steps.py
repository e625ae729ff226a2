"""Every step of the training: KFP artifacts in -> one call of the step's plain function -> artifacts out.

Only a function's own source travels to the pod, so each step imports its function itself. This module
must not be imported by the plain ones: inside a step KFP hides `dsl.component`.
"""

from functools import partial
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Markdown, Metrics, Model, Output

# What `make image IMAGE=pipeline` builds. `reco compile --image` puts its place in your registry into the IR.
IMAGE = "checkout-pipeline"
# The image holds the project and kfp: nothing is installed when a step starts.
step = partial(dsl.component, base_image=IMAGE, install_kfp_package=False)


@step
def ingest_events(
    data: str, max_quarantine_ratio: float, train_until: str, dataset: Output[Dataset], home: str = ""
) -> NamedTuple("Ingested", cut=str, data_hash=str):  # type: ignore[valid-type]
    """Read and check a shop's events; find the cut between training and test."""
    import json
    from pathlib import Path

    from components.data.ingest_events import ingest_events

    cut = ingest_events(data, Path(dataset.path), max_quarantine_ratio, train_until, home)
    return (cut, json.loads((Path(dataset.path) / "manifest.json").read_bytes())["data_hash"])


@step
def fit_statistics(dataset: Input[Dataset], cut: str, statistics: Output[Artifact]) -> dict[str, Any]:
    """Count purchases by time, place and items bought together."""
    from pathlib import Path

    from components.data.fit_statistics import fit_statistics

    return fit_statistics(Path(dataset.path), Path(statistics.path), cut)


@step
def materialize_features(
    dataset: Input[Dataset], statistics: Input[Artifact], cut: str, features: Output[Dataset]
) -> dict[str, Any]:
    """Write the offline store's files: every event, and the state of users and items as of the cut."""
    from pathlib import Path

    from components.data.materialize_features import materialize_features

    return materialize_features(Path(dataset.path), Path(statistics.path), Path(features.path), cut)


@step
def build_examples(
    dataset: Input[Dataset],
    statistics: Input[Artifact],
    cut: str,
    params: dict[str, Any],
    examples: Output[Dataset],
) -> dict[str, Any]:
    """Turn past baskets into training examples, each with the features of its time."""
    from pathlib import Path

    from components.data.build_examples import build_examples

    return build_examples(Path(dataset.path), Path(statistics.path), Path(examples.path), cut, params)


@step
def train_retriever(
    examples: Input[Dataset],
    statistics: Input[Artifact],
    params: dict[str, Any],
    tracking_uri: str,
    model_name: str,
    checkpoint: Output[Model],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Train the two towers that find candidates."""
    from functools import partial
    from pathlib import Path

    from components.release.step_runs import recorded
    from components.retriever.train_retriever import train_retriever

    work = partial(train_retriever, Path(examples.path), Path(statistics.path), Path(checkpoint.path), params)
    return recorded(work, params, tracking_uri, model_name, numbers, page)


@step
def train_ranker(
    examples: Input[Dataset],
    statistics: Input[Artifact],
    model: str,
    params: dict[str, Any],
    tracking_uri: str,
    model_name: str,
    ranker: Output[Model],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Train one teacher that scores candidates, and calibrate it."""
    from functools import partial
    from pathlib import Path

    from components.ranker.train_ranker import train_ranker
    from components.release.step_runs import recorded

    work = partial(train_ranker, Path(examples.path), Path(statistics.path), Path(ranker.path), model, params)
    return recorded(work, {"model": model, **params.get(model, {})}, tracking_uri, model_name, numbers, page)


@step
def distill_ranker(
    examples: Input[Dataset],
    statistics: Input[Artifact],
    teacher_1: Input[Model],
    teacher_2: Input[Model],
    teacher_3: Input[Model],
    teacher_4: Input[Model],
    teacher_5: Input[Model],
    params: dict[str, Any],
    tracking_uri: str,
    model_name: str,
    ranker: Output[Model],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Train one small student on the teachers' scores of every candidate."""
    from functools import partial
    from pathlib import Path

    from components.ranker.distill_ranker import distill_ranker
    from components.release.step_runs import recorded

    work = partial(
        distill_ranker,
        Path(examples.path),
        Path(statistics.path),
        [Path(one.path) for one in (teacher_1, teacher_2, teacher_3, teacher_4, teacher_5)],
        Path(ranker.path),
        params,
    )
    return recorded(work, params, tracking_uri, model_name, numbers, page)


@step
def prune_ranker(
    examples: Input[Dataset],
    student: Input[Model],
    params: dict[str, Any],
    tracking_uri: str,
    model_name: str,
    ranker: Output[Model],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Take out the student's hidden units that say least."""
    from functools import partial
    from pathlib import Path

    from components.compression.prune_ranker import prune_ranker
    from components.release.step_runs import recorded

    work = partial(prune_ranker, Path(examples.path), Path(student.path), Path(ranker.path), params)
    return recorded(work, params, tracking_uri, model_name, numbers, page)


@step
def quantize_ranker(
    examples: Input[Dataset],
    pruned: Input[Model],
    params: dict[str, Any],
    tracking_uri: str,
    model_name: str,
    variants: Output[Artifact],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Write the student in fewer bits, several ways, and measure what each loses."""
    from functools import partial
    from pathlib import Path

    from components.compression.quantize_ranker import quantize_ranker
    from components.release.step_runs import recorded

    work = partial(quantize_ranker, Path(examples.path), Path(pruned.path), Path(variants.path), params)
    return recorded(work, params, tracking_uri, model_name, numbers, page)


@step
def compile_ranker(
    examples: Input[Dataset],
    pruned: Input[Model],
    variants: Input[Artifact],
    params: dict[str, Any],
    tracking_uri: str,
    model_name: str,
    ranker: Output[Model],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Measure every variant on every engine of this machine and keep the best."""
    from functools import partial
    from pathlib import Path

    from components.compression.compile_ranker import compile_ranker
    from components.release.step_runs import recorded

    work = partial(
        compile_ranker, Path(examples.path), Path(pruned.path), Path(variants.path), Path(ranker.path), params
    )
    return recorded(work, params, tracking_uri, model_name, numbers, page)


@step
def export_retriever(
    retriever: Input[Model],
    examples: Input[Dataset],
    graphs: Output[Model],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Write the query tower as ONNX and measure that it answers alike."""
    from pathlib import Path

    from components.pages import show
    from components.retriever.export_retriever import export_retriever

    return show(export_retriever(Path(retriever.path), Path(examples.path), Path(graphs.path)), numbers, page)


@step
def build_index(
    retriever: Input[Model],
    examples: Input[Dataset],
    params: dict[str, Any],
    index: Output[Artifact],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Put the item vectors into the Faiss index that is fastest at the recall that is asked for."""
    from pathlib import Path

    from components.pages import show
    from components.retriever.build_index import build_index

    return show(
        build_index(Path(retriever.path), Path(examples.path), Path(index.path), params), numbers, page
    )


@step
def assemble_bundle(
    examples: Input[Dataset],
    statistics: Input[Artifact],
    graphs: Input[Model],
    ranker: Input[Model],
    index: Input[Artifact],
    features: Input[Dataset],
    cut: str,
    data_hash: str,
    params: dict[str, Any],
    bundle: Output[Model],
) -> dict[str, Any]:
    """Seal all parts of one release, with golden requests; the evaluation seals its copy again."""
    from pathlib import Path

    from components.release.assemble_bundle import assemble_bundle

    bundle_id = assemble_bundle(
        Path(examples.path),
        Path(statistics.path),
        Path(graphs.path),
        Path(ranker.path),
        Path(index.path),
        Path(features.path),
        Path(bundle.path),
        cut,
        data_hash,
        params,
    )
    return {"bundle_id_before_evaluation": bundle_id}


@step
def evaluate_bundle(
    bundle: Input[Model],
    dataset: Input[Dataset],
    evaluated: Output[Model],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Measure the served path on the weeks after the cut, beside the baselines."""
    from pathlib import Path

    from components.evaluation.evaluate_bundle import evaluate_bundle
    from components.pages import show

    return show(evaluate_bundle(Path(bundle.path), Path(dataset.path), Path(evaluated.path)), numbers, page)


@step
def register_bundle(
    bundle: Input[Model],
    tracking_uri: str,
    model_name: str,
) -> NamedTuple("Registered", version=str):  # type: ignore[valid-type]
    """Store the bundle in the registry as the challenger and return its version."""
    from pathlib import Path

    from components.release.register_bundle import register_bundle

    return (register_bundle(Path(bundle.path), tracking_uri, model_name),)


@step
def promote_bundle(
    version: str,
    dataset: Input[Dataset],
    tracking_uri: str,
    model_name: str,
    home: str,
    params: dict[str, Any],
    numbers: Output[Metrics],
    page: Output[Markdown],
) -> dict[str, Any]:
    """Let the version through the gate to champion, or raise naming metric, got and needed."""
    from pathlib import Path

    from components.pages import show
    from components.release.promote_bundle import promote_bundle
    from serving.settings import configured_keys

    report = promote_bundle(
        version,
        [Path(dataset.path)],
        tracking_uri,
        model_name,
        home,
        params,
        trusted_keys=configured_keys(),
    )
    return show(report, numbers, page)


@step
def deploy_endpoint(
    version: str, dataset: Input[Dataset], tracking_uri: str, model_name: str, home: str, run_id: str
) -> dict[str, Any]:
    """Release the version on the cluster by a Job, and wait for its end."""
    from pathlib import Path

    from components.rollout.deploy_endpoint import deploy_endpoint

    return deploy_endpoint(version, Path(dataset.path), tracking_uri, model_name, home, run_id)


@step
def publish_features(
    features: Input[Dataset], cut: str, promoted: dict[str, Any], home: str, online_store: str
) -> dict[str, Any]:
    """Fill the online store with each user's row and with the champion's statistics of items."""
    from pathlib import Path

    from components.release.publish_features import publish_features

    return publish_features(Path(features.path), cut, promoted, home, online_store)
