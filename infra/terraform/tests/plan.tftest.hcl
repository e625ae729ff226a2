# Without an account: the provider is mocked, so that the inputs of policies can be asserted, not their JSON.
mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "000000000000" }
  }
  mock_data "aws_availability_zones" {
    defaults = { names = ["eu-central-1a", "eu-central-1b", "eu-central-1c"] }
  }
  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:eu-central-1:000000000000:key/k" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::000000000000:role/r" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { arn = "arn:aws:s3:::b" }
  }
  mock_resource "aws_ecr_repository" {
    defaults = { arn = "arn:aws:ecr:eu-central-1:000000000000:repository/r" }
  }
  mock_resource "aws_iam_openid_connect_provider" {
    defaults = { arn = "arn:aws:iam::000000000000:oidc-provider/token.actions.githubusercontent.com" }
  }
  mock_resource "aws_msk_cluster" {
    defaults = { arn = "arn:aws:kafka:eu-central-1:000000000000:cluster/c/1" }
  }
  mock_resource "aws_db_instance" {
    defaults = { master_user_secret = [{ secret_arn = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:s" }] }
  }
  mock_resource "aws_eks_cluster" {
    defaults = { arn = "arn:aws:eks:eu-central-1:000000000000:cluster/c", vpc_config = { cluster_security_group_id = "sg-0123456789abcdef0" } }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
}

variables {
  region            = "eu-central-1"
  environment       = "test"
  admins            = ["arn:aws:iam::000000000000:role/platform"]
  nodes             = { type = "m7i.2xlarge", min = 3, max = 12 }
  gpu_nodes         = { type = "g6.xlarge", max = 2 }
  valkey            = { type = "cache.r7g.large", shards = 3, replicas = 1 }
  kafka             = { type = "kafka.m7g.large", brokers_per_zone = 1, gib = 200, secret_arns = ["arn:aws:secretsmanager:eu-central-1:000000000000:secret:AmazonMSK_reco"] }
  database          = { type = "db.t4g.medium", gib = 50, standby = true }
  store_password    = "0123456789abcdef0123456789abcdef"
  github_repository = "shop/checkout"
  state_bucket      = "state"
}

run "everything" {
  command = apply

  assert {
    condition = alltrue([
      for role in data.aws_iam_policy_document.permissions :
      length(distinct(flatten(role.statement[*].actions))) <= 15
    ])
    error_message = "A role has more than 15 actions."
  }
  assert {
    condition = alltrue(flatten([
      for role in data.aws_iam_policy_document.permissions : [
        for statement in role.statement : concat(
          [for resource in statement.resources : resource != "*" || alltrue([
            for action in statement.actions : contains(["ecr:GetAuthorizationToken", "ec2:DescribeAvailabilityZones"], action)
          ])],
          [for action in statement.actions : !strcontains(action, "*")],
        )
      ]
    ]))
    error_message = "A role names a wildcard."
  }
  assert {
    condition     = !contains(flatten(data.aws_iam_policy_document.permissions["endpoint"].statement[*].actions), "s3:PutObject")
    error_message = "The endpoint may write."
  }
  assert {
    condition = length(setintersection(
      flatten(data.aws_iam_policy_document.permissions["release"].statement[*].actions),
      ["s3:DeleteObject", "s3:BypassGovernanceRetention", "s3:PutObjectRetention"],
    )) == 0
    error_message = "A release may take a bundle back."
  }
  assert {
    condition = alltrue([
      for trust in data.aws_iam_policy_document.pod_identity :
      contains(trust.statement[0].actions, "sts:TagSession") && length(trust.statement[0].condition) == 3
    ])
    error_message = "A role can be taken by another service account."
  }
  assert {
    condition = length(flatten(data.aws_iam_policy_document.autoscaler.statement[*].actions)) <= 15 && alltrue([
      for statement in data.aws_iam_policy_document.autoscaler.statement :
      length(statement.condition) == 1 || alltrue([for action in statement.actions : strcontains(action, ":Describe") || strcontains(action, ":Get")])
    ])
    error_message = "The autoscaler may change groups of other clusters."
  }
  assert {
    condition = {
      for name, trust in data.aws_iam_policy_document.github : name => one(flatten([
        for condition in trust.statement[0].condition : condition.values
        if condition.variable == "token.actions.githubusercontent.com:sub" && condition.test == "StringEquals"
      ]))
      } == {
      ci-images  = "repo:shop/checkout:environment:images"
      ci-plan    = "repo:shop/checkout:environment:test-plan"
      ci-release = "repo:shop/checkout:environment:test"
    }
    error_message = "Another workflow may take a workflow's role."
  }
  assert {
    condition = {
      for name in ["ci-images", "ci-plan", "ci-release"] :
      name => sort(flatten(data.aws_iam_policy_document.permissions[name].statement[*].actions))
      } == {
      ci-images = tolist([
        "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload", "ecr:GetAuthorizationToken",
        "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart",
      ])
      ci-plan    = tolist(["ec2:DescribeAvailabilityZones", "s3:GetObject", "s3:ListBucket"])
      ci-release = tolist(["eks:DescribeCluster"])
    }
    error_message = "A workflow's role has other actions than its workflow needs."
  }
  assert {
    condition = contains(
      flatten(data.aws_iam_policy_document.permissions["ci-plan"].statement[*].resources), "arn:aws:s3:::state/test",
    )
    error_message = "A plan reads the state of another profile."
  }
  assert {
    condition = (
      aws_eks_access_entry.release[0].kubernetes_groups == toset(["checkout-ci"]) &&
      toset(keys(aws_eks_access_policy_association.admin)) == toset(var.admins)
    )
    error_message = "A release from CI has more rights in the cluster than its group."
  }
  assert {
    condition     = aws_s3_bucket.main["bundles"].object_lock_enabled && !aws_s3_bucket.main["mlflow"].object_lock_enabled
    error_message = "Bundles are not write-once, or MLflow can delete nothing."
  }
  assert {
    condition     = alltrue([for block in aws_s3_bucket_public_access_block.main : block.block_public_policy && block.restrict_public_buckets])
    error_message = "A bucket can be made public."
  }
  assert {
    condition     = aws_eks_cluster.main.access_config[0].authentication_mode == "API" && !aws_eks_cluster.main.vpc_config[0].endpoint_public_access
    error_message = "The cluster's API is open, or has other ways in than access entries."
  }
  assert {
    condition     = aws_cloudwatch_log_group.cluster.name == "/aws/eks/checkout-test/cluster" && aws_cloudwatch_log_group.cluster.retention_in_days == 30
    error_message = "EKS makes a log of its own, which is kept and billed for ever."
  }
  assert {
    condition     = aws_cloudwatch_log_group.database.name == "/aws/rds/instance/${aws_db_instance.mlflow.identifier}/postgresql" && aws_cloudwatch_log_group.database.retention_in_days == 30
    error_message = "RDS makes a log of its own, which is kept and billed for ever."
  }
  assert {
    condition     = endswith(aws_db_instance.mlflow.final_snapshot_identifier, trimprefix(aws_vpc.main.id, "vpc-"))
    error_message = "The second database of a profile cannot be destroyed: its last snapshot has the name of the first's."
  }
  assert {
    condition     = aws_efs_backup_policy.shared.backup_policy[0].status == "ENABLED"
    error_message = "There is one copy of the prediction log and of the archive."
  }
  assert {
    condition     = alltrue([for addon in aws_eks_addon.main : addon.resolve_conflicts_on_create == "OVERWRITE"])
    error_message = "A new cluster's own add-ons stop the first apply."
  }
  assert {
    condition = (
      aws_eks_addon.disks[0].addon_name == "aws-ebs-csi-driver" &&
      jsondecode(aws_eks_addon.disks[0].configuration_values).defaultStorageClass.enabled &&
      one(aws_eks_addon.disks[0].pod_identity_association[*].service_account) == "ebs-csi-controller-sa" &&
      endswith(aws_iam_role_policy_attachment.disks[0].policy_arn, "/service-role/AmazonEBSCSIDriverPolicy")
    )
    error_message = "A claim for a disk stays pending: no driver, no rights or no default class."
  }
  assert {
    condition     = alltrue([for repository in aws_ecr_repository.main : repository.image_tag_mutability == "IMMUTABLE"])
    error_message = "A tag of an image can be moved."
  }
  assert {
    condition     = aws_elasticache_replication_group.store.transit_encryption_enabled && aws_db_instance.mlflow.storage_encrypted && !aws_db_instance.mlflow.publicly_accessible
    error_message = "Shoppers' rows or runs can be read on their way, or from outside."
  }
  assert {
    condition     = aws_eks_node_group.gpu[0].scaling_config[0].min_size == 0 && one(aws_eks_node_group.gpu[0].taint[*].key) == "nvidia.com/gpu"
    error_message = "GPUs are paid for while no pod asks for one."
  }
}

run "auto_mode" {
  command = plan
  variables {
    auto_mode = true
  }
  assert {
    condition     = length(aws_eks_node_group.general) == 0 && length(aws_iam_role.autoscaler) == 0 && length(aws_eks_addon.main) + length(aws_eks_addon.disks) == 0 && aws_eks_cluster.main.compute_config[0].enabled
    error_message = "Auto Mode beside node groups."
  }
  assert {
    condition     = aws_eks_cluster.main.bootstrap_self_managed_addons # as `everything` made it
    error_message = "Auto Mode on a live cluster replaces the cluster."
  }
}

run "small" {
  command = plan
  variables {
    zones             = 2
    nat_per_zone      = false
    kafka             = null
    github_repository = ""
    gpu_nodes         = { type = "g6.xlarge", max = 0 }
  }
  assert {
    condition     = length(aws_nat_gateway.main) == 1 && length(aws_msk_cluster.events) == 0 && length(aws_eks_node_group.gpu) == 0 && length(aws_eks_access_entry.release) == 0 && length(local.workflows) == 0
    error_message = "The small profile pays for more than it names."
  }
}

run "production" {
  command = plan
  variables {
    environment = "production"
  }
  assert {
    condition     = sort(keys(local.workflows)) == tolist(["ci-images", "ci-release"])
    error_message = "A branch reads the state of production."
  }
}

run "from_outside" {
  command = plan
  variables {
    api_cidrs = ["203.0.113.7/32"]
  }
  assert {
    condition     = aws_eks_cluster.main.vpc_config[0].endpoint_public_access && aws_eks_cluster.main.vpc_config[0].public_access_cidrs == toset(["203.0.113.7/32"])
    error_message = "kubectl reaches the API from other networks than api_cidrs, or from none."
  }
}

run "refused" {
  command = plan
  variables {
    environment    = "Production!"
    store_password = "short"
    api_cidrs      = ["0.0.0.0/0"]
    zones          = 1
    state_bucket   = ""
  }
  expect_failures = [var.environment, var.store_password, var.api_cidrs, var.zones, var.state_bucket]
}

run "a_password_that_elasticache_refuses" {
  command = plan
  variables {
    store_password = "0123456789abcdef0123456789abcde@"
  }
  expect_failures = [var.store_password]
}
