# Everything that the recommender needs in one AWS account and region, for one environment.
terraform {
  required_version = ">= 1.10" # use_lockfile
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
  # The state holds the store's password: keep it in a private, versioned bucket of its own, one key a profile.
  # docs/how-to/cluster.md has the command that names both.
  backend "s3" {
    use_lockfile = true
    encrypt      = true
  }
}

provider "aws" {
  region = var.region
  default_tags {
    tags = { application = "checkout-recommender", environment = var.environment }
  }
}

locals {
  name  = "checkout-${var.environment}"
  zones = slice(data.aws_availability_zones.available.names, 0, var.zones)
}

data "aws_availability_zones" "available" {
  state = "available"
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

# One key for all data at rest. Whoever administers the account administers the key.
data "aws_iam_policy_document" "key" {
  statement {
    actions   = ["kms:*"]
    resources = ["*"] # of a key's own policy: this key
    principals {
      type        = "AWS"
      identifiers = ["arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:root"]
    }
  }
}

resource "aws_kms_key" "data" {
  description             = "Data of ${local.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.key.json
}
