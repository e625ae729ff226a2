# The roles of workloads (EKS Pod Identity) and of GitHub's workflows (OpenID Connect). A workflow's role trusts one
# GitHub environment: its reviewers say when, and .github/workflows names it.
locals {
  all_workflows = {
    ci-images = {
      environment = "images"
      statements = [
        { actions = ["ecr:GetAuthorizationToken"], resources = ["*"] }, # the action knows no resource
        {
          actions = [
            "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload",
            "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart",
          ]
          resources = [for repository in aws_ecr_repository.main : repository.arn]
        },
      ]
    }
    # Inside the cluster it has the rights of its group: see aws_eks_access_entry.release.
    ci-release = {
      environment = var.environment
      statements  = [{ actions = ["eks:DescribeCluster"], resources = [aws_eks_cluster.main.arn] }]
    }
    # A plan without refresh reads the state, and asks AWS for the zones alone. No workflow plans production: its state
    # would be open to each branch, because GitHub makes an environment without reviewers when a job first names it.
    ci-plan = {
      environment = "${var.environment}-plan"
      statements = [
        { actions = ["s3:ListBucket"], resources = [local.state] },
        { actions = ["s3:GetObject"], resources = ["${local.state}/${var.environment}"] },
        { actions = ["ec2:DescribeAvailabilityZones"], resources = ["*"] }, # the action knows no resource
      ]
    }
  }
  workflows = {
    for name, workflow in local.all_workflows : name => workflow
    if var.github_repository != "" && !(name == "ci-plan" && var.environment == "production")
  }
  roles    = merge(local.workloads, local.workflows)
  state    = "arn:${data.aws_partition.current.partition}:s3:::${var.state_bucket}"
  makes    = var.github_repository != "" && var.github_provider == ""
  provider = local.makes ? aws_iam_openid_connect_provider.github[0].arn : var.github_provider
}

resource "aws_iam_openid_connect_provider" "github" {
  count          = local.makes ? 1 : 0
  url            = "https://token.actions.githubusercontent.com"
  client_id_list = ["sts.amazonaws.com"]
}

data "aws_iam_policy_document" "github" {
  for_each = local.workflows
  statement {
    actions = ["sts:AssumeRoleWithWebIdentity"]
    principals {
      type        = "Federated"
      identifiers = [local.provider]
    }
    condition {
      test     = "StringEquals"
      variable = "token.actions.githubusercontent.com:aud"
      values   = ["sts.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "token.actions.githubusercontent.com:sub"
      values   = ["repo:${var.github_repository}:environment:${each.value.environment}"]
    }
  }
}

data "aws_iam_policy_document" "permissions" {
  for_each = local.roles
  dynamic "statement" {
    for_each = each.value.statements
    content {
      actions   = statement.value.actions
      resources = statement.value.resources
    }
  }
}

resource "aws_iam_role" "main" {
  for_each             = local.roles
  name                 = "${local.name}-${each.key}"
  assume_role_policy   = merge(data.aws_iam_policy_document.pod_identity, data.aws_iam_policy_document.github)[each.key].json
  max_session_duration = each.key == "ci-release" ? 21600 : 3600 # the workflow follows its Job to the end
}

resource "aws_iam_role_policy" "main" {
  for_each = local.roles
  role     = aws_iam_role.main[each.key].id
  policy   = data.aws_iam_policy_document.permissions[each.key].json
}

# No policy of EKS: the Role start-release of infra/kserve/release binds this group, in its namespace alone.
resource "aws_eks_access_entry" "release" {
  count             = var.github_repository == "" ? 0 : 1
  cluster_name      = aws_eks_cluster.main.name
  principal_arn     = aws_iam_role.main["ci-release"].arn
  kubernetes_groups = ["checkout-ci"]
}
