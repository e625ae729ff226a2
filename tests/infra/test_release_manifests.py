"""infra/kserve/release: strict schemas, least rights, and a command line that exists."""

import re
from pathlib import Path

import pytest
import yaml

from components.release.examination import WALL_S
from components.rollout.cluster import KINDS
from components.rollout.deploy_endpoint import LONGEST_S
from components.rollout.plan import Pace
from feature_repo.errors import CHECK_FAILED, CONFLICT, UNREACHABLE, USAGE
from pipelines.cli.release import rollback
from pipelines.cli.rollout import release
from tests.infra.conftest import Rendered
from tests.infra.policies import Documents, credentials, images, least_privilege, named, of_kind, schemas

pytestmark = pytest.mark.slow  # kubectl is a process
INFRA = Path(__file__).parents[2] / "infra"
REMEDIES = INFRA / "monitoring" / "remedies.md"


@pytest.fixture
def documents(rendered: Rendered) -> Documents:
    return rendered("release")


def test_no_pod_of_a_release_reads_answers(documents: Documents) -> None:
    for job in of_kind(documents, "CronJob"):
        [container] = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == {"home", "tmp", "trusted-keys"}


def test_every_document_is_valid_and_the_jobs_are_restricted(documents: Documents) -> None:
    assert [*schemas(documents), *images(documents), *least_privilege(documents)] == []


def test_the_guide_makes_one_folder_of_the_claims_of_releases_and_training(documents: Documents) -> None:
    guide = (INFRA.parent / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```yaml\n(apiVersion: v1\nkind: PersistentVolume\n.+?)```", guide, re.DOTALL)
    made = list(yaml.safe_load_all(text))
    assert list(schemas(made)) == []
    claims = {
        (one["metadata"]["namespace"], one["metadata"]["name"]): one["spec"]
        for one in of_kind([*documents, *made], "PersistentVolumeClaim")
    }
    volumes = [one["spec"] for one in of_kind(made, "PersistentVolume")]
    assert len({one["csi"]["volumeHandle"] for one in volumes}) == len(volumes) == len(claims)
    for volume in volumes:
        claim = claims.pop((volume["claimRef"]["namespace"], volume["claimRef"]["name"]))
        assert volume["capacity"] == claim["resources"]["requests"]
        assert [volume[name] for name in ("accessModes", "storageClassName")] == [
            claim[name] for name in ("accessModes", "storageClassName")
        ]
    assert "create-access-point --file-system-id FILE_SYSTEM --posix-user Uid=10001,Gid=10001" in guide


def test_golden_requests_have_the_token_of_now(documents: Documents) -> None:
    """A copy would be an old token after its replacement, and no release and no late rollback would work."""
    slot = yaml.safe_load((INFRA / "kserve" / "slot" / "inferenceservice.yaml").read_text())
    [served] = slot["spec"]["predictor"]["containers"]
    [of_slots] = [one["valueFrom"] for one in served["env"] if one["name"] == "RECO_CALLER_TOKENS"]
    for job in of_kind(documents, "CronJob"):
        [container] = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        [source] = [one["valueFrom"] for one in container["env"] if one["name"] == "RECO_CALLER_TOKENS"]
        assert source["secretKeyRef"] == of_slots["secretKeyRef"] | {"optional": True}


def test_a_release_reaches_the_credentials_of_its_role(documents: Documents) -> None:
    assert list(credentials(documents)) == []
    policy = named(documents, "NetworkPolicy", "release-out")
    policy["spec"]["egress"] = [rule for rule in policy["spec"]["egress"] if rule["ports"][0]["port"] != 80]
    assert len(list(credentials(documents))) == len(of_kind(documents, "CronJob"))


def test_a_release_has_the_rights_that_it_uses_and_no_others(documents: Documents) -> None:
    role = named(documents, "Role", "release")
    rights = {name: rule["verbs"] for rule in role["rules"] for name in rule["resources"]}
    assert rights == {
        "httproutes": ["get", "patch"],
        "inferenceservices": ["get", "patch"],
        "scaledobjects": ["get", "list", "patch"],
        "deployments": ["list"],
        "pods": ["list"],
    }
    assert {plural for _, plural in KINDS.values()} - {"cronjobs", "jobs"} == rights.keys()


def test_the_options_of_the_jobs_exist(documents: Documents) -> None:
    for job in of_kind(documents, "CronJob"):
        pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        [container] = pod["containers"]
        *_, word = container["command"]
        asked = {"release": release, "rollback": rollback}[word]
        known = {option for parameter in asked.params for option in parameter.opts}
        assert {one for one in container["args"] if one.startswith("--")} <= known
        assert pod["restartPolicy"] == "Never"
    assert [one["spec"].get("suspend") for one in of_kind(documents, "CronJob")] == [True, None, True]
    assert "create job $JOB --from=cronjob/rollback" in REMEDIES.read_text()


def test_a_job_may_take_as_long_as_its_release_and_its_followers_wait_for_it(documents: Documents) -> None:
    pace = Pace()
    compared = 1 + len(pace.weights)  # the shadow, and each weight below 100 %
    longest_s = WALL_S + 2 * pace.ready_s + compared * pace.longest_s + pace.hold_s
    job = named(documents, "CronJob", "release")
    allowed_s = job["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"]
    workflow = yaml.safe_load((INFRA.parent / ".github" / "workflows" / "release.yml").read_text())
    [follower] = workflow["jobs"].values()
    assert longest_s <= allowed_s < min(LONGEST_S, 60 * follower["timeout-minutes"])
    assert 60 * follower["timeout-minutes"] <= 21_600, "GitHub ends it earlier"
    [role_s] = [one["with"]["role-duration-seconds"] for one in follower["steps"] if "with" in one]
    assert allowed_s < role_s


@pytest.mark.parametrize("name", ["release", "rollback"])
def test_a_job_that_a_person_started_is_kept_for_a_week(documents: Documents, name: str) -> None:
    """It is owned by the CronJob, which by default deletes all failed ones but the last."""
    spec = named(documents, "CronJob", name)["spec"]
    assert spec["jobTemplate"]["spec"]["ttlSecondsAfterFinished"] == 7 * 86_400
    assert min(spec["failedJobsHistoryLimit"], spec["successfulJobsHistoryLimit"]) >= 100


def test_a_refused_version_is_not_released_again_and_a_service_that_is_away_is(documents: Documents) -> None:
    job = named(documents, "CronJob", "release")
    spec = job["spec"]["jobTemplate"]["spec"]
    [rule] = spec["podFailurePolicy"]["rules"]
    [container] = spec["template"]["spec"]["containers"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["operator"] == "In"
    assert set(rule["onExitCodes"]["values"]) == {CHECK_FAILED, USAGE, CONFLICT}
    assert UNREACHABLE not in rule["onExitCodes"]["values"]
    assert spec["backoffLimit"] > 0
    # The next pod is the same deployer: it waits for no other, and knows its release by this name.
    assert "--deployer $(JOB)-$(JOB_ID)" in " ".join(container["args"])
    sources = {one["name"]: one.get("valueFrom", {}) for one in container["env"]}
    fields = {name: one["fieldRef"]["fieldPath"] for name, one in sources.items() if "fieldRef" in one}
    assert fields == {
        "JOB": "metadata.labels['batch.kubernetes.io/job-name']",
        "JOB_ID": "metadata.labels['batch.kubernetes.io/controller-uid']",
    }
