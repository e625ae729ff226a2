output "buckets" {
  value = { for name, bucket in aws_s3_bucket.main : name => bucket.bucket }
}

output "repositories" {
  value = { for name, repository in aws_ecr_repository.main : name => repository.repository_url }
}

output "store_url" {
  description = "RECO_STORE_URL of infra/kserve/overlays; the password is RECO_STORE_PASSWORD."
  value       = "rediss+cluster://${aws_elasticache_replication_group.store.configuration_endpoint_address}:6379"
}

output "kafka" {
  description = "RECO_KAFKA_BOOTSTRAP."
  value       = one(aws_msk_cluster.events[*].bootstrap_brokers_sasl_scram)
}

output "mlflow_database" {
  value = aws_db_instance.mlflow.endpoint
}

output "file_system" {
  description = "fileSystemId of infra/kserve/overlays."
  value       = aws_efs_file_system.shared.id
}

output "workflow_roles" {
  description = "Variables AWS_IMAGES_ROLE, AWS_RELEASE_ROLE and AWS_PLAN_ROLE of the GitHub environments."
  value       = { for name in keys(local.workflows) : name => aws_iam_role.main[name].arn }
}
