# One role a workload, for its service account alone (EKS Pod Identity).
locals {
  bucket = { for name, bucket in aws_s3_bucket.main : name => bucket.arn }
  write  = ["s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:AbortMultipartUpload"]
  key    = { actions = ["kms:Decrypt", "kms:GenerateDataKey"], resources = [aws_kms_key.data.arn] }

  autoscaler = { namespace = "kube-system", service_account = "cluster-autoscaler" }

  workloads = {
    endpoint = {
      namespace       = "checkout"
      service_account = "checkout"
      statements = [
        { actions = ["s3:GetObject", "s3:ListBucket"], resources = [local.bucket.bundles, "${local.bucket.bundles}/*"] },
        { actions = ["kms:Decrypt"], resources = [aws_kms_key.data.arn] },
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

resource "aws_eks_pod_identity_association" "workload" {
  for_each        = local.workloads
  cluster_name    = aws_eks_cluster.main.name
  namespace       = each.value.namespace
  service_account = each.value.service_account
  role_arn        = aws_iam_role.main[each.key].arn
}
