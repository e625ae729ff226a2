# Shoppers' rows and facts. The events can be replayed: no snapshots.
resource "aws_elasticache_subnet_group" "main" {
  name       = local.name
  subnet_ids = [for subnet in aws_subnet.private : subnet.id]
}

resource "aws_elasticache_replication_group" "store" {
  replication_group_id       = local.name
  description                = "Online store of ${local.name}"
  engine                     = "valkey"
  engine_version             = "8.0"
  node_type                  = var.valkey.type
  parameter_group_name       = "default.valkey8.cluster.on"
  num_node_groups            = var.valkey.shards
  replicas_per_node_group    = var.valkey.replicas
  automatic_failover_enabled = true
  multi_az_enabled           = var.valkey.replicas > 0
  subnet_group_name          = aws_elasticache_subnet_group.main.name
  security_group_ids         = [aws_security_group.service["valkey"].id]
  transit_encryption_enabled = true
  at_rest_encryption_enabled = true
  kms_key_id                 = aws_kms_key.data.arn
  auth_token                 = var.store_password
}

# Events and facts, SASL/SCRAM over TLS: RECO_KAFKA_SECURITY=sasl_tls.
resource "aws_msk_cluster" "events" {
  count                  = var.kafka == null ? 0 : 1
  cluster_name           = local.name
  kafka_version          = "3.8.x"
  number_of_broker_nodes = var.kafka.brokers_per_zone * var.zones
  broker_node_group_info {
    instance_type   = var.kafka.type
    client_subnets  = [for subnet in aws_subnet.private : subnet.id]
    security_groups = [aws_security_group.service["kafka"].id]
    storage_info {
      ebs_storage_info {
        volume_size = var.kafka.gib
      }
    }
  }
  client_authentication {
    sasl {
      scram = true
    }
  }
  encryption_info {
    encryption_at_rest_kms_key_arn = aws_kms_key.data.arn
    encryption_in_transit {
      client_broker = "TLS"
      in_cluster    = true
    }
  }
  logging_info {
    broker_logs {
      cloudwatch_logs {
        enabled   = true
        log_group = aws_cloudwatch_log_group.kafka[0].name
      }
    }
  }
}

resource "aws_cloudwatch_log_group" "kafka" {
  count             = var.kafka == null ? 0 : 1
  name              = "/${local.name}/kafka"
  retention_in_days = 30
}

resource "aws_msk_scram_secret_association" "events" {
  count           = var.kafka == null ? 0 : 1
  cluster_arn     = aws_msk_cluster.events[0].arn
  secret_arn_list = var.kafka.secret_arns
}

# Runs, metrics and the registry of MLflow. AWS makes the password and changes it.
resource "aws_db_subnet_group" "mlflow" {
  name       = "${local.name}-mlflow"
  subnet_ids = [for subnet in aws_subnet.private : subnet.id]
}

resource "aws_db_instance" "mlflow" {
  identifier                          = "${local.name}-mlflow"
  engine                              = "postgres"
  engine_version                      = "17"
  instance_class                      = var.database.type
  allocated_storage                   = var.database.gib
  max_allocated_storage               = 4 * var.database.gib
  storage_type                        = "gp3"
  storage_encrypted                   = true
  kms_key_id                          = aws_kms_key.data.arn
  db_name                             = "mlflow"
  username                            = "mlflow"
  manage_master_user_password         = true
  master_user_secret_kms_key_id       = aws_kms_key.data.arn
  iam_database_authentication_enabled = true
  publicly_accessible                 = false
  multi_az                            = var.database.standby
  db_subnet_group_name                = aws_db_subnet_group.mlflow.name
  vpc_security_group_ids              = [aws_security_group.service["database"].id]
  backup_retention_period             = 14
  auto_minor_version_upgrade          = true
  copy_tags_to_snapshot               = true
  deletion_protection                 = true
  skip_final_snapshot                 = false
  final_snapshot_identifier           = "${local.name}-mlflow-last-${trimprefix(aws_vpc.main.id, "vpc-")}" # of this VPC: the next has its own
  enabled_cloudwatch_logs_exports     = ["postgresql"]
  depends_on                          = [aws_cloudwatch_log_group.database]
}

# RDS would make it without an end, and it would outlive the database.
resource "aws_cloudwatch_log_group" "database" {
  name              = "/aws/rds/instance/${local.name}-mlflow/postgresql"
  retention_in_days = 30
}
