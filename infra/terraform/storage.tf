# bundles: written once, see bundle_lock_days. mlflow: its artifacts. Events and logs are in aws_efs_file_system.shared.
resource "aws_s3_bucket" "main" {
  for_each            = toset(["bundles", "mlflow"])
  bucket              = "${local.name}-${each.key}-${data.aws_caller_identity.current.account_id}"
  object_lock_enabled = each.key == "bundles"
}

resource "aws_s3_bucket_versioning" "main" {
  for_each = aws_s3_bucket.main
  bucket   = each.value.id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_public_access_block" "main" {
  for_each                = aws_s3_bucket.main
  bucket                  = each.value.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "main" {
  for_each = aws_s3_bucket.main
  bucket   = each.value.id
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.data.arn
    }
  }
}

resource "aws_s3_bucket_object_lock_configuration" "bundles" {
  bucket = aws_s3_bucket.main["bundles"].id
  rule {
    default_retention {
      mode = "GOVERNANCE"
      days = var.bundle_lock_days
    }
  }
  depends_on = [aws_s3_bucket_versioning.main]
}

resource "aws_s3_bucket_lifecycle_configuration" "main" {
  for_each = aws_s3_bucket.main
  bucket   = each.value.id
  rule {
    id     = "old-versions"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = each.key == "bundles" ? var.bundle_lock_days + 1 : 30
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
  depends_on = [aws_s3_bucket_versioning.main]
}

data "aws_iam_policy_document" "tls_only" {
  for_each = aws_s3_bucket.main
  statement {
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [each.value.arn, "${each.value.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "tls_only" {
  for_each   = aws_s3_bucket.main
  bucket     = each.value.id
  policy     = data.aws_iam_policy_document.tls_only[each.key].json
  depends_on = [aws_s3_bucket_public_access_block.main]
}

resource "aws_ecr_repository" "main" {
  for_each             = toset(["checkout-endpoint", "checkout-pipeline"])
  name                 = "${var.environment}/${each.key}"
  image_tag_mutability = "IMMUTABLE"
  image_scanning_configuration {
    scan_on_push = true
  }
  encryption_configuration {
    encryption_type = "KMS"
    kms_key         = aws_kms_key.data.arn
  }
}

# The folder that pods share: the prediction log, the archive of events, and the state of pipelines and releases.
resource "aws_efs_file_system" "shared" {
  encrypted  = true
  kms_key_id = aws_kms_key.data.arn
  tags       = { Name = local.name }
}

resource "aws_efs_backup_policy" "shared" {
  file_system_id = aws_efs_file_system.shared.id
  backup_policy {
    status = "ENABLED"
  }
}

resource "aws_efs_mount_target" "shared" {
  for_each        = aws_subnet.private
  file_system_id  = aws_efs_file_system.shared.id
  subnet_id       = each.value.id
  security_groups = [aws_security_group.service["files"].id]
}
