# One role a workload, for its service account alone (EKS Pod Identity).
locals {
  bucket = { for name, bucket in aws_s3_bucket.main : name => bucket.arn }
  read   = ["s3:GetObject", "s3:ListBucket"]
  write  = ["s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:AbortMultipartUpload"]
  key    = { actions = ["kms:Decrypt", "kms:GenerateDataKey"], resources = [aws_kms_key.data.arn] }

  autoscaler = { namespace = "kube-system", service_account = "cluster-autoscaler" }

  workloads = {
    endpoint = {
      namespace       = "checkout"
      service_account = "checkout"
      statements = [
        { actions = local.read, resources = [local.bucket.bundles, "${local.bucket.bundles}/*"] },
        { actions = ["kms:Decrypt"], resources = [aws_kms_key.data.arn] },
      ]
    }
    pipeline = {
      namespace       = "kubeflow"
      service_account = "pipeline-runner"
      statements = [
        { actions = local.write, resources = [local.bucket.data, "${local.bucket.data}/*"] },
        { actions = local.read, resources = [local.bucket.bundles, "${local.bucket.bundles}/*"] },
        local.key,
      ]
    }
    mlflow = {
      namespace       = "mlflow"
      service_account = "mlflow"
      statements = [
        {
          actions   = concat(local.write, ["s3:DeleteObject"])
          resources = [local.bucket.mlflow, "${local.bucket.mlflow}/*"]
        },
        {
          actions   = ["secretsmanager:GetSecretValue"]
          resources = [aws_db_instance.mlflow.master_user_secret[0].secret_arn]
        },
        local.key,
      ]
    }
    # Publishes a bundle, once: it may not delete, and not shorten the lock.
    release = {
      namespace       = "checkout"
      service_account = "release"
      statements = [
        { actions = local.write, resources = [local.bucket.bundles, "${local.bucket.bundles}/*"] },
        local.key,
      ]
    }
  }
}

data "aws_iam_policy_document" "pod_identity" {
  for_each = merge(local.workloads, { autoscaler = local.autoscaler })
  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"]
    principals {
      type        = "Service"
      identifiers = ["pods.eks.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/eks-cluster-name"
      values   = [local.name]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/kubernetes-namespace"
      values   = [each.value.namespace]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/kubernetes-service-account"
      values   = [each.value.service_account]
    }
  }
}

data "aws_iam_policy_document" "workload" {
  for_each = local.workloads
  dynamic "statement" {
    for_each = each.value.statements
    content {
      actions   = statement.value.actions
      resources = statement.value.resources
    }
  }
}

resource "aws_iam_role" "workload" {
  for_each           = local.workloads
  name               = "${local.name}-${each.key}"
  assume_role_policy = data.aws_iam_policy_document.pod_identity[each.key].json
}

resource "aws_iam_role_policy" "workload" {
  for_each = local.workloads
  role     = aws_iam_role.workload[each.key].id
  policy   = data.aws_iam_policy_document.workload[each.key].json
}

resource "aws_eks_pod_identity_association" "workload" {
  for_each        = local.workloads
  cluster_name    = aws_eks_cluster.main.name
  namespace       = each.value.namespace
  service_account = each.value.service_account
  role_arn        = aws_iam_role.workload[each.key].arn
}

# Workflows of one GitHub environment push images; the environment's reviewers say when.
resource "aws_iam_openid_connect_provider" "github" {
  count          = var.github_repository == "" ? 0 : 1
  url            = "https://token.actions.githubusercontent.com"
  client_id_list = ["sts.amazonaws.com"]
}

data "aws_iam_policy_document" "github_trust" {
  count = var.github_repository == "" ? 0 : 1
  statement {
    actions = ["sts:AssumeRoleWithWebIdentity"]
    principals {
      type        = "Federated"
      identifiers = [aws_iam_openid_connect_provider.github[0].arn]
    }
    condition {
      test     = "StringEquals"
      variable = "token.actions.githubusercontent.com:aud"
      values   = ["sts.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "token.actions.githubusercontent.com:sub"
      values   = ["repo:${var.github_repository}:environment:${var.environment}"]
    }
  }
}

data "aws_iam_policy_document" "github" {
  statement {
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"] # the action knows no resource
  }
  statement {
    actions = [
      "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload",
      "ecr:PutImage", "ecr:UploadLayerPart",
    ]
    resources = [for repository in aws_ecr_repository.main : repository.arn]
  }
}

resource "aws_iam_role" "github" {
  count              = var.github_repository == "" ? 0 : 1
  name               = "${local.name}-github"
  assume_role_policy = data.aws_iam_policy_document.github_trust[0].json
}

resource "aws_iam_role_policy" "github" {
  count  = var.github_repository == "" ? 0 : 1
  role   = aws_iam_role.github[0].id
  policy = data.aws_iam_policy_document.github.json
}
