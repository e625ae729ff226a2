region      = "eu-central-1"
environment = "production"
admins      = ["arn:aws:iam::000000000000:role/platform"]
api_cidrs   = ["203.0.113.7/32"] # yours: without it kubectl reaches the API from the VPC alone
nodes       = { type = "m7i.2xlarge", min = 3, max = 40 }
gpu_nodes   = { type = "g6.xlarge", max = 2 }
valkey      = { type = "cache.r7g.large", shards = 3, replicas = 1 }
kafka       = { type = "kafka.m7g.large", brokers_per_zone = 1, gib = 200, secret_arns = ["arn:aws:secretsmanager:eu-central-1:000000000000:secret:AmazonMSK_reco"] }
database    = { type = "db.t4g.medium", gib = 50, standby = true }
