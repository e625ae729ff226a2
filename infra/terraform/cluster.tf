data "aws_iam_policy_document" "assume" {
  for_each = toset(["eks", "ec2"])
  statement {
    actions = each.key == "eks" ? ["sts:AssumeRole", "sts:TagSession"] : ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["${each.key}.amazonaws.com"]
    }
  }
}

locals {
  # Managed policies of AWS: EKS works with these and with nothing else.
  cluster_policies = var.auto_mode ? [
    "AmazonEKSClusterPolicy", "AmazonEKSComputePolicy", "AmazonEKSBlockStoragePolicy",
    "AmazonEKSLoadBalancingPolicy", "AmazonEKSNetworkingPolicy",
  ] : ["AmazonEKSClusterPolicy"]
  node_policies = var.auto_mode ? ["AmazonEKSWorkerNodeMinimalPolicy", "AmazonEC2ContainerRegistryPullOnly"] : [
    "AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryPullOnly",
  ]
  managed = "arn:${data.aws_partition.current.partition}:iam::aws:policy"
}

resource "aws_iam_role" "cluster" {
  name               = "${local.name}-cluster"
  assume_role_policy = data.aws_iam_policy_document.assume["eks"].json
}

resource "aws_iam_role_policy_attachment" "cluster" {
  for_each   = toset(local.cluster_policies)
  role       = aws_iam_role.cluster.name
  policy_arn = "${local.managed}/${each.key}"
}

resource "aws_iam_role" "node" {
  name               = "${local.name}-node"
  assume_role_policy = data.aws_iam_policy_document.assume["ec2"].json
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each   = toset(local.node_policies)
  role       = aws_iam_role.node.name
  policy_arn = "${local.managed}/${each.key}"
}

# Else EKS makes the group itself, which keeps every line for ever and outlives the cluster.
resource "aws_cloudwatch_log_group" "cluster" {
  name              = "/aws/eks/${local.name}/cluster"
  retention_in_days = 30
}

resource "aws_eks_cluster" "main" {
  name                          = local.name
  version                       = var.kubernetes_version
  role_arn                      = aws_iam_role.cluster.arn
  bootstrap_self_managed_addons = !var.auto_mode
  enabled_cluster_log_types     = ["api", "audit", "authenticator", "controllerManager", "scheduler"]

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = false
  }
  vpc_config {
    subnet_ids              = [for subnet in aws_subnet.private : subnet.id]
    endpoint_private_access = true
    endpoint_public_access  = length(var.api_cidrs) > 0
    public_access_cidrs     = length(var.api_cidrs) > 0 ? var.api_cidrs : null
  }
  encryption_config {
    resources = ["secrets"]
    provider {
      key_arn = aws_kms_key.data.arn
    }
  }
  upgrade_policy {
    support_type = "STANDARD"
  }
  lifecycle {
    ignore_changes = [bootstrap_self_managed_addons] # of a new cluster alone: a change would replace the cluster
  }
  # Auto Mode: these three are on together, or off together.
  dynamic "compute_config" {
    for_each = var.auto_mode ? [1] : []
    content {
      enabled       = true
      node_pools    = ["general-purpose", "system"]
      node_role_arn = aws_iam_role.node.arn
    }
  }
  dynamic "kubernetes_network_config" {
    for_each = var.auto_mode ? [1] : []
    content {
      elastic_load_balancing {
        enabled = true
      }
    }
  }
  dynamic "storage_config" {
    for_each = var.auto_mode ? [1] : []
    content {
      block_storage {
        enabled = true
      }
    }
  }
  depends_on = [aws_iam_role_policy_attachment.cluster, aws_cloudwatch_log_group.cluster]
}

resource "aws_eks_access_entry" "admin" {
  for_each      = toset(var.admins)
  cluster_name  = aws_eks_cluster.main.name
  principal_arn = each.key
}

resource "aws_eks_access_policy_association" "admin" {
  for_each      = toset(var.admins)
  cluster_name  = aws_eks_cluster.main.name
  principal_arn = each.key
  policy_arn    = "arn:${data.aws_partition.current.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
  access_scope {
    type = "cluster"
  }
  depends_on = [aws_eks_access_entry.admin]
}

resource "aws_eks_addon" "main" {
  for_each     = var.auto_mode ? toset([]) : toset(["vpc-cni", "coredns", "kube-proxy", "eks-pod-identity-agent"])
  cluster_name = aws_eks_cluster.main.name
  addon_name   = each.key
  # A new cluster has these already, self-managed: take them over.
  resolve_conflicts_on_create = "OVERWRITE"
  # The CNI enforces infra/kserve/base/network.yaml only if it is told to.
  configuration_values = each.key == "vpc-cni" ? jsonencode({ enableNetworkPolicy = "true" }) : null
}

