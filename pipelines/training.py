"""Events of a shop -> a promoted champion: the training pipeline, as people launch it."""

from typing import Any

from kfp import dsl

from components import steps


@dsl.pipeline(name="training", description="Events of a shop to a promoted champion.")
def training(
    home: str,
    tracking_uri: str,
    data: str = "complete-journey",
    train_until: str = "",
    max_quarantine_ratio: float = 0.01,
    online_store: str = "",
    model_name: str = "checkout-recommender",
    example_params: dict[str, Any] = {},  # noqa: B006 - KFP reads the default, nothing changes it
    retriever_params: dict[str, Any] = {},  # noqa: B006
    ranker_params: dict[str, Any] = {},  # noqa: B006
    bundle_params: dict[str, Any] = {},  # noqa: B006
    gate_params: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Train, evaluate, register and promote.

    A gate raises inside its step and so ends the run: conditions are not used, because the local runner
    would skip them without a word.
    """
    events = steps.ingest_events(
        data=data, max_quarantine_ratio=max_quarantine_ratio, train_until=train_until
    )
    dataset, cut = events.outputs["dataset"], events.outputs["cut"]
    statistics = steps.fit_statistics(dataset=dataset, cut=cut).outputs["statistics"]
    features = steps.materialize_features(
        dataset=dataset, cut=cut, home=home, online_store=online_store
    ).outputs["features"]
    examples = steps.build_examples(
        dataset=dataset, statistics=statistics, cut=cut, params=example_params
    ).outputs["examples"]
    retriever = steps.train_retriever(
        examples=examples, statistics=statistics, params=retriever_params
    ).outputs["checkpoint"]
    ranker = steps.train_ranker(
        examples=examples, statistics=statistics, params=ranker_params
    ).outputs["checkpoint"]
    graphs = steps.export_onnx(retriever=retriever, ranker=ranker, examples=examples).outputs["graphs"]
    index = steps.build_index(retriever=retriever).outputs["index"]
    bundle = steps.assemble_bundle(
        statistics=statistics,
        graphs=graphs,
        index=index,
        features=features,
        cut=cut,
        data_hash=events.outputs["data_hash"],
        params=bundle_params,
    ).outputs["bundle"]
    evaluated = steps.evaluate_bundle(bundle=bundle, dataset=dataset).outputs["evaluated"]
    version = steps.register_bundle(bundle=evaluated, tracking_uri=tracking_uri, model_name=model_name).output
    steps.promote_bundle(
        version=version,
        dataset=dataset,
        tracking_uri=tracking_uri,
        model_name=model_name,
        home=home,
        params=gate_params,
    )
    _fit_to_cluster()
