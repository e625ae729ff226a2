"""Events of a shop -> a promoted champion: the training pipeline, as people launch it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from kfp import dsl

from components import steps
from components.parameters import overlay
from pipelines.run.runs import Size


def small(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Ask the cluster for a small container."""
    return _fit(task, cpu="1", memory="4Gi", retries=2)


def large(task: dsl.PipelineTask, retries: int = 2) -> dsl.PipelineTask:
    """Ask the cluster for a large container; its inputs are held in memory whole."""
    return _fit(task, cpu="2", memory="8Gi", retries=retries)


def _fit(task: dsl.PipelineTask, cpu: str, memory: str, retries: int) -> dsl.PipelineTask:
    task.set_cpu_limit(cpu).set_memory_limit(memory)  # Kubernetes requests as much as the limit
    if retries:
        task.set_retry(retries, backoff_duration="30s", backoff_factor=2.0)
    # KFP's cache key holds a step's few lines, not the code they call in the image: a hit could be stale.
    return task.set_caching_options(False)


# The ensemble: five unlike models, chosen by what each adds to the others on the held-out lists.
TEACHERS = ("wide_deep", "dcn_v2", "dlrm", "sequence", "gradient_boosting")
# Those that a laptop trains: the others add too little for their minutes.
LAPTOP_TEACHERS = TEACHERS[:1]


def _training(name: str, teachers: Sequence[str], by_canary: bool = False) -> Any:
    @dsl.pipeline(name=name, description="Events of a shop to a promoted champion.")
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
        student_params: dict[str, Any] = {},  # noqa: B006
        prune_params: dict[str, Any] = {},  # noqa: B006
        quantize_params: dict[str, Any] = {},  # noqa: B006
        compile_params: dict[str, Any] = {},  # noqa: B006
        index_params: dict[str, Any] = {},  # noqa: B006
        bundle_params: dict[str, Any] = {},  # noqa: B006
        gate_params: dict[str, Any] = {},  # noqa: B006
    ) -> None:
        """Train, distil, compress, evaluate, register, promote or release, and fill the online store.

        A gate raises inside its step and so ends the run: conditions are not used, because the local
        runner would skip them without a word.
        """
        tracking = {"tracking_uri": tracking_uri, "model_name": model_name}
        events = large(
            steps.ingest_events(
                data=data, max_quarantine_ratio=max_quarantine_ratio, train_until=train_until, home=home
            )
        )
        dataset, cut = events.outputs["dataset"], events.outputs["cut"]
        statistics = large(steps.fit_statistics(dataset=dataset, cut=cut)).outputs["statistics"]
        of_events = {"dataset": dataset, "statistics": statistics, "cut": cut}
        features = large(steps.materialize_features(**of_events)).outputs["features"]
        examples = large(steps.build_examples(**of_events, params=example_params)).outputs["examples"]
        of_training = {"examples": examples, "statistics": statistics, **tracking}
        retriever = large(steps.train_retriever(**of_training, params=retriever_params)).outputs["checkpoint"]
        rankers = [
            large(steps.train_ranker(**of_training, model=model, params=ranker_params)).outputs["ranker"]
            for model in teachers
        ]
        # An artifact cannot be left out under kfp.local: a smaller ensemble names its teachers again,
        # and one that is named twice counts once.
        named = {f"teacher_{i + 1}": (rankers * 5)[i] for i in range(5)}
        student = large(steps.distill_ranker(**of_training, **named, params=student_params)).outputs["ranker"]
        of_compression = {"examples": examples, **tracking}
        pruned = large(steps.prune_ranker(**of_compression, student=student, params=prune_params)).outputs[
            "ranker"
        ]
        variants = large(
            steps.quantize_ranker(**of_compression, pruned=pruned, params=quantize_params)
        ).outputs["variants"]
        ranker = large(
            steps.compile_ranker(**of_compression, pruned=pruned, variants=variants, params=compile_params)
        ).outputs["ranker"]
        graphs = small(steps.export_retriever(retriever=retriever, examples=examples)).outputs["graphs"]
        index = small(steps.build_index(retriever=retriever, examples=examples, params=index_params)).outputs[
            "index"
        ]
        bundle = small(
            steps.assemble_bundle(
                examples=examples,
                statistics=statistics,
                graphs=graphs,
                ranker=ranker,
                index=index,
                features=features,
                cut=cut,
                data_hash=events.outputs["data_hash"],
                params=bundle_params,
            )
        ).outputs["bundle"]
        evaluated = large(steps.evaluate_bundle(bundle=bundle, dataset=dataset)).outputs["evaluated"]
        version = small(
            steps.register_bundle(bundle=evaluated, tracking_uri=tracking_uri, model_name=model_name)
        ).outputs["version"]
        if by_canary:
            promoted = small(
                steps.deploy_endpoint(
                    version=version,
                    dataset=dataset,
                    home=home,
                    run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
                    **tracking,
                )
            ).outputs["Output"]
        else:
            promoted = large(
                steps.promote_bundle(
                    version=version, dataset=dataset, home=home, params=gate_params, **tracking
                ),
                retries=0,  # times differ: a version that was refused could pass the second time
            ).outputs["Output"]
        # Takes what promotion gave: where the gate refuses, the endpoint's rows stay those of its champion.
        large(
            steps.publish_features(
                features=features, cut=cut, promoted=promoted, home=home, online_store=online_store
            )
        )

    return training


@cache  # KFP takes a third of a second to build one
def training_of(size: Size, by_canary: bool = False) -> Any:
    """Return the pipeline of a full run, or of one that a laptop does: with fewer teachers.

    By a canary, on a cluster, the full one ends otherwise: the Job of `deploy_endpoint` holds the gate, and
    gives the version the traffic in steps.
    """
    if by_canary:
        return _training("training-by-canary", TEACHERS, by_canary=True)
    return (
        _training("training", TEACHERS) if size == "full" else _training("training-laptop", LAPTOP_TEACHERS)
    )


# For a laptop's ten minutes. The default profile does not ask the towers, and profiles with a filter ask them
# for a few items. Tuning with rounding in the loop helps the rows of 4 bits, which no endpoint serves.
LAPTOP: dict[str, dict[str, Any]] = {
    "retriever_params": {"epochs": 2},
    "quantize_params": {"tune_epochs": 0},
}
# Less of each step. A quick try need not reach a release's margin over the free baselines, but it must not be
# worse than they, nor than the champion.
FAST: dict[str, dict[str, Any]] = {
    **LAPTOP,
    "example_params": {"windows": 2, "masks": 1},
    "retriever_params": {"epochs": 1},
    "ranker_params": {name: {"epochs": 4} for name in LAPTOP_TEACHERS},
    "student_params": {"epochs": 4},
    "prune_params": {"ratios": [0.5]},
    "gate_params": {"over_blend": 1.0, "over_two_tower": 1.0},
}


def arguments_of(size: Size, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of a size where they leave a choice."""
    defaults: dict[Size, dict[str, dict[str, Any]]] = {"full": {}, "default": LAPTOP, "fast": FAST}
    return overlay(defaults[size], given)