# The driver that mounts aws_efs_file_system.shared; Auto Mode brings none.
data "aws_iam_policy_document" "files_trust" {
  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"]
    principals {
      type        = "Service"
      identifiers = ["pods.eks.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "files" {
  name               = "${local.name}-files"
  assume_role_policy = data.aws_iam_policy_document.files_trust.json
}

resource "aws_iam_role_policy_attachment" "files" {
  role       = aws_iam_role.files.name
  policy_arn = "${local.managed}/service-role/AmazonEFSCSIDriverPolicy"
}

resource "aws_eks_addon" "files" {
  cluster_name = aws_eks_cluster.main.name
  addon_name   = "aws-efs-csi-driver"
  pod_identity_association {
    role_arn        = aws_iam_role.files.arn
    service_account = "efs-csi-controller-sa"
  }
  depends_on = [aws_eks_addon.main]
}

# The driver of disks, with a default StorageClass for them: Prometheus needs one. Auto Mode brings its own driver.
resource "aws_iam_role" "disks" {
  count              = var.auto_mode ? 0 : 1
  name               = "${local.name}-disks"
  assume_role_policy = data.aws_iam_policy_document.files_trust.json
}

resource "aws_iam_role_policy_attachment" "disks" {
  count      = var.auto_mode ? 0 : 1
  role       = aws_iam_role.disks[0].name
  policy_arn = "${local.managed}/service-role/AmazonEBSCSIDriverPolicy"
}

resource "aws_eks_addon" "disks" {
  count                = var.auto_mode ? 0 : 1
  cluster_name         = aws_eks_cluster.main.name
  addon_name           = "aws-ebs-csi-driver"
  configuration_values = jsonencode({ defaultStorageClass = { enabled = true } }) # of gp3
  pod_identity_association {
    role_arn        = aws_iam_role.disks[0].arn
    service_account = "ebs-csi-controller-sa"
  }
  depends_on = [aws_eks_addon.main]
}

# Cluster Autoscaler sets the size of the node groups; Auto Mode needs none. It may change the groups of this cluster
# alone: EKS gives them this tag.
data "aws_iam_policy_document" "autoscaler" {
  statement {
    actions = [
      "autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeAutoScalingInstances",
      "autoscaling:DescribeLaunchConfigurations", "autoscaling:DescribeScalingActivities", "autoscaling:DescribeTags",
      "ec2:DescribeImages", "ec2:DescribeInstanceTypes", "ec2:DescribeLaunchTemplateVersions",
      "ec2:GetInstanceTypesFromInstanceRequirements",
    ]
    resources = ["*"] # these actions know no resource
  }
  statement {
    actions   = ["eks:DescribeNodegroup"]
    resources = ["arn:${data.aws_partition.current.partition}:eks:${var.region}:${data.aws_caller_identity.current.account_id}:nodegroup/${local.name}/*"]
  }
  statement {
    actions   = ["autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup"]
    resources = ["arn:${data.aws_partition.current.partition}:autoscaling:${var.region}:${data.aws_caller_identity.current.account_id}:autoScalingGroup:*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/k8s.io/cluster-autoscaler/${local.name}"
      values   = ["owned"]
    }
  }
}

resource "aws_iam_role" "autoscaler" {
  count              = var.auto_mode ? 0 : 1
  name               = "${local.name}-autoscaler"
  assume_role_policy = data.aws_iam_policy_document.pod_identity["autoscaler"].json
}

resource "aws_iam_role_policy" "autoscaler" {
  count  = var.auto_mode ? 0 : 1
  role   = aws_iam_role.autoscaler[0].id
  policy = data.aws_iam_policy_document.autoscaler.json
}

resource "aws_eks_pod_identity_association" "autoscaler" {
  count           = var.auto_mode ? 0 : 1
  cluster_name    = aws_eks_cluster.main.name
  namespace       = local.autoscaler.namespace
  service_account = local.autoscaler.service_account
  role_arn        = aws_iam_role.autoscaler[0].arn
}

# Pods may not ask the metadata service for the node's role: one hop.
resource "aws_launch_template" "node" {
  name_prefix = "${local.name}-"
  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size = 80
      volume_type = "gp3"
      encrypted   = true
    }
  }
}

resource "aws_eks_node_group" "general" {
  count                  = var.auto_mode ? 0 : 1
  cluster_name           = aws_eks_cluster.main.name
  node_group_name_prefix = "general-"
  version                = aws_eks_cluster.main.version
  node_role_arn          = aws_iam_role.node.arn
  subnet_ids             = [for subnet in aws_subnet.private : subnet.id]
  instance_types         = [var.nodes.type]
  scaling_config {
    desired_size = var.nodes.min
    min_size     = var.nodes.min
    max_size     = var.nodes.max
  }
  launch_template {
    id      = aws_launch_template.node.id
    version = aws_launch_template.node.latest_version
  }
  lifecycle {
    create_before_destroy = true                             # another type or zone is another group: pods move to it
    ignore_changes        = [scaling_config[0].desired_size] # Cluster Autoscaler's
  }
  depends_on = [aws_iam_role_policy_attachment.node]
}

resource "aws_eks_node_group" "gpu" {
  count                  = !var.auto_mode && var.gpu_nodes.max > 0 ? 1 : 0
  cluster_name           = aws_eks_cluster.main.name
  node_group_name_prefix = "gpu-"
  version                = aws_eks_cluster.main.version
  node_role_arn          = aws_iam_role.node.arn
  subnet_ids             = [for subnet in aws_subnet.private : subnet.id]
  instance_types         = [var.gpu_nodes.type]
  ami_type               = "AL2023_x86_64_NVIDIA"
  scaling_config {
    desired_size = 0
    min_size     = 0
    max_size     = var.gpu_nodes.max
  }
  launch_template {
    id      = aws_launch_template.node.id
    version = aws_launch_template.node.latest_version
  }
  taint {
    key    = "nvidia.com/gpu"
    value  = "present"
    effect = "NO_SCHEDULE"
  }
  lifecycle {
    create_before_destroy = true
    ignore_changes        = [scaling_config[0].desired_size]
  }
  depends_on = [aws_iam_role_policy_attachment.node]
}
